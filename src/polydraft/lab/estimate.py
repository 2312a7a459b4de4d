"""Figures with 95 % intervals, and whether they support a claim."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

LEAST_PROMPTS = 6
"""With fewer prompts there is no interval: by chance alone, five prompts are all faster, or all slower, one time in 16."""
_NORMAL = 1.96
"""Half the width of a 95 % interval in standard errors."""
_LOW, _HIGH = "_low", "_high"


class Verdict(StrEnum):
    """Whether measured figures have the order that a paper reports."""

    YES = "yes"
    NO = "**no**"
    UNDECIDED = "not distinguishable"
    UNBOUNDED = "no interval"
    """Measured on too few prompts for an interval, or before intervals were recorded."""
    UNKNOWN = "not measured"


class Estimate(float):
    """A measured figure with the ends of its 95 % interval; arithmetic operators drop the interval.

    The ends are None if there is no interval, and both equal the figure if it is exact.
    """

    low: float | None
    high: float | None

    def __new__(cls, value: float, low: float | None = None, high: float | None = None) -> "Estimate":
        """Make a float with ends."""
        one = super().__new__(cls, value)
        one.low, one.high = low, high
        return one

    @classmethod
    def exactly(cls, value: float) -> "Estimate":
        """Return an exact figure, such as the speed-up of plain decoding over itself."""
        return cls(value, value, value)

    @classmethod
    def of_mean(cls, value: float, standard_error: float | None) -> "Estimate":
        """Return a mean with its normal interval, or without one if the error is unknown."""
        if standard_error is None:
            return cls(value)
        return cls(value, value - _NORMAL * standard_error, value + _NORMAL * standard_error)

    def scaled(self, factor: float) -> "Estimate":
        """Return the figure in other units; a negative factor swaps the ends."""
        ends = sorted(factor * end for end in (self.low, self.high) if end is not None)
        return Estimate(factor * self, *ends)

    @classmethod
    def mean_of(cls, figures: "Sequence[Estimate]") -> "Estimate":
        """Return the mean of figures that were measured independently."""
        ends, value = [bounds(one) for one in figures], sum(figures) / len(figures)
        spreads = [(one - low, high - one) for one, (low, high) in zip(figures, filter(None, ends), strict=False)]
        if len(spreads) < len(figures):
            return cls(value)
        below, above = (math.hypot(*side) / len(figures) for side in zip(*spreads, strict=True))
        return cls(value, value - below, value + above)

    def minus(self, other: "Estimate") -> "Estimate":
        """Return the difference, as if both were measured independently; if they share prompts, the interval is too wide."""
        mine, others, value = bounds(self), bounds(other), float(self) - float(other)
        if mine is None or others is None:
            return Estimate(value)
        below, above = math.hypot(self - mine[0], others[1] - other), math.hypot(mine[1] - self, other - others[0])
        return Estimate(value, value - below, value + above)

    def over(self, other: "Estimate") -> "Estimate":
        """Return the ratio of two positive figures, as if both were measured independently."""
        mine, others = bounds(self), bounds(other)
        if mine is None or others is None or min(*mine, *others) <= 0:
            return Estimate(float(self) / float(other))
        logs = [Estimate(*map(math.log, (one, *ends))) for one, ends in ((self, mine), (other, others))]
        ratio = logs[0].minus(logs[1])
        return Estimate(*map(math.exp, (ratio, *(bounds(ratio) or ()))))


def difference(one: Estimate | None, other: Estimate | None) -> Estimate | None:
    """Return `one.minus(other)`, or None if either was not measured."""
    return None if one is None or other is None else one.minus(other)


def bounds(value: float | None) -> tuple[float, float] | None:
    """Return the ends of a figure's interval; None if it has none."""
    if not isinstance(value, Estimate) or value.low is None or value.high is None:
        return None
    return value.low, value.high


def verdict(figures: Sequence[float | None], *, alike: bool = False) -> Verdict:
    """Decide whether figures fall in a reported order, largest first.

    They do if every interval lies wholly above the next one. They do not if some interval lies wholly above an earlier one.
    That is stricter than a test at 5 %: with equal intervals it takes 2.8 standard errors of the difference. With `alike` the
    report is that the figures do not differ, which can be refuted but never confirmed.
    """
    if any(value is None for value in figures):
        return Verdict.UNKNOWN
    known = [ends for ends in map(bounds, figures) if ends is not None]
    if len(known) < len(figures):
        return Verdict.UNBOUNDED
    if any(later[0] > earlier[1] for place, earlier in enumerate(known) for later in known[place + 1 :]):
        return Verdict.NO
    if not all(first[0] > second[1] for first, second in pairwise(known)):
        return Verdict.UNDECIDED
    return Verdict.NO if alike else Verdict.YES


def with_intervals(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures of `results.json`, nested ones too, with every figure and its `_low` and `_high` as one `Estimate`."""
    return {
        key: _joined(value, figures.get(key + _LOW), figures.get(key + _HIGH))
        for key, value in figures.items()
        if not key.endswith((_LOW, _HIGH))
    }


def _joined(value: Any, low: Any, high: Any) -> Any:
    if isinstance(value, Mapping):
        return with_intervals(value)
    if isinstance(value, list):
        ends = zip(low, high, strict=True) if low and high else [(None, None)] * len(value)
        return [_joined(one, *pair) for one, pair in zip(value, ends, strict=True)]
    return Estimate(value, low, high) if isinstance(value, float) else value
