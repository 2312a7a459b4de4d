"""`polydraft generate`: one text, several samples, or beams."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from polydraft.cli.options import (
    SAMPLING_NAMES,
    Choices,
    GroupedCommand,
    GroupedOption,
    json_option,
    options_of_decoders,
    taken,
)
from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.beam import BeamDecoder, BeamGeneration, BeamOptions, ScoredText
    from polydraft.engine import Decoder, Generation
    from polydraft.sampling import SamplingParams

_EXPERT = ("mode", "early_stopping", "draws", "verification", "min_width", "one_cache", "model_only")
"""Fields of beams that have no flag; `--set` sets them."""
_NOT_FOR_BEAMS = {
    "scheme": "which have their own verification; leave it out, or see --set verification",
    "walk": "which have their own verification; leave it out, or see --set verification",
    "tree": "which draft forests; leave it out, or see --draft-width and --draft-depth",
    "drafter": "which take their drafts from a model or, with --twins, from the target; leave it out",
    "lossy": "which have their own verification; leave it out",
    "decision": "which decide for themselves when to stop drafting; leave it out",
    "draft_temperature": "whose draft samples as the target does; leave it out",
}
"""Options for single texts, and why they do not apply to beams."""


@dataclass(frozen=True, kw_only=True)
class BeamChoices:
    """Beams and several samples."""

    described_in: ClassVar[str] = "polydraft.beam.options:BeamOptions"

    beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: Literal["true", "false", "never"] | None = None
    draft_width: int | None = None
    draft_depth: int | None = None
    twins: bool = False
    width_threshold: float | None = None
    min_width: int | None = None
    mode: str | None = None
    """With beams: search or sample  [default: search at temperature 0, sample above]."""
    draws: str | None = None
    verification: str | None = None
    one_cache: bool = False
    model_only: bool = False

    def given(self) -> dict[str, Any]:
        """Return the options that the user gave."""
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}

    def options(self, temperature: float) -> "BeamOptions":
        """Return the options given, as `BeamOptions`."""
        from polydraft.beam import BeamOptions

        fields = {"mode": "search" if temperature == 0 else "sample", **self.given()}
        if "early_stopping" in fields:
            fields["early_stopping"] = {"true": True, "false": False}.get(fields["early_stopping"], "never")
        return BeamOptions(**fields)


@dataclass(frozen=True)
class Task:
    """What to generate, and how to show it."""

    text: str
    choices: Choices
    params: "SamplingParams"
    raw: bool
    compare: bool
    as_json: bool
    schema: Any = None
    """A JSON schema that the text must follow."""
    prediction: str | None = None
    """The text that the user expects."""

    def run(self, decoder: "Decoder", printer: Any = None, **changes: Any) -> "Generation":
        """Decode one text; `changes` override options of the request."""
        from polydraft.cli.terminal import play
        from polydraft.sampling import Grammar

        grammar = None if self.schema is None else Grammar.json_schema(self.schema)
        request = {**self.choices.request(self.params), **changes}
        request["sampling"] = dataclasses.replace(self.params, grammar=grammar, prediction=self.prediction)
        stream = decoder.stream(self.text, chat=not self.raw, **request)
        play(stream, printer)
        return stream.results()[0]

    def run_beams(self, beams: "BeamDecoder", options: "BeamOptions", printer: Any = None) -> "BeamGeneration":
        """Decode with beams."""
        from polydraft.cli.terminal import play

        stream = beams.stream(self.text, chat=not self.raw, **self.choices.request(self.params), **vars(options))
        play(stream, printer)
        return stream.result()


@click.command("generate", cls=GroupedCommand)
@click.argument("prompt")
@options_of_decoders(Choices, BeamChoices, expert=_EXPERT)
@click.option(
    "--json-schema",
    cls=GroupedOption,
    heading="Sampling",
    type=click.Path(path_type=Path),
    default=None,
    help="File with a JSON schema that the text must follow.",
)
@click.option(
    "--prediction",
    cls=GroupedOption,
    heading="Drafting and verification",
    type=click.Path(path_type=Path),
    default=None,
    help="File with the text that you expect, such as a file to rewrite; drafts are taken from it.",
)
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the chat template.")
@click.option("--compare", is_flag=True, help="Also decode without drafts and with Hugging Face, and print a comparison.")
@json_option
def command(
    prompt: str,
    json_schema: Path | None,
    prediction: Path | None,
    raw: bool,
    compare: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text that continues or answers PROMPT ('-' reads the prompt from standard input).

    Whichever draft, tree and scheme you choose, the text has exactly the distribution of the target's own samples; at
    temperature 0 it is the target's greedy text. With --beams it comes from beam search or beam sampling (docs/beams.md).
    """
    from polydraft.cli.terminal import read_all
    from polydraft.prompts import check_text

    beams = taken(BeamChoices, options)
    choices = Choices(**options)
    params = choices.check()
    if as_json and compare:
        raise UsageError("--json and --compare cannot be combined; for a baseline, run again with --json --draft none")
    text = read_all() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("empty prompt: it has no tokens; give at least one character")
    check_text(text)
    if json_schema is not None and (compare or beams.given()):
        raise UsageError("--json-schema is for one text; leave out --compare, --beams and --num-return-sequences")
    if prediction is not None and beams.given():
        raise UsageError("--prediction is for one text; leave out --beams and --num-return-sequences")
    schema = None if json_schema is None else _read_schema(json_schema)
    expected = None if prediction is None else _read("--prediction", prediction, "the text that you expect", str)
    task = Task(text, choices, params, raw, compare, as_json, schema, expected)
    if beams.beams is not None:
        _generate_beams(task, beams)
    elif beams.given():
        _generate_samples(task, beams)
    else:
        _generate_one(task)


