"""Trials, checks and certificates: what was tried, with which results, and what a correct rule may give."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.certify.chi_square import FALSE_ALARM, detectable_distance
from polydraft.certify.enumeration import TOLERANCE

_SHOWN = 8
"""Most drawings that a counter-example shows as text, and half the most tokens of a distribution; JSON has all."""


@dataclass(frozen=True, kw_only=True)
class CounterExample:
    """A case on which a rule goes wrong, the smallest that was found."""

    reason: str
    """What is wrong."""
    target_probs: list[float] = field(default_factory=list)
    draft_probs: list[float] = field(default_factory=list)
    drafts: int | None = None
    """Number of children drawn."""
    distribution: list[float] = field(default_factory=list)
    """The emitted token's distribution over all drawings, or its shares among samples."""
    expected: list[float] = field(default_factory=list)
    """The correct distribution."""
    drawings: list[dict[str, Any]] = field(default_factory=list)
    """`children`, with their `chance` and the rule's `distribution` if known."""
    details: dict[str, Any] = field(default_factory=dict)
    """Anything else: texts, prompts, tokens."""

    @property
    def distance(self) -> float | None:
        """Total variation between `distribution` and `expected`; None if either is unknown."""
        if not self.distribution or len(self.distribution) != len(self.expected):
            return None
        return sum(abs(one - other) for one, other in zip(self.distribution, self.expected, strict=True)) / 2

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, without empty parts."""
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
    """Limit of `worst`: the largest error, or the smallest p-value, that passes."""
    tests: int = 0
    """Statistical tests in this check."""
    false_alarm: float = 0.0
    """Probability that a correct rule fails this check."""
    detects: float | None = None
    """Total-variation error that the check detects with probability .99, if known."""
    seconds: float = 0.0
    note: str = ""
    counter_example: CounterExample | None = None
    details: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        parts = {name: plain(value) for name, value in vars(self).items() if name != "counter_example"}
        example = self.counter_example
        return {**parts, "counter_example": None if example is None else example.as_dict()}


def plain(value: Any) -> Any:
    """Replace infinities and NaNs, which JSON does not have, by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Findings of one check of one subject: exact (`worst` must be at most `allowed`) or statistical (`p_values`).

    Which p-values pass depends on how many there are in all trials of the subject.
    """

    name: str
    size: int
    unit: str
    measure: str = "smallest p-value"
    worst: float | None = None
    allowed: float | None = None
    p_values: list[float] = field(default_factory=list)
    tested: tuple[int, int] | None = None
    """Samples and degrees of freedom of the test that `detects` describes."""
    pooled: float = 0.0
    """Mass of the cells that this test pools, where an error may hide."""
    seconds: float = 0.0
    note: str = ""
    counter_example: CounterExample | None = None
    details: list[dict[str, Any]] = field(default_factory=list)

    def passes(self, threshold: float) -> bool:
        """Whether a correct rule could give these findings; without any findings it fails."""
        if self.p_values:
            return min(self.p_values) > threshold
        return self.worst is not None and self.allowed is not None and self.worst <= self.allowed

    def check(self, subject: str, threshold: float) -> Check:
        """Return the outcome, given the smallest p-value that passes."""
        statistical, passed = bool(self.p_values), self.passes(threshold)
        return Check(
            name=self.name,
            subject=subject,
            passed=passed,
            size=self.size,
            unit=self.unit,
            measure=self.measure,
            worst=min(self.p_values) if statistical else self.worst,
            threshold=threshold if statistical else self.allowed,
            tests=len(self.p_values),
            false_alarm=len(self.p_values) * threshold,
            detects=detectable_distance(*self.tested, threshold) + self.pooled if self.tested and statistical else None,
            seconds=round(self.seconds, 3),
            note=self.note,
            counter_example=None if passed else self.counter_example,
            details=self.details,
        )


@dataclass(frozen=True)
class Certificate:
    """All checks of one or more subjects."""

    subjects: tuple[str, ...]
    checks: tuple[Check, ...]
    claim: str
    """What a certificate says if all checks passed."""
    kinds: tuple[str, ...] = ()
    """What each subject is, such as its scheme and walk."""

    @property
    def certified(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """Checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "certified": self.certified,
            "subject": self.subjects[0] if len(self.subjects) == 1 else list(self.subjects),
            "kind": self.kinds[0] if len(self.kinds) == 1 else list(self.kinds),
            "false_alarm": FALSE_ALARM if any(check.tests for check in self.checks) else 0.0,
            "checks": [check.as_dict() for check in self.checks],
        }

    def text(self) -> str:
        """Return the form that people read."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        width = max(len(check.name) for check in self.checks)
        kinds = dict(zip(self.subjects, self.kinds, strict=False))
        for subject in dict.fromkeys(check.subject for check in self.checks):
            yield f"{subject} ({kinds[subject]})" if subject in kinds else subject
            for check in self.checks:
                if check.subject == subject:
                    yield f"  {'passed' if check.passed else 'FAILED'}  {check.name:<{width}}  {describe(check)}"
        yield ""
        yield from self._odds()
        for check in self._explained():
            assert check.counter_example is not None
            yield from ["", f"counter-example ({check.subject}, {check.name}):", *example_lines(check.counter_example)]
        yield ""
        wrong = ", ".join(dict.fromkeys(check.subject for check in self.failures))
        yield f"CERTIFIED: {self.claim}" if self.certified else f"NOT CERTIFIED: {wrong}"

    def _explained(self) -> list[Check]:
        """Return the first failed check of each subject that has a counter-example; its example is the smallest."""
        first: dict[str, Check] = {}
        for check in self.failures:
            if check.counter_example is not None:
                first.setdefault(check.subject, check)
        return list(first.values())

    def _odds(self) -> Iterator[str]:
        most = max((sum(check.tests for check in self.checks if check.subject == name) for name in self.subjects), default=0)
        if most:
            yield (
                f"False alarms: over the choice of seeds, a correct rule fails with probability {FALSE_ALARM:g} at most, "
                f"shared by up to {most} statistical tests (Bonferroni). Exact checks give no false alarms."
            )
        if any(check.name == "enumeration" for check in self.checks):
            yield f"Power: enumeration sees every error above {TOLERANCE:g} on the distributions it tried."
        if any(check.name == "cases" for check in self.checks):
            yield "Power: if a rule does not state its distribution, errors as small as an epsilon in a denominator escape."
        seen = {(check.name, check.unit): check.detects for check in self.checks if check.detects is not None}
        for (name, unit), distance in seen.items():
            what = "share of prompts with a wrong text" if unit == "prompts" else "total-variation error"
            yield f"Power: {name} detects a {what} of {distance:.3f} or more with probability .99."


def describe(check: Check) -> str:
    """Return in one line what was tried, with which result."""
    if check.worst is None or check.threshold is None:
        return check.note
    worst, limit = (_number(value, digits=2) for value in (check.worst, check.threshold))
    return f"{check.size:,} {check.unit}{check.note and f' {check.note}'}: {check.measure} {worst} (limit {limit})"


def example_lines(example: CounterExample) -> Iterator[str]:
    """Yield lines on what went wrong, for which distributions, and by how much."""
    yield f"  {example.reason}"
    if example.target_probs:
        yield f"  target_probs  {_distribution(example.target_probs)}"
        yield f"  draft_probs   {_distribution(example.draft_probs)}"
    if example.drafts is not None:
        yield f"  drafts        {example.drafts}"
    for drawing in example.drawings[:_SHOWN]:
        chance = f" (probability {_number(drawing['chance'])})" if "chance" in drawing else ""
        distribution = f": distribution {_distribution(drawing['distribution'])}" if "distribution" in drawing else ""
        yield f"    children {drawing['children']}{chance}{distribution}"
    if len(example.drawings) > _SHOWN:
        yield f"    and {len(example.drawings) - _SHOWN} more"
    if example.distribution:
        yield f"  came out      {_distribution(example.distribution)}"
        yield f"  should be     {_distribution(example.expected)}"
    if example.distance is not None:
        yield f"  total variation {_number(example.distance)}"
    for name, value in example.details.items():
        yield f"  {name}: {value}"


def _distribution(distribution: Sequence[float]) -> str:
    shown = ", ".join(_number(value) for value in distribution[: 2 * _SHOWN])
    return f"({shown}{', ...' if len(distribution) > 2 * _SHOWN else ''})"


def _number(value: float, digits: int = 4) -> str:
    """Write a number briefly."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.{digits}g}"
