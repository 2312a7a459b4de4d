"""Generation for all rows, in a lane like the server's: a free slot takes the next row."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from polydraft.batch.files import BatchOptions, Results, Row, Totals
from polydraft.engine import Decoder, TokenSequence
from polydraft.errors import FailureError, UsageError
from polydraft.models import check_prompts
from polydraft.models.prefixes import Prefixes
from polydraft.prompts import prompt_of
from polydraft.sampling import SamplingParams, check_params
from polydraft.sampling.categorical import row_seed
from polydraft.serve.lane import Lane, LaneOptions
from polydraft.serve.memory import enough_memory, fitting_pool, fitting_prefixes, reserve
from polydraft.serve.request import Request

_LEAST_WINDOW = 1024
"""How many rows may be in memory, at least: results wait there for those of earlier rows."""

Observer = Callable[[int, Totals], None]
"""Called with the number of the last row written, and the totals."""


@dataclass(frozen=True, kw_only=True)
class BatchTask:
    """What to generate for each row."""

    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    raw: bool = False
    """Use prompts as they are, without the chat template."""


def write_all(groups: Iterable[list[dict[str, Any]]], results: Results, observer: Observer) -> Totals:
    """Write results as they arrive, and return the totals; `observer` reports progress."""
    start = time.perf_counter()
    for group in groups:
        results.totals.seconds = time.perf_counter() - start
        results.write(group)
        observer(group[-1]["row"], results.totals)
    return results.totals


def generate_rows(
    decoder: Decoder, wanted: Iterable[Row], task: BatchTask, options: BatchOptions
) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of rows in order, a group at a time."""
    check_params(task.sampling, decoder.target.vocab_size)
    slot_tokens = min(options.slot_tokens, decoder.target.max_positions or options.slot_tokens)
    size = LaneOptions(slots=options.slots, slot_tokens=slot_tokens, chunk_tokens=options.chunk_tokens)
    lane = _lane(decoder, size)
    rows, running = enumerate(wanted), dict[Request, tuple[int, Row]]()
    ready: dict[int, dict[str, Any]] = {}
    """Results by place, waiting for those of earlier rows."""
    written, window, ended = 0, max(64 * options.slots, _LEAST_WINDOW), False
    while not ended or lane.busy:
        while not ended and len(lane.waiting) < options.slots and len(ready) + len(running) < window:
            place, row = next(rows, (0, None))
            if row is None:
                ended = True
                break
            try:
                request = Request([_sequence(decoder, row, task, slot_tokens)])
            except (UsageError, FailureError) as error:
                ready[place] = {"row": row.number, "error": str(error)}
                continue
            running[request] = place, row
            lane.waiting.add(request)
        if lane.busy:
            for request, progress in lane.step():
                if progress.emitted.stop_reason is not None:
                    place, row = running.pop(request)
                    ready[place] = _result(row, request)
        group = []
        while written in ready:
            group.append(ready.pop(written))
            written += 1
        if group:
            yield group


def _lane(decoder: Decoder, size: LaneOptions) -> Lane:
    """Return a lane with all of its memory allocated."""
    pool = fitting_pool(decoder.target.device)
    lane = Lane(decoder, size, prefixes=Prefixes(fitting_prefixes(decoder.target.device)), pool=pool)
    with enough_memory(str(size.slots), size.slot_tokens, "--slots or --slot-tokens"):
        reserve([lane], pool)
    return lane


def _sequence(decoder: Decoder, row: Row, task: BatchTask, slot_tokens: int) -> TokenSequence:
    """Return the sequence of a row. It has a seed of its own, so that its text does not depend on other rows."""
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


def _result(row: Row, request: Request) -> dict[str, Any]:
    sequence = request.sequences[0]
    assert sequence.stop_reason is not None
    known = {"id": row.record["id"]} if "id" in row.record else {}
    if sequence.failure is not None:
        return {"row": row.number, **known, "error": str(sequence.failure)}
    speculation, rests = sequence.speculation, {}
    if speculation.rested_because is not None:
        rests = {"resting_passes": speculation.resting_passes, "rested_because": speculation.rested_because}
    return {
        "row": row.number,
        **known,
        "text": sequence.assembler.text,
        "stop_reason": sequence.stop_reason.value,
        "prompt_tokens": len(sequence.prompt),
        "new_tokens": len(sequence.new_tokens),
        "passes": speculation.passes,
        "tokens_per_pass": round(speculation.tokens_per_pass, 3),
        **rests,
        "seconds": round(time.perf_counter() - request.admitted.get(0, request.arrived), 4),
    }
