"""`--compare`: run Hugging Face `generate`, plain decoding and drafts on one prompt, and show whether drafting pays."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.table import Table

from polydraft.certify.greedy_identity import parting
from polydraft.cli.options import SAMPLING_NAMES
from polydraft.cli.terminal import TokenPrinter, figures_table
from polydraft.devices import captures
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Generation, Stats
from polydraft.errors import FailureError, first_line
from polydraft.models.generation_defaults import GenerationDefaults
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams, was_asked
from polydraft.trees import parse_tree

if TYPE_CHECKING:
    from polydraft.cli.generate import Task

HUGGING_FACE = "Hugging Face generate"
_WARM_UP = 8
"""Tokens on a CPU; on a GPU we warm up with the whole text, because its rounds are captured then."""
_FEW_DRAFTED = 0.5
"""With a smaller share of rounds that have drafts, the mean round says little about the cost of drafting."""


def compare(task: "Task", decoder: Decoder, console: Any) -> None:
    """Decode the same prompt in every way; print the text, a table, and what the table means."""
    plain, unaided = decoder.replace(drafter=None), dataclasses.replace(task, prediction=None)
    click.echo("warming up ...", err=True)
    unaided.run(plain, **_short(task, decoder))
    task.run(decoder, **_short(task, decoder))
    theirs = hugging_face(task, decoder)
    click.echo("decoding plainly, for comparison ...", err=True)
    baseline = unaided.run(plain)
    result = task.run(decoder, TokenPrinter(console))
    console.print()
    rows = [(HUGGING_FACE, theirs[0])] if theirs is not None else []
    rows += [("plain", baseline.stats), (arm_name(decoder), result.stats)]
    drafted = [result.stats]
    restless = drafting_always(decoder) if rested(result.stats) else None
    if restless is not None:
        click.echo("most rounds had no drafts: decoding with drafts in every round, to show what that costs ...", err=True)
        task.run(restless, **_short(task, decoder))
        other = task.run(restless)
        rows.append((arm_name(restless), other.stats))
        drafted.append(other.stats)
    console.print(comparison_table(rows, baseline.stats))
    for stats in drafted:
        console.print(break_even_line(baseline.stats, stats))
    if not decoder.lossless:
        console.print(f"{decoder.drafter.name} is lossy: its text does not follow the target's distribution")
    elif decoder.with_defaults(task.params, decoder.encode(task.text, chat=not task.raw)).temperature == 0:
        _state_identity(baseline, result, console, exact=_exact(decoder.target))
        if theirs is not None:
            _state_likeness(theirs[1], baseline.token_ids, console)


def _short(task: "Task", decoder: Decoder) -> dict[str, Any]:
    return {} if captures(decoder.target.device) else {"max_new_tokens": min(_WARM_UP, task.choices.max_new_tokens)}


def hugging_face(task: "Task", decoder: Decoder) -> tuple[Stats, list[int]] | None:
    """Time Hugging Face `generate` on the target; None if it cannot generate the same text."""
    target, params = decoder.target, task.params
    others = dataclasses.replace(SamplingParams(), **{name: getattr(params, name) for name in SAMPLING_NAMES})
    if not isinstance(target, HFModel) or target.int8 or target.spread is not None or others != params:
        return None
    own = GenerationDefaults(target.hf_model, decoder.eos_token_ids).followed  # `generate` always follows these defaults
    if decoder.defaults is None and not own.keys() <= set(SAMPLING_NAMES):
        return None
    click.echo(f"decoding with {HUGGING_FACE}, for comparison ...", err=True)
    prompt = decoder.encode(task.text, chat=not task.raw)
    sampling: dict[str, Any] = {"do_sample": decoder.with_defaults(params, prompt).temperature > 0}
    for name in SAMPLING_NAMES if sampling["do_sample"] else ("repetition_penalty",):
        value = getattr(params, name)
        # Pass neutral values too: by default, `generate` applies top-k 50 and samples from another distribution than we do.
        if decoder.defaults is None or was_asked(value) or name not in own:
            sampling[name] = (value or None) if name == "min_p" else value

    def run(count: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        with torch.inference_mode():
            tokens = hugging_face_text(
                target.hf_model, prompt, decoder.eos_token_ids, count, task.choices.seed or 0, **sampling
            )
        return tokens, time.perf_counter() - start

    try:
        run(_WARM_UP)
        _, first = run(1)
        found, seconds = run(task.choices.max_new_tokens)
    except Exception as error:  # a model's own code may raise anything; compare without it
        click.echo(f"{HUGGING_FACE} failed and is left out: {first_line(error)}", err=True)
        return None
    count = len(found)
    # The first token comes from the pass over the prompt: extrapolate from the other tokens to all of them.
    decoding = (seconds - first) * count / (count - 1) if count > 1 else seconds
    stats = Stats(new_tokens=count, block_tokens=count, passes=count, rounds=count, total_seconds=first + decoding)
    stats.seconds["prefill"] = first
    return stats, found


def hugging_face_text(
    model: Any, prompt: list[int], end_tokens: Iterable[int], most: int, seed: int, **options: Any
) -> list[int]:
    """Return the new tokens, at most `most`, that Hugging Face `generate` adds to a prompt."""
    ids_1T, ends = torch.tensor([prompt], device=model.device), [*end_tokens]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=most,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **options,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def drafting_always(decoder: Decoder) -> Decoder | None:
    """Return the decoder with drafts in every round, if its dynamic tree may pause; else None."""
    drafter = decoder.drafter
    if not isinstance(drafter, TreeDrafter) or not drafter.dynamic:
        return None
    tree = parse_tree("chain:3")
    static = TreeDrafter(drafter.model, tree, draft_temperature=drafter.draft_temperature, decision=drafter.decision)
    return decoder.replace(drafter=static)


def draft_name(decoder: Decoder) -> str:
    """Return the name of the draft model, or of the drafter if there is no model."""
    model = decoder.drafter.model
    return model.name if model is not None else decoder.drafter.name


def tree_name(decoder: Decoder) -> str:
    """Return the name of the tree, or two names if single greedy texts have another one."""
    drafter = decoder.drafter
    if isinstance(drafter, TreeDrafter) and drafter.alone is not None:
        return f"{drafter.alone}/{drafter.topology}"
    return "none" if drafter.topology is None else str(drafter.topology)


def arm_name(decoder: Decoder) -> str:
    """Return the label of a decoder's row in the table."""
    return f"{draft_name(decoder)}, tree {tree_name(decoder)}"


