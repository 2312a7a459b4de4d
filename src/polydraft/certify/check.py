"""One check of a certificate: what was tried, how much, what came out, and what would have been too much."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FALSE_ALARM = 1e-4
"""Chance that a correct rule fails any of its statistical tests; seeds are fixed, so never twice."""


@dataclass(frozen=True, kw_only=True)
class CounterExample:
    """Where a rule goes wrong, as small as it was found."""

    reason: str
    """What is wrong, in words."""
    target_probs: list[float] = field(default_factory=list)
    draft_probs: list[float] = field(default_factory=list)
    drafts: int | None = None
    """How many children were drawn."""
    law: list[float] = field(default_factory=list)
    """The emitted token's law, or the shares of sampled ones, over all drawings."""
    expected: list[float] = field(default_factory=list)
    """What it should be."""
    drawings: list[dict[str, Any]] = field(default_factory=list)
    """`children`, their `chance`, and the `law` that the rule gave, where it is known."""
    details: dict[str, Any] = field(default_factory=dict)
    """Anything else: texts, prompts, tokens."""

    @property
    def distance(self) -> float | None:
        """Total variation between what came out and what should."""
        if not self.law or len(self.law) != len(self.expected):
            return None
        return sum(abs(one - other) for one, other in zip(self.law, self.expected, strict=True)) / 2

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes, empty parts left out."""
        parts = {**vars(self), "total_variation": self.distance}
        return {name: plain(value) for name, value in parts.items() if value not in ([], {}, None)}


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one check."""

    name: str
    subject: str
    passed: bool
    size: int
    unit: str
    """What `size` counts."""
    measure: str
    """What `worst` is."""
    worst: float | None
    threshold: float | None
    """What `worst` may be: at most, for errors; at least, for p-values."""
    tests: int = 0
    """Statistical tests in this check."""
    false_alarm: float = 0.0
    """Chance that a correct rule fails this check."""
    detects: float | None = None
    """Total-variation error that is seen with chance .99, where that can be said."""
    seconds: float = 0.0
    note: str = ""
    counter_example: CounterExample | None = None
    details: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        parts = {name: plain(value) for name, value in vars(self).items() if name != "counter_example"}
        example = self.counter_example
        return {**parts, "counter_example": None if example is None else example.as_dict()}


def plain(value: Any) -> Any:
    """Replace numbers that JSON does not know by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
