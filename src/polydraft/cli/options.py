"""Options of commands, derived from dataclasses (`polydraft.described`): each field is an option, and its docstring the help.

Fields that only experts need have no flag of their own; `--set NAME=VALUE` sets them. Importing this module does not import
torch, so that help appears at once.
"""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import click

from polydraft.described import Option, options_in
from polydraft.errors import UsageError, check_ranges, unknown_name
from polydraft.options import LoadOptions, NgramOptions, PlaceOptions

if TYPE_CHECKING:
    import torch

    from polydraft.engine import Decoder
    from polydraft.sampling import SamplingParams

Decorator = Callable[[Any], Any]
Kind = TypeVar("Kind")
_MOST_THREADS = 1024
_EXPERT = {option.name for option in options_in(NgramOptions)} - {"corpus"} | {"stop_below", "graphs", "invariant"}
"""Fields of decoders that have no flag; `--set` sets them."""
_SAMPLING = "polydraft.sampling.params:SamplingParams"
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters that have flags; Hugging Face `generate` uses the same names."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
raw_option = click.option("--raw", is_flag=True, help="Use prompts as they are, without the chat template.")
prompts_option = click.option(
    "--prompts",
    "source",
    default="builtin",
    show_default=True,
    help="builtin, a file or a folder of files, or hf:NAME[:SPLIT].",
)


