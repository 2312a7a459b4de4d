"""Options of commands, derived from dataclasses: a field is an option, its docstring the help text, a class a heading.

Nothing here imports torch, so that help comes at once.
"""

import ast
import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.drafters import GramTreeOptions
    from polydraft.engine import Decoder
    from polydraft.sampling import SamplingParams

Decorator = Callable[[Any], Any]
Kind = TypeVar("Kind")
_MOST_THREADS = 1024


class GroupedOption(click.Option):
    """An option that stands below a heading in the help text."""

    def __init__(self, *names: Any, heading: str, **arguments: Any) -> None:
        super().__init__(*names, **arguments)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose help text shows what most people need first, and all else below headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one section per heading."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            heading = parameter.heading if isinstance(parameter, GroupedOption) else "Options"
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def with_options(options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that adds options to a command, in the order of the list."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def options_of(kind: type[Any], *, skip: Collection[str] = (), **changes: dict[str, Any]) -> Decorator:
    """Return a decorator that adds one option per field of a dataclass, those of its first base class first.

    Parameters
    ----------
    kind : type
        A dataclass; the first lines of its and its bases' docstrings are headings.
    skip : collection of str
        Fields that are no options.
    **changes : dict
        By field: arguments of `click.option` that replace the derived ones; `flag` for an option of another name.
    """
    made, defaults, types = [], {field.name: field.default for field in dataclasses.fields(kind)}, get_type_hints(kind)
    for owner in kind.__mro__[:-1]:
        helps, heading = _field_docs(owner), (owner.__doc__ or "").splitlines()[0].removesuffix(".")
        for name in inspect.get_annotations(owner):
            if name not in skip:
                arguments = {**_arguments(types[name], defaults[name]), "help": helps[name], **changes.get(name, {})}
                dashed = name.replace("_", "-")
                flag = arguments.pop("flag", f"--{dashed}/--no-{dashed}" if defaults[name] is True else f"--{dashed}")
                made.append(click.option(flag, name, cls=GroupedOption, heading=heading, **arguments))
    return with_options(made)


def _arguments(annotation: Any, default: Any) -> dict[str, Any]:
    """Say to click what a field may hold."""
    if annotation is bool:
        return {"is_flag": True, "default": default, "show_default": default}
    shown = default is not None and default != ()
    kind = next((part for part in get_args(annotation) if part is not NoneType), annotation) if default is None else annotation
    arguments = {"default": default, "show_default": shown}
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        arguments["multiple"] = True
    if get_origin(kind) is Literal:
        return arguments | {"type": click.Choice(get_args(kind))}
    return arguments | {"type": click.Path(path_type=Path) if kind is Path else kind}


def _field_docs(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings below a class's own fields, by field."""
    found = {}
    for statement, following in pairwise(_class_bodies(kind.__module__)[kind.__name__]):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = re.sub(r"\n\s*", " ", text)
    return found


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Parse a module once: `inspect.getsource` of a class would do so for each."""
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in parsed.body if isinstance(node, ast.ClassDef)}


def taken(kind: type[Kind], options: dict[str, Any]) -> Kind:
    """Take a dataclass's fields out of a command's options."""
    assert dataclasses.is_dataclass(kind)
    return kind(**{field.name: options.pop(field.name) for field in dataclasses.fields(kind)})


def _in_range(context: click.Context, parameter: click.Parameter, threads: int | None) -> int | None:
    """Refuse what torch fails on, or what would end the process without a word, or with a page of them."""
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise UsageError(f"--threads {threads} is out of range; allowed: whole numbers from 1 to {_MOST_THREADS}")
    return threads


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options."""

    target: str = "smollm2"
    """Target model: smollm2 (bundled), a folder, a hub name, or inflated:7b (bundled, at a large model's cost)."""
    draft: str = "auto"
    """Draft model: a folder or hub name, early-exit:k (first k layers of the target), none, or auto."""
    tree: str = "auto"
    """Draft tree: children per level (4x2x2x1x1), chain:5, fork:16x5, [[0],[1],[0,0]], dynamic:64 (at most 64 nodes, chosen
    each round), none, or auto."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this mass."""
    max_new_tokens: int = 128
    """Most tokens to generate."""
    seed: int = 0
    """Same seed, same text (dynamic trees: on one machine, with as many threads)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling."""

    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens this likely relative to the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1 discourages repetition."""
    stop: tuple[str, ...] = ()
    """String that ends the text; may be given several times."""


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Drafting and verification."""

    scheme: str = "auto"
    """How candidates are drawn and verified; 'polydraft info' lists the schemes."""
    walk: str = "auto"
    """In which order a tree is verified: node, block, traversal or auto."""
    draft_temperature: float | None = None
    """Temperature of the draft  [default: the target's]."""
    decision: str | None = None
    """Decision model that ends drafting early: a folder, or auto for the shipped one."""
    stop_below: float = 0.4
    """Threshold of the decision model, 0 to 1."""
    lossy: str | None = None
    """Change the law of the text: target-init (improved MCSD's trees) or flat-blocks (n-grams as Self-Draft verifies them)."""


@dataclass(frozen=True, kw_only=True)
class Ngrams:
    """Drafting from n-grams."""

    drafter: str = "auto"
    """Who proposes: auto (the draft), self-draft, ngram, lookup, suffix, corpus, or several such as lookup+model."""
    ngram_nodes: int | None = None
    """Most candidates per round from n-grams."""
    ngram_depth: int | None = None
    """Most tokens of a continuation from n-grams."""
    gram: int | None = None
    """Tokens of a continuation that the context cache stores."""
    branches: int | None = None
    """Branches that ride along in self-draft."""
    branch_length: int | None = None
    """Most tokens of a branch."""
    branch_seeds: str | None = None
    """Where branches begin: vocabulary or prompt."""
    corpus: str | None = None
    """Corpus cache, made with: polydraft train corpus-cache."""
    no_corpus: bool = False
    """self-draft without its corpus cache."""
    no_context: bool = False
    """self-draft without its context cache and branches."""

    def grams(self) -> "GramTreeOptions":
        """Return them as options of the drafters."""
        from polydraft.drafters import GramTreeOptions, RiderOptions
        from polydraft.ngrams import GramOptions

        if self.corpus is not None and self.no_corpus:
            raise UsageError(f"--corpus {self.corpus} and --no-corpus do not go together; leave one out")
        riders = _given(branches=self.branches, length=self.branch_length, seeds=self.branch_seeds)
        return GramTreeOptions(
            **_given(nodes=self.ngram_nodes, depth=self.ngram_depth),
            riders=RiderOptions(**riders) if riders else None,
            caches=GramOptions(**_given(gram=self.gram, corpus=self.corpus)),
            context=not self.no_context,
            corpus=not self.no_corpus,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    dtype: str = "auto"
    """auto, float32, bfloat16, float16."""
    threads: int | None = None
    """CPU threads  [default: torch's choice]."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """GPUs."""

    device_map: str | None = None
    """For targets larger than one device: auto, balanced, sequential, or tp under torchrun."""
    graphs: bool = True
    """On a GPU, replay whole rounds as CUDA graphs."""
    compiled: bool = False
    """On a GPU, compile drawing and verification: 20 seconds once, then faster above T=0."""


@dataclass(frozen=True, kw_only=True)
class Choices(Common, Sampling, Drafting, Ngrams, Machine, Gpus):
    """What `generate` and `chat` are asked for."""

    def check(self) -> "SamplingParams":
        """Check what can be checked without a model, and return the sampling parameters."""
        from polydraft.sampling import SamplingParams

        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens} is out of range; allowed: whole numbers from 1")
        return SamplingParams(**self._named("temperature", "top_k", "top_p", "min_p", "repetition_penalty"))

    def request(self, params: "SamplingParams") -> dict[str, Any]:
        """Return what every request asks for."""
        return {"sampling": params, **self._named("max_new_tokens", "seed", "stop")}

    def decoder(self) -> "Decoder":
        """Load the models."""
        from polydraft.loading import load

        prepare(self.threads)
        drafting = [field.name for field in dataclasses.fields(Drafting)]
        machine = ("device", "device_map", "dtype", "graphs", "compiled")
        options = self._named("target", "draft", "tree", "drafter", *drafting, *machine)
        return load(**options, grams=self.grams())

    def _named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def machine_options(*, skip: Collection[str] = (), **changes: dict[str, Any]) -> Decorator:
    """Add the options of the machine that work runs on."""
    return options_of(Machine, skip=skip, threads={"callback": _in_range}, **changes)


shared_options = options_of(Choices, threads={"callback": _in_range})
"""Add the options of `Choices` to a command."""


def set_threads(threads: int | None) -> None:
    """Give torch so many threads, or leave it its choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def prepare(threads: int | None) -> None:
    """Set the threads; let this library say on standard error what takes long, and keep others' chatter off the screen."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    set_threads(threads)
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logger = logging.getLogger("polydraft")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
