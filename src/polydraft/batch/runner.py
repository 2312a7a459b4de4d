"""The texts of all rows: slots are filled again as texts end, by the lane that a server uses."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from polydraft.batch.results import Results, Totals
from polydraft.batch.rows import BatchOptions, Prompts, Row
from polydraft.engine import Decoder, TokenSequence
from polydraft.errors import FailureError, UsageError
from polydraft.models import check_prompts
from polydraft.prompts import prompt_of
from polydraft.sampling import SamplingParams, check_params
from polydraft.sampling.categorical import row_seed
from polydraft.serve.lane import Lane, LaneOptions
from polydraft.serve.ticket import Ticket

_LEAST_WINDOW = 1024
"""Rows that may be ready before an earlier one, at least: they wait in memory."""

Observer = Callable[[int, Totals], None]
"""Told the number of the last row that is written, and what has come of all."""


@dataclass(frozen=True, kw_only=True)
class BatchTask:
    """What every row is asked for."""

    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    raw: bool = False
    """Prompts as they are, without the chat template."""


def run_batch(
    decoder: Decoder, prompts: Prompts, results: Results, task: BatchTask, options: BatchOptions, observer: Observer
) -> Totals:
    """Write the texts of all rows behind the last one of the results.

    Parameters
    ----------
    decoder : Decoder
    prompts : Prompts
    results : Results
    task : BatchTask
    options : BatchOptions
    observer : callable
        For progress.
    """
    return keep(texts_of(decoder, prompts.rows(results.last), task, options), results, observer)


def keep(found: Iterable[list[dict[str, Any]]], results: Results, observer: Observer) -> Totals:
    """Write results as they come."""
    start = time.perf_counter()
    for whole in found:
        results.totals.seconds = time.perf_counter() - start
        results.write(whole)
        observer(whole[-1]["row"], results.totals)
    return results.totals


def texts_of(decoder: Decoder, wanted: Iterable[Row], task: BatchTask, options: BatchOptions) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of rows in their order, some at a time, with full slots as long as there are rows."""
    check_params(task.sampling, decoder.target.vocab_size)
    slot_tokens = min(options.slot_tokens, decoder.target.max_positions or options.slot_tokens)
    lane = Lane(decoder, LaneOptions(slots=options.slots, slot_tokens=slot_tokens, chunk_tokens=options.chunk_tokens))
    rows, running = enumerate(wanted), dict[Ticket, tuple[int, Row]]()
    ready: dict[int, dict[str, Any]] = {}
    """Results by their place, until all before them are there."""
    written, window, ended = 0, max(64 * options.slots, _LEAST_WINDOW), False
    while not ended or lane.busy:
        while not ended and len(lane.waiting) < options.slots and len(ready) + len(running) < window:
            place, row = next(rows, (0, None))
            if row is None:
                ended = True
                break
            try:
                ticket = Ticket([_sequence(decoder, row, task, slot_tokens)])
            except (UsageError, FailureError) as error:
                ready[place] = {"row": row.number, "error": str(error)}
                continue
            running[ticket] = place, row
            lane.waiting.add(ticket)
        for ticket, progress in lane.step() if lane.busy else ():
            if progress.emitted.stop_reason is not None:
                place, row = running.pop(ticket)
                ready[place] = _result(row, ticket)
        if written in ready:
            whole = []
            while written in ready:
                whole.append(ready.pop(written))
                written += 1
            yield whole


def _sequence(decoder: Decoder, row: Row, task: BatchTask, slot_tokens: int) -> TokenSequence:
    """Return a row's text to be written; its seed is of its own, wherever and beside whomever it is written."""
    if row.error is not None:
        raise UsageError(row.error)
    prompt = decoder.encode(prompt_of(row.record, "it").content, chat=not task.raw)
    check_prompts([prompt], None, decoder.target.vocab_size)
    if len(prompt) >= slot_tokens:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens leaves no room in {slot_tokens}; shorten it, or raise --slot-tokens"
        )
    return decoder.sequence(
        prompt,
        task.sampling,
        seed=row_seed(task.seed, row.number),
        max_new_tokens=task.max_new_tokens,
        stop=task.stop,
        max_positions=slot_tokens,
    )


def _rests(sequence: TokenSequence) -> dict[str, Any]:
    """Say how often drafting rested, and why, if it did."""
    found = sequence.speculation
    if found.rested_because is None:
        return {}
    return {"resting_passes": found.resting_rounds, "rested_because": found.rested_because}


def _result(row: Row, ticket: Ticket) -> dict[str, Any]:
    sequence = ticket.sequences[0]
    assert sequence.stop_reason is not None
    known = {"id": row.record["id"]} if "id" in row.record else {}
    if sequence.failure is not None:
        return {"row": row.number, **known, "error": str(sequence.failure)}
    speculation = sequence.speculation
    return {
        "row": row.number,
        **known,
        "text": sequence.assembler.text,
        "stop_reason": sequence.stop_reason.value,
        "prompt_tokens": len(sequence.prompt),
        "new_tokens": len(sequence.new_tokens),
        "passes": speculation.rounds,
        "tokens_per_pass": round(speculation.mean_acceptance_length, 3),
        **_rests(sequence),
        "seconds": round(time.perf_counter() - ticket.admitted.get(0, ticket.arrived), 4),
    }