def _read(flag: str, file: Path, kind: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {flag} {file} ({reason}); give a file with {kind}") from None


def _read_schema(file: Path) -> Any:
    schema = _read("--json-schema", file, "a JSON schema", json.loads)
    if not isinstance(schema, dict):
        raise UsageError(f"--json-schema {file} does not hold a JSON object; give a file with a JSON schema")
    return schema


def _generate_one(task: Task) -> None:
    decoder = task.choices.decoder()
    if task.as_json:
        result = task.run(decoder)
        click.echo(json.dumps(_as_object(result, decoder, task), ensure_ascii=False))
        return
    from polydraft.cli.terminal import TokenPrinter, output_console, summary_line

    console = output_console()
    if task.compare:
        from polydraft.cli.comparison import compare

        compare(task, decoder, console)
    else:
        click.echo(summary_line(task.run(decoder, TokenPrinter(console)).stats), err=True)


def _as_object(result: "Generation", decoder: "Decoder", task: Task) -> dict[str, Any]:
    from polydraft.cli.comparison import draft_name, tree_name

    choices, defaults = task.choices, decoder.defaults
    params = decoder.with_defaults(task.params, decoder.encode(task.text, chat=not task.raw))
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "sources": result.sources,
        "stop_reason": result.stop_reason.value,
        "stats": result.stats.as_dict(),
        "settings": {
            "target": choices.target,
            "drafter": decoder.drafter.name,
            "draft": draft_name(decoder),
            "tree": tree_name(decoder),
            "scheme": result.settings["scheme"],
            "walk": result.settings["walk"],
            "draft_temperature": choices.draft_temperature,
            "decision": choices.decision,
            "lossless": decoder.lossless,
            **{name: getattr(params, name) for name in SAMPLING_NAMES},
            **({"generation_config": defaults.followed} if defaults else {}),
            "max_new_tokens": choices.max_new_tokens,
            "seed": choices.seed,
            "stop": list(choices.stop),
            **({"lossy": choices.lossy} if choices.lossy else {}),
            "device": str(decoder.target.device),
            "dtype": str(getattr(decoder.target, "dtype", "")).removeprefix("torch."),
        },
    }


