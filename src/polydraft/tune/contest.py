"""A contest of settings: all decode the same prompts in turns, and the slower half drops out, round by round.

This is successive halving (Jamieson and Talwalkar, 2016), which spends most of the time on candidates that are hard to tell
apart. Plain decoding, the baseline of all speed-ups, stays until the end.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST_LAPS, _LAST_LAPS = 2, 12
_FINALISTS = 2
LEAST_LAPS = 3
"""Laps to run even if time is short: an interval needs a few."""
_RESAMPLES = 2000


@dataclass(frozen=True)
class Lap:
    """One batch of prompts, decoded by one candidate."""

    tokens: int
    seconds: float
    passes: int


@dataclass(eq=False)
class Candidate:
    """A setting, and the laps it has run."""

    name: str
    tree: str = "none"
    drafter: str = "auto"
    laps: list[Lap] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second over all laps."""
        return sum(lap.tokens for lap in self.laps) / max(sum(lap.seconds for lap in self.laps), 1e-9)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass over all laps."""
        return sum(lap.tokens for lap in self.laps) / max(sum(lap.passes for lap in self.laps), 1)

    def speedup(self, plain: "Candidate") -> tuple[float, float, float]:
        """Return the speed-up over plain decoding on the same laps, with a 95 % bootstrap interval over laps."""
        laps = zip(self.laps, plain.laps, strict=False)  # plain decoding continues after others have dropped out
        return speedup_interval(np.array([(one.tokens, one.seconds, other.tokens, other.seconds) for one, other in laps]))


def resampled_sums(table_KF: NDArray[Any]) -> NDArray[Any]:
    """Return the column sums of a table, `[1 + X, F]`: first of its rows, then of X bootstrap resamples of them."""
    count = len(table_KF)
    drawn_XK = np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))
    places_XK = drawn_XK + count * np.arange(len(drawn_XK))[:, None]  # separate bins for each resample in one bincount
    weights_XK = np.bincount(places_XK.ravel(), minlength=drawn_XK.size).reshape(drawn_XK.shape)
    return np.asarray(np.vstack([np.ones(count), weights_XK]) @ table_KF)


def interval_of(figures_X: NDArray[Any]) -> tuple[float, float, float]:
    """Return a figure and its 95 % bootstrap interval, given the figure followed by those of resamples."""
    low, high = np.quantile(figures_X[1:], [0.025, 0.975])
    return float(figures_X[0]), float(low), float(high)


def speedup_interval(table_K4: NDArray[Any]) -> tuple[float, float, float]:
    """Return a speed-up and its 95 % interval; rows are tokens and seconds of a setting, then of the baseline."""
    sums_4X = np.maximum(resampled_sums(table_K4), 1e-9).T
    return interval_of(sums_4X[0] / sums_4X[1] / (sums_4X[2] / sums_4X[3]))


def mean_interval(values_K: NDArray[Any]) -> tuple[float, float, float]:
    """Return a mean and its 95 % interval, for instance of the differences between two settings for each prompt."""
    return interval_of(resampled_sums(values_K[:, None])[:, 0] / len(values_K))


def schedule(rivals: int) -> Iterator[tuple[int, int]]:
    """Yield the number of rivals and of laps in each round: each has half as many rivals and twice as many laps."""
    laps = _FIRST_LAPS
    while rivals > _FINALISTS:
        yield rivals, laps
        rivals, laps = math.ceil(rivals / 2), 2 * laps
    yield rivals, _LAST_LAPS


def planned_turns(rivals: int) -> int:
    """Return how many laps all candidates run together, plain decoding included."""
    return sum((1 + remaining) * laps for remaining, laps in schedule(rivals))


def hold_contest(
    plain: Candidate, rivals: Sequence[Candidate], run: Callable[[Candidate, int], Lap], out_of_time: Callable[[], bool]
) -> list[Candidate]:
    """Hold a contest and return the rivals left at its end.

    `run(candidate, number)` runs a lap; `out_of_time` is checked once all candidates have run it.
    """
    remaining = list(rivals)
    for places, laps in schedule(len(rivals)):
        remaining = sorted(remaining, key=lambda one: -one.rate)[:places]
        for _ in range(laps):
            number = len(plain.laps)
            for candidate in (plain, *remaining):
                candidate.laps.append(run(candidate, number))
            if number + 1 >= LEAST_LAPS and out_of_time():
                return remaining
    return remaining


def winner(plain: Candidate, finalists: Sequence[Candidate]) -> Candidate:
    """Return the fastest finalist whose interval is above plain decoding; if there is none, plain decoding."""
    sure = [one for one in finalists if one.speedup(plain)[1] > 1]
    return max(sure, key=lambda one: one.rate, default=plain)