class GroupedOption(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *names: Any, heading: str, **arguments: Any) -> None:
        super().__init__(*names, **arguments)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose help lists the most common options first, and the rest under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one section per heading."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "Sampling": []}
        for parameter in self.get_params(ctx):
            heading = parameter.heading if isinstance(parameter, GroupedOption) else "Options"
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class _Settings(GroupedOption):
    """`--set NAME=VALUE`, for fields that have no flag of their own."""

    def __init__(self, *names: Any, fields: Sequence[Option], **arguments: Any) -> None:
        super().__init__(*names, **arguments)
        # Use the names that users write in messages about wrong values.
        named = [dataclasses.replace(field, short=field.name.removeprefix("no_")) for field in fields]
        self._fields = {field.short: field for field in named}

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> tuple[Any, list[str]]:
        """Add all fields to the command's options, with the values given or their defaults."""
        given, args = super().handle_parse_result(ctx, opts, args)
        if "help" in (given or ()):
            self._describe(ctx)
        ctx.params |= {field.name: field.default for field in self._fields.values()}
        ctx.params |= dict(self._read(text) for text in given or ())
        return given, args

    def _read(self, text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        field = self._fields.get(name.strip().replace("-", "_"))
        if field is None:
            raise unknown_name("name in --set", name, self._fields)
        if not equals:
            raise UsageError(f"--set {name} has no value; write --set {_entry(field)}")
        return field.name, field.read(value.strip())

    def _describe(self, ctx: click.Context) -> None:
        """Print the help of all settings, and exit."""
        formatter = ctx.make_formatter()
        with formatter.section("Settings, as --set NAME=VALUE"):
            formatter.write_dl([(_entry(field), _described(field)) for field in self._fields.values()])
        click.echo(formatter.getvalue().rstrip())
        ctx.exit()


def _entry(field: Option) -> str:
    """Return how to set a field, such as ``nodes=INTEGER``."""
    kinds = {bool: "no" if field.name.startswith("no_") else "yes|no", int: "INTEGER", float: "FLOAT"}
    return f"{field.short}={kinds.get(field.kind, 'TEXT')}"


def _described(field: Option) -> str:
    """Return a field's help, with its default if it has one."""
    if field.default is None or field.default is False:
        return field.help
    return f"{field.help}  [default: {'yes' if field.default is True else field.default}]"


def settings_of(*kinds: type[Any], only: Collection[str]) -> Decorator:
    """Return a decorator that adds `--set` for some fields of dataclasses."""
    fields = [option for kind in kinds for option in options_in(kind) if option.name in only]
    names = ", ".join(field.name.removeprefix("no_") for field in fields)
    return click.option(
        "--set",
        "settings",
        cls=_Settings,
        fields=fields,
        heading="Expert settings",
        metavar="NAME=VALUE",
        multiple=True,
        expose_value=False,
        is_eager=True,
        help=f"Set one of these ('--set help' describes them; may be given several times): {names}.",
    )


def with_options(options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that adds options to a command, in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def options_of(
    kind: type[Any], *, only: Collection[str] | None = None, skip: Collection[str] = (), **changes: dict[str, Any]
) -> Decorator:
    """Return a decorator that adds one option per field of a dataclass, those of its first base class first.

    Parameters
    ----------
    kind : type
        A dataclass; the first lines of its and its bases' docstrings become headings.
    only, skip : collection of str
        Fields to add (all by default), and fields to leave out.
    **changes : dict
        By field: arguments of `click.option` that replace the derived ones, and `flag` to name the option.
    """
    made = []
    for option in options_in(kind):
        if option.has_text and option.name not in skip and (only is None or option.name in only):
            arguments = {**_arguments(option), "help": option.help, **changes.get(option.name, {})}
            dashed = option.name.replace("_", "-")
            switch = option.kind is bool and option.default is not False  # can also be turned off
            flag = arguments.pop("flag", f"--{dashed}/--no-{dashed}" if switch else f"--{dashed}")
            made.append(click.option(flag, option.name, cls=GroupedOption, heading=option.heading, **arguments))
    return with_options(made)


def _arguments(option: Option) -> dict[str, Any]:
    """Return a field's arguments of `click.option`: its type and default."""
    default, kind = option.default, option.annotation if option.default is not None else option.kind
    if kind is bool:
        return {"is_flag": True, "default": default, "show_default": default}
    arguments: dict[str, Any] = {"default": default, "show_default": default is not None and default != ()}
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        arguments["multiple"] = True
    if get_origin(kind) is Literal:
        return arguments | {"type": click.Choice(get_args(kind))}
    return arguments | {"type": click.Path(path_type=Path) if kind is Path else str if kind is Any else kind}


def taken(kind: type[Kind], options: dict[str, Any]) -> Kind:
    """Remove a dataclass's fields from a command's options, and return them as the dataclass."""
    assert dataclasses.is_dataclass(kind)
    return kind(**{field.name: options.pop(field.name) for field in dataclasses.fields(kind)})


def numbers(flag: str, text: str, kind: type[int] | type[float], example: str) -> tuple[Any, ...]:
    """Read a list of numbers, without duplicates."""
    try:
        found = tuple(dict.fromkeys(kind(part) for part in text.replace(",", " ").split()))
    except ValueError:
        found = ()
    if not found:
        what = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{flag} {text!r} is not a list of {what}; separate them with commas, such as {example}")
    return found


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Machine."""

    threads: int | None = None
    """Number of CPU threads  [default: torch's choice]."""


@dataclass(frozen=True, kw_only=True)
class Loading(LoadOptions, NgramOptions, Threads):
    """The options of commands that load a decoder."""

    def __post_init__(self) -> None:
        if self.target.endswith(".gguf") and "torch" not in sys.modules:  # importing takes seconds, and converting even more
            click.echo(f"reading {self.target} ...", err=True)
        super().__post_init__()

    def decoder(self, *, batch: int = 1, temperature: float | None = None) -> "Decoder":
        """Load the models, for `batch` texts at a time."""
        from polydraft.loading import load_with

        prepare(self.threads)
        return load_with(
            dataclasses.replace(self, grams=self.grams_asked_for(self.drafter, self.lossy)),
            batch=batch,
            temperature=temperature,
        )

    def for_others(self, who: str) -> dict[str, Any]:
        """Return the options for processes on a cluster to load with; refuse options that cannot be passed on."""
        for option in options_in(NgramOptions):
            if getattr(self, option.name) != option.default:
                flag = f"--set {option.name.removeprefix('no_')}" if option.name in _EXPERT else f"--{option.name}"
                raise UsageError(f"{flag} is not passed on to {who}; leave it out, or run without --ray")
        return {one.name: getattr(self, one.name) for one in options_in(LoadOptions) if one.has_text}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options."""

    described_in: ClassVar[str] = _SAMPLING

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    """Generate at most this many tokens."""
    seed: int = 0
    """The same seed gives the same text (with dynamic trees: on the same machine, with the same number of threads)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling."""

    described_in: ClassVar[str] = _SAMPLING

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """String that ends the text; may be given several times."""


@dataclass(frozen=True, kw_only=True)
class Choices(Loading, Request, Sampling):
    """The options of `generate`, `chat` and `batch`."""

    def decoder(self, *, batch: int = 1, temperature: float | None = None) -> "Decoder":
        """Load the models, for the given temperature or the one in these options."""
        return super().decoder(batch=batch, temperature=self.temperature if temperature is None else temperature)

    def check(self) -> "SamplingParams":
        """Check everything that needs no model, and return the sampling parameters."""
        from polydraft.sampling import SamplingParams

        check_ranges(self, [("max_new_tokens", 1, math.inf)])
        return SamplingParams(**{name: _asked(name, getattr(self, name)) for name in SAMPLING_NAMES})

    def request(self, params: "SamplingParams") -> dict[str, Any]:
        """Return the keyword arguments of a request."""
        return {"sampling": params, "max_new_tokens": self.max_new_tokens, "seed": self.seed, "stop": self.stop}


def _asked(name: str, value: Any) -> Any:
    """Mark a value that the user did not give as `Usual`, so that the model's generation config may replace it."""
    from polydraft.sampling.params import Usual, UsualCount

    context = click.get_current_context(silent=True)
    if context is None or context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
        return value
    return UsualCount(value) if isinstance(value, int) else Usual(value)


def options_of_decoders(kind: type[Loading], *others: type[Any], expert: Collection[str] = ()) -> Decorator:
    """Return a decorator that adds the options of a decoder and of other dataclasses, and `--set` for expert options."""
    flags = [options_of(kind, skip=_EXPERT), *(options_of(other, skip=expert) for other in others)]
    return with_options([*flags, settings_of(kind, *others, only={*_EXPERT, *expert})])


shared_options, loading_options = options_of_decoders(Choices), options_of_decoders(Loading)
"""Decorators that add the options of `Choices`, or of `Loading`, to a command."""


def machine_options(**changes: dict[str, Any]) -> Decorator:
    """Return a decorator that adds the options of the machine: device, dtype and threads."""
    return with_options([options_of(PlaceOptions, skip=("device_map",), **changes), options_of(Threads)])


def set_threads(threads: int | None) -> None:
    """Set torch's number of threads, if one is given; refuse numbers with which it would fail or crash."""
    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            raise UsageError(f"--threads {threads} is out of range; allowed: whole numbers from 1 to {_MOST_THREADS}")
        import torch

        torch.set_num_threads(threads)


def prepare(threads: int | None) -> None:
    """Set the number of threads, log slow steps to standard error, and silence other libraries' loggers."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    set_threads(threads)
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logger = logging.getLogger("polydraft")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)


def placed(device: str, dtype: str, threads: int | None) -> "tuple[torch.device, torch.dtype]":
    """Call `prepare`, and return the device and dtype for the models."""
    from polydraft.models.placement import resolve_device, resolve_dtype

    prepare(threads)
    place = resolve_device(device)
    return place, resolve_dtype(dtype, place)


@contextmanager
def needing(who: str, extra: str) -> Iterator[None]:
    """Turn an `ImportError` into an error that says which extra to install."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{error}; install what {who}: pip install 'polydraft[{extra}]'") from None


class _StderrHandler(logging.Handler):
    """Writes log messages to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)
