"""Rounds as the engine runs them: what they bring and what they take; and passes of the target by themselves."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polydraft.draft.costs import captured, rising, timed
from polydraft.engine import Decoder
from polydraft.models import LanguageModel
from polydraft.sampling import SamplingParams
from polydraft.sampling.categorical import row_seed
from polydraft.trees import causal_block

_CONTEXT = 128
_ROW = 64
"""Most tokens of a row in passes that are timed: larger ones are of several texts, as in rounds."""
_REPEATS = 5
_WARM_ROUNDS = 3
"""First rounds of a text, which set things up: on a GPU they are run, then captured, then replayed."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What texts are asked for."""

    temperature: float
    max_new_tokens: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What some rounds brought, and what they took."""

    batch: int
    tokens: float
    """Per row and pass."""
    nodes: float
    """Of a row's tree, the root included, on average."""
    levels: float
    """Of a row's tree, on average."""
    seconds: float
    """Of a round, on average but for the first rounds of each text."""
    accepts: tuple[int, ...]
    """Of visits to a depth that had candidates, by depth."""
    offers: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.batch * self.tokens / self.seconds


class Run:
    """One setting at work on prompts, a batch at a time, so that several can take turns.

    Parameters
    ----------
    decoder : Decoder
    use : Use
    batch : int
    """

    def __init__(self, decoder: Decoder, use: Use, batch: int) -> None:
        self._decoder, self._use, self.batch = decoder, use, batch
        self._seconds: list[float] = []
        self._first_seconds: list[float] = []
        """Of rounds that set things up; they count where texts have no others."""
        self._passes, self._tokens, self._candidates, self._levels = 0, 0, 0, 0
        self._accepts: list[int] = []
        self._offers: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]], first: int = 0, most_rounds: int | None = None) -> None:
        """Write one batch of texts; with fewer prompts than rows some are written several times, by other seeds."""
        use, rows = self._use, list(itertools.islice(itertools.cycle(prompts), self.batch))
        stream = self._decoder.stream(
            [list(prompt) for prompt in rows],
            sampling=SamplingParams(temperature=use.temperature),
            max_new_tokens=use.max_new_tokens,
            seed=[row_seed(use.seed, first + row) for row in range(len(rows))],
        )
        last, start = -1, time.perf_counter()
        for event in stream:
            if event.round != last:
                now = time.perf_counter()
                (self._seconds if event.round >= _WARM_ROUNDS else self._first_seconds).append(now - start)
                last, start = event.round, now
                if most_rounds is not None and last + 1 >= most_rounds:
                    stream.close()
                    break
        stats = stream.stats
        self._passes += stats.passes
        self._tokens += stats.block_tokens
        self._candidates += stats.candidates
        self._levels += stats.path_tokens
        for kept, more in ((self._accepts, stats.accepts_by_depth), (self._offers, stats.offers_by_depth)):
            kept.extend([0] * (len(more) - len(kept)))
            for depth, count in enumerate(more):
                kept[depth] += count

    def rounds(self, *, robust: bool = False) -> Rounds:
        """Return what all batches together brought; `robust` takes the median round, where all are alike."""
        average = statistics.median if robust else statistics.fmean
        passes = max(self._passes, 1)
        return Rounds(
            batch=self.batch,
            tokens=max(self._tokens / passes, 1.0),
            nodes=1 + self._candidates / passes,
            levels=self._levels / passes,
            seconds=average(self._seconds or self._first_seconds),
            accepts=tuple(self._accepts),
            offers=tuple(self._offers),
        )


def in_batches(prompts: Sequence[Sequence[int]], batch: int) -> list[Sequence[Sequence[int]]]:
    """Split prompts into batches; the last may be short."""
    return [prompts[start : start + batch] for start in range(0, len(prompts), batch)]


@torch.inference_mode()
def pass_seconds(target: LanguageModel, sizes: Sequence[int]) -> dict[int, float]:
    """Time passes of the target over so many tokens in all, output head included, as rounds run them.

    Sizes take turns, so that a disturbance hits each once and not one of them always; the second least of their times counts.
    """
    room = target.max_positions or _CONTEXT + _ROW
    sizes = [size for size in sizes if min(size, _ROW) < room] or [1]
    known = max(min(_CONTEXT, room - min(max(sizes), _ROW)), 1)
    prompt = [index % target.vocab_size for index in range(known)]

    def work(size: int) -> Callable[[], Any]:
        rows, width = max(size // _ROW, 1), min(size, _ROW)
        context = target.start(rows, known + width)
        context.prefill([prompt] * rows)
        tokens_BT = (torch.arange(width, device=target.device) % target.vocab_size).expand(rows, -1)
        block = causal_block(rows, width, target.device)
        return lambda: target.head(context.extend(tokens_BT, block))

    works = {size: work(size) for size in sizes}
    for one in works.values():  # the first time is not like the others
        one()
    if target.device.type == "cuda" and target.graph_obstacle is None:
        works = {size: captured(one) for size, one in works.items()}
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_REPEATS):
        for size in reversed(sizes):
            times[size].append(timed(works[size], target.device))
    return rising({size: sorted(found)[1] for size, found in times.items()})