def comparison_table(rows: Sequence[tuple[str, Stats]], baseline: Stats) -> Table:
    """Return a table that compares runs with one of them, the baseline."""
    headings = ("tokens", "tokens/s", "speed-up", "tokens/pass", "accepted")
    table = figures_table("decoding", headings, "same prompt, same run; a pass is one forward of the target")
    for name, stats in rows:
        speed_up = stats.tokens_per_second / baseline.tokens_per_second if baseline.tokens_per_second else 0.0
        acceptance = f"{stats.acceptance_rate:.2f}" if stats.offers_by_depth else "-"
        table.add_row(
            name,
            str(stats.new_tokens),
            f"{stats.tokens_per_second:.1f}",
            f"{speed_up:.2f}x",
            f"{stats.tokens_per_pass:.2f}",
            acceptance,
        )
    return table


def rested(stats: Stats) -> bool:
    """Whether most rounds had no drafts."""
    return _offered(stats) < _FEW_DRAFTED * stats.rounds


def _offered(stats: Stats) -> int:
    return stats.offers_by_depth[0] if stats.offers_by_depth else 0


def break_even_line(plain: Stats, drafted: Stats) -> str:
    """Return what a round with drafts costs here and how many tokens make it pay, or that few rounds had drafts."""
    if rested(drafted):
        return (
            f"{_offered(drafted)} of {drafted.rounds} rounds had drafts; for the others there was nothing to propose, or "
            "drafting was not expected to pay on this machine"
        )
    plain_round = plain.decode_seconds / plain.rounds
    drafted_round = drafted.decode_seconds / drafted.rounds
    # The output head counts as verification. Of rounds replayed as CUDA graphs, only the total is known.
    phases = {} if drafted.replayed_rounds else {"drafting": "draft", "target": "target", "verification": "verify"}
    shares = [f"{name} {drafted.seconds[phase] / drafted.rounds / plain_round:.1f}" for name, phase in phases.items()]
    split = f" ({', '.join(shares)})" if shares else ""
    pays = drafted.tokens_per_pass * plain_round > drafted_round
    return (
        f"a round with drafts takes {drafted_round / plain_round:.1f} plain passes on this machine{split}, so it pays above "
        f"{drafted_round / plain_round:.1f} tokens/pass; here it yielded {drafted.tokens_per_pass:.1f}: drafting "
        f"{'pays' if pays else 'does not pay'}"
    )


def _exact(target: Any) -> bool:
    """Whether a token's logits in a tree equal those in a pass of its own, up to float32 rounding."""
    same_bits = getattr(target, "native", None) is not None or getattr(target, "invariant", False)
    return same_bits or getattr(target, "dtype", None) is torch.float32


def _state_identity(baseline: Generation, result: Generation, console: Any, exact: bool) -> None:
    """Print whether both texts are the same; a difference is an error, except in half precision, where logits can tie."""
    if baseline.token_ids == result.token_ids:
        console.print("plain and drafted texts are identical, token by token")
        return
    where = parting(baseline.token_ids, result.token_ids)
    if exact:
        raise FailureError(f"the texts differ from token {where} on; please report this with the command and the model")
    console.print(f"the texts differ from token {where} on; in half precision two logits can tie: check with --dtype float32")


def _state_likeness(theirs: list[int], ours: list[int], console: Any) -> None:
    """Print whether Hugging Face gave the same text; its kernels round differently, which can decide near-ties."""
    if theirs == ours:
        console.print(f"{HUGGING_FACE} gives the same text")
    else:
        where = parting(theirs, ours)
        console.print(f"{HUGGING_FACE} differs from token {where} on, as kernels that round differently do at a near-tie")