def _generate_samples(task: Task, beams: BeamChoices) -> None:
    """Draw several samples for one prompt, as one batch."""
    count = beams.num_return_sequences
    for name in beams.given():
        if name != "num_return_sequences":
            flag = f"--set {name}" if name in _EXPERT else "--" + name.replace("_", "-")
            raise UsageError(f"{flag} works only with --beams; add it, such as --beams 4")
    assert count is not None
    if count < 1:
        raise UsageError(f"--num-return-sequences {count} is out of range; allowed: whole numbers from 1")
    if count > 1 and task.params.temperature == 0:
        raise UsageError(
            "--num-return-sequences above 1 at temperature 0 would repeat one text; raise --temperature, or add --beams"
        )
    if task.compare:
        raise UsageError("--compare works with one text only; leave out --num-return-sequences")
    from polydraft.beam import scored
    from polydraft.cli.terminal import summary_line

    decoder = task.choices.decoder(batch=count)
    prompt = decoder.encode(task.text, chat=not task.raw)
    generations = decoder.generate([prompt] * count, **task.choices.request(task.params))
    texts = scored(decoder.target, prompt, generations)
    stats = generations[0].stats
    if task.as_json:
        settings = {"seed": task.choices.seed, "temperature": task.params.temperature, "num_return_sequences": count}
        _echo_json(texts, stats.as_dict(), settings, decoder)
        return
    _print_texts(texts)
    click.echo(summary_line(stats), err=True)


def _generate_beams(task: Task, beams: BeamChoices) -> None:
    from polydraft.beam import BeamDecoder
    from polydraft.beam.decoder import check_distribution

    choices = task.choices
    for name, why in _NOT_FOR_BEAMS.items():
        value, default = getattr(choices, name), Choices.__dataclass_fields__[name].default
        if value != default and (name, value) != ("drafter", "model"):
            raise UsageError(f"--{name.replace('_', '-')} {value} does not apply to beams, {why}")
    options = beams.options(task.params.temperature)
    check_distribution(options, task.params)
    if options.twins:
        if choices.draft not in ("auto", "none"):
            raise UsageError(f"--twins needs no draft, but --draft {choices.draft} is given; leave one of them out")
        task = dataclasses.replace(task, choices=dataclasses.replace(choices, draft="none"))
    decoder = dataclasses.replace(task.choices, profile="none").decoder()  # profiles choose trees, which beams do not use
    beam_decoder = BeamDecoder(decoder)
    if beam_decoder.draft is None and not options.twins:
        for name in ("draft_width", "draft_depth", "width_threshold"):
            if name in beams.given():
                flag = f"--{name.replace('_', '-')} {getattr(beams, name)}"
                raise UsageError(f"{flag} is for draft beams, and there is no draft; pass --draft or --twins, or leave it out")
    if task.as_json:
        result = task.run_beams(beam_decoder, options)
        _echo_json(result.texts, result.stats.as_dict(), result.settings, decoder)
        return
    from polydraft.cli.comparison import break_even_line, comparison_table
    from polydraft.cli.terminal import TokenPrinter, output_console, summary_line

    console = output_console()
    baseline = None
    if task.compare:
        click.echo("decoding with beams but without drafts first, for comparison ...", err=True)
        plain = BeamDecoder(decoder.replace(drafter=None))
        baseline = task.run_beams(plain, dataclasses.replace(options, twins=False, model_only=False))
    several = options.num_return_sequences > 1
    result = task.run_beams(beam_decoder, options, None if several else TokenPrinter(console))
    if several:
        _print_texts(result.texts)
    if baseline is None:
        click.echo(summary_line(result.stats), err=True)
        return
    console.print()
    draft = result.settings["draft"]
    width = result.settings["draft_width"] or options.width_of_drafts
    name = f"{options.beams} beams again" if draft is None else f"{draft}, {width} draft beams"
    rows = [(f"{options.beams} beams, no draft", baseline.stats), (name, result.stats)]
    console.print(comparison_table(rows, baseline.stats))
    console.print(break_even_line(baseline.stats, result.stats))
    if [one.token_ids for one in baseline.texts] == [one.token_ids for one in result.texts]:
        console.print("the texts are identical, token by token")


def _print_texts(texts: "list[ScoredText]") -> None:
    for number, one in enumerate(texts, start=1):
        score = "" if one.score is None else f", score {one.score:.4f}"
        head = (
            f"[{number}] log-probability {one.log_prob:.4f} in {len(one.token_ids)} tokens{score}, ended by {one.stop_reason}"
        )
        click.echo(head)
        click.echo(one.text)


def _echo_json(texts: "list[ScoredText]", stats: dict[str, Any], settings: dict[str, Any], decoder: "Decoder") -> None:
    place = {"device": str(decoder.target.device), "target": decoder.target.name}
    found = {"texts": [one.as_dict() for one in texts], "stats": stats, "settings": {**settings, **place}}
    click.echo(json.dumps(found, ensure_ascii=False))
