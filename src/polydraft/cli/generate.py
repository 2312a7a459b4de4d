"""`polydraft generate`."""

import json
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.beams import beam_options, generate_many, take_beam_options
from polydraft.cli.options import Choices, shared_options
from polydraft.cli.standard_input import read_all
from polydraft.errors import FailureError, UsageError

if TYPE_CHECKING:
    from polydraft.engine import Decoder, Generation
    from polydraft.sampling import SamplingParams


@click.command("generate", short_help="Generate text from one prompt.")
@click.argument("prompt")
@shared_options
@beam_options
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the chat template.")
@click.option("--compare", is_flag=True, help="Also decode plainly, in the same run, and print a table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def command(prompt: str, raw: bool, compare: bool, as_json: bool, **options: Any) -> None:
    """Generate text that continues or answers PROMPT ('-' reads it from standard input).

    The text follows the target's own sampling law, whatever draft, tree and scheme are chosen; at temperature 0 it is
    the target's greedy text. With --beams it is the text of beam search or beam sampling, see docs/beams.md.
    """
    beams = take_beam_options(options)
    choices = Choices(**options)
    params = choices.check()
    if as_json and compare:
        raise UsageError("--json and --compare do not go together; run plain decoding apart, with --json --draft none")
    text = read_all() if prompt == "-" else prompt
    if not text.strip():
        raise UsageError("empty prompt: it has no tokens; give at least one character")
    if beams:
        generate_many(beams, text, choices, raw, compare, as_json)
        return
    decoder = choices.decoder()
    if as_json:
        result = _run(decoder, text, choices, params, raw, printer=None)
        click.echo(json.dumps(_as_object(result, decoder, choices), ensure_ascii=False))
        return
    import torch

    from polydraft.cli.render import TokenPrinter, break_even_line, comparison_table, output_console, rested, summary_line

    console = output_console()
    baseline = None
    if compare:
        click.echo("decoding plainly first, for comparison ...", err=True)
        baseline = _run(decoder.replace(drafter=None), text, choices, params, raw, printer=None)
    result = _run(decoder, text, choices, params, raw, TokenPrinter(console))
    if baseline is None:
        click.echo(summary_line(result.stats), err=True)
        return
    rows = [("plain", baseline.stats), (f"{decoder_draft(decoder)}, tree {decoder_tree(decoder)}", result.stats)]
    console.print()
    restless = _restless(decoder) if rested(result.stats) else None
    if restless is not None:
        click.echo("it mostly rested: decoding with drafts in every round, to show what that would cost ...", err=True)
        other = _run(restless, text, choices, params, raw, printer=None)
        rows.append((f"{decoder_draft(restless)}, tree {decoder_tree(restless)}", other.stats))
    console.print(comparison_table(rows))
    for _, stats in rows[1:]:
        console.print(break_even_line(baseline.stats, stats))
    if not decoder.lossless:
        console.print(f"{decoder.drafter.name} is lossy: its text does not follow the target's law")
    elif params.temperature == 0:
        _check_identity(baseline, result, console, exact=getattr(decoder.target, "dtype", None) is torch.float32)


def _run(decoder: "Decoder", text: str, choices: Choices, params: "SamplingParams", raw: bool, printer: Any) -> "Generation":
    from polydraft.cli.render import play

    stream = decoder.stream(text, chat=not raw, **choices.request(params))
    play(stream, printer)
    return stream.results()[0]


def _restless(decoder: "Decoder") -> "Decoder | None":
    """Return a decoder whose draft works in every round, where a dynamic tree may rest; all else is the same."""
    from polydraft.drafters import Dynamic, Parts, make_drafter
    from polydraft.loading import NARROW_STATIC_TREE
    from polydraft.trees import parse_tree

    drafter = decoder.drafter
    if not isinstance(drafter, Dynamic):
        return None
    parts = Parts(
        target=decoder.target,
        draft=drafter.model,
        topology=parse_tree(NARROW_STATIC_TREE),
        draft_temperature=drafter.draft_temperature,
        decision=drafter.decision,
    )
    return decoder.replace(drafter=make_drafter(parts))


def decoder_draft(decoder: "Decoder") -> str:
    """Name a decoder's draft for people."""
    model = getattr(decoder.drafter, "model", None)
    return model.name if model is not None else decoder.drafter.name


def decoder_tree(decoder: "Decoder") -> str:
    """Name a decoder's tree for people."""
    return str(getattr(decoder.drafter, "topology", "none"))


def _check_identity(baseline: "Generation", result: "Generation", console: Any, exact: bool) -> None:
    """Say whether both texts are the same; a difference is an error, or in half precision a near-tie of two logits."""
    if baseline.token_ids == result.token_ids:
        console.print("both texts are identical, token by token")
        return
    pairs = list(zip(baseline.token_ids, result.token_ids, strict=False))
    where = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
    if exact:
        raise FailureError(f"the texts differ from token {where} on; please report this with the command and the model")
    console.print(f"the texts part at token {where}; in half precision two logits can tie: check with --dtype float32")


def _as_object(result: "Generation", decoder: "Decoder", choices: Choices) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "sources": result.sources,
        "stop_reason": result.stop_reason.value,
        "stats": result.stats.as_dict(),
        "settings": {
            "target": choices.target,
            "drafter": decoder.drafter.name,
            "draft": decoder_draft(decoder),
            "tree": decoder_tree(decoder),
            "scheme": result.settings["scheme"],
            "walk": result.settings["walk"],
            "draft_temperature": choices.draft_temperature,
            "decision": choices.decision,
            "lossless": decoder.lossless,
            "temperature": choices.temperature,
            "top_k": choices.top_k,
            "top_p": choices.top_p,
            "min_p": choices.min_p,
            "repetition_penalty": choices.repetition_penalty,
            "max_new_tokens": choices.max_new_tokens,
            "seed": choices.seed,
            "stop": list(choices.stop),
            **({"lossy": choices.lossy} if choices.lossy else {}),
            "device": str(decoder.target.device),
            "dtype": str(getattr(decoder.target, "dtype", "")).removeprefix("torch."),
        },
    }
