"""`polydraft generate` with beams, or with several samples."""

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.option_list import with_options
from polydraft.cli.options import Choices
from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.beam import BeamDecoder, BeamGeneration, BeamOptions, ScoredText
    from polydraft.engine import Decoder
    from polydraft.sampling import SamplingParams

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--beams", type=int, default=None, help="Decode with so many beams; beam search at temperature 0, sampling above."),
    click.option("--beam-mode", default=None, help="search or sample  [default: by the temperature]."),
    click.option("--beam-draws", "draws", default=None, help="Sampling: distinct beams, iid ones, or hf (twice as many drawn, the best kept)."),
    click.option("--beam-verification", "verification", default=None, help="Sampling: layers (the paper's), coupled (shared noise) or auto."),
    click.option("--draft-width", type=int, default=None, help="Beams of the draft  [default: 4 times the beams on a GPU, 1.5 times on a CPU; twice with --width-threshold]."),
    click.option("--draft-depth", type=int, default=None, help="Most steps that the draft's beams run ahead  [default: 4 on a GPU, 2 on a CPU; 3 with --width-threshold]."),
    click.option("--twins", is_flag=True, help="Draft beams from what the target said after texts that end alike; needs no draft model."),
    click.option("--width-threshold", type=float, default=None, help="Sampling: keep as many beams a layer as drafts yield with this chance."),
    click.option("--min-width", type=int, default=None, help="Least beams a layer, with --width-threshold."),
    click.option("--one-cache", is_flag=True, help="Sampling: go on with the likeliest beam after each round (a heuristic, no sampling law)."),
    click.option("--length-penalty", type=float, default=None, help="Beam scores are divided by length to this power  [default: 1]."),
    click.option("--early-stopping", type=click.Choice(["true", "false", "never"]), default=None, help="When beams end, as in Hugging Face  [default: false]."),
    click.option("--num-return-sequences", type=int, default=None, help="Texts wanted, with log-probabilities: the best beams, or so many samples."),
]  # fmt: skip
_NAMES = (
    "beams", "beam_mode", "draws", "verification", "draft_width", "draft_depth", "twins", "width_threshold", "min_width", "one_cache",
    "length_penalty", "early_stopping", "num_return_sequences",
)  # fmt: skip
_FLAGS = {"draws": "--beam-draws", "verification": "--beam-verification"}


beam_options = with_options(_OPTIONS)
"""Add the options of beams to a command."""


def take_beam_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of beams that were given out of a command's options."""
    taken = {name: options.pop(name) for name in _NAMES}
    return {name: value for name, value in taken.items() if value is not None and value is not False}


def generate_many(given: dict[str, Any], text: str, choices: Choices, raw: bool, compare: bool, as_json: bool) -> None:
    """Decode with beams, or draw several samples."""
    params = choices.check()
    if "beams" in given:
        _beams(given, text, choices, params, raw, compare, as_json)
        return
    for name in given:
        if name != "num_return_sequences":
            flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
            raise UsageError(f"{flag} is for beams; add --beams, such as --beams 4")
    count = given["num_return_sequences"]
    if count < 1:
        raise UsageError(f"--num-return-sequences {count} is out of range; allowed: whole numbers from 1")
    if count > 1 and params.temperature == 0:
        raise UsageError("--num-return-sequences needs a temperature above 0, or all texts would be the same; or use --beams")
    if compare:
        raise UsageError("--compare compares one text; leave --num-return-sequences out")
    _samples(count, text, choices, params, raw, as_json)


def _samples(count: int, text: str, choices: Choices, params: "SamplingParams", raw: bool, as_json: bool) -> None:
    """Draw samples of one prompt, as one batch."""
    from polydraft.beam import scored
    from polydraft.cli.render import summary_line

    decoder = choices.decoder()
    prompt = decoder.encode(text, chat=not raw)
    generations = decoder.generate([prompt] * count, **choices.request(params))
    texts = scored(decoder.target, prompt, generations)
    stats = generations[0].stats
    if as_json:
        settings = {"seed": choices.seed, "temperature": params.temperature, "num_return_sequences": count}
        _echo_json(texts, stats.as_dict(), settings, decoder)
        return
    _print_texts(texts)
    click.echo(summary_line(stats), err=True)


def _beams(
    given: dict[str, Any], text: str, choices: Choices, params: "SamplingParams", raw: bool, compare: bool, as_json: bool
) -> None:
    from polydraft.beam import BeamDecoder

    _refuse_what_does_not_apply(choices)
    options = _options(given, params)
    if options.twins:
        if choices.draft not in ("auto", "none"):
            raise UsageError(f"--twins needs no draft, but --draft {choices.draft} is given; leave one of them out")
        choices = dataclasses.replace(choices, draft="none")
    decoder = choices.decoder()
    beams = BeamDecoder(decoder)
    if as_json:
        result = _run(beams, options, text, choices, params, raw, printer=None)
        _echo_json(result.texts, result.stats.as_dict(), result.settings, decoder)
        return
    from polydraft.cli.render import TokenPrinter, break_even_line, comparison_table, output_console, summary_line

    console = output_console()
    baseline = None
    if compare:
        click.echo("decoding with beams but without drafts first, for comparison ...", err=True)
        plain = BeamDecoder(decoder.replace(drafter=None))
        baseline = _run(plain, dataclasses.replace(options, twins=False), text, choices, params, raw, printer=None)
    several = options.num_return_sequences > 1
    result = _run(beams, options, text, choices, params, raw, None if several else TokenPrinter(console))
    if several:
        _print_texts(result.texts)
    if baseline is None:
        click.echo(summary_line(result.stats), err=True)
        return
    console.print()
    draft = result.settings["draft"]
    name = (
        f"{options.beams} beams again"
        if draft is None
        else f"{draft}, {result.settings['draft_width'] or options.width_of_drafts} draft beams"
    )
    console.print(comparison_table([(f"{options.beams} beams, no draft", baseline.stats), (name, result.stats)]))
    console.print(break_even_line(baseline.stats, result.stats))
    same = [one.token_ids for one in baseline.texts] == [one.token_ids for one in result.texts]
    if same:
        console.print("the texts are identical, token by token")


def _run(
    beams: "BeamDecoder", options: "BeamOptions", text: str, choices: Choices, params: "SamplingParams", raw: bool, printer: Any
) -> "BeamGeneration":
    from polydraft.cli.render import play

    fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
    stream = beams.stream(text, chat=not raw, **choices.request(params), **fields)
    play(stream, printer)
    return stream.result()


def _options(given: dict[str, Any], params: "SamplingParams") -> "BeamOptions":
    """Return the options, checked before any model is loaded."""
    from polydraft.beam import BeamOptions
    from polydraft.beam.decoder import check_law

    fields = dict(given)
    fields["mode"] = fields.pop("beam_mode", "search" if params.temperature == 0 else "sample")
    if "early_stopping" in fields:
        fields["early_stopping"] = {"true": True, "false": False}.get(fields["early_stopping"], "never")
    options = BeamOptions(**fields)
    check_law(options, params)
    return options


def _refuse_what_does_not_apply(choices: Choices) -> None:
    """Refuse options of single texts."""
    for flag, value in (("--scheme", choices.scheme), ("--walk", choices.walk), ("--tree", choices.tree)):
        if value != "auto":
            what = "beams have forests and a verification of their own" if flag != "--tree" else "beams grow forests"
            remedy = "--draft-width and --draft-depth" if flag == "--tree" else "--beam-verification"
            raise UsageError(f"{flag} {value} does not apply to beams: {what}; leave it out, or see {remedy}")
    if choices.drafter not in ("auto", "model"):
        raise UsageError(
            f"--drafter {choices.drafter} does not apply to beams, which take their drafts from a model or, with --twins, from the "
            "target; leave it out"
        )
    if choices.decision is not None:
        raise UsageError("--decision does not apply to beams, which end their forests by themselves; leave it out")
    if choices.draft_temperature is not None:
        raise UsageError("--draft-temperature does not apply to beams, whose draft samples as the target does; leave it out")


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
