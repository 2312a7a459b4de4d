"""The certificate: everything that was tried, and what it is worth."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.certify.check import FALSE_ALARM, Check, CounterExample
from polydraft.certify.enumeration import TOLERANCE

_SHOWN = 8
"""Drawings, or tokens of a law, that a text shows of a counter-example; JSON has all."""


@dataclass(frozen=True)
class Certificate:
    """All checks of one or more subjects."""

    subjects: tuple[str, ...]
    checks: tuple[Check, ...]
    claim: str
    """What holds if all checks passed."""
    kinds: tuple[str, ...] = ()
    """What each subject is, in words."""

    @property
    def certified(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """Checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return {
            "certified": self.certified,
            "subject": self.subjects[0] if len(self.subjects) == 1 else list(self.subjects),
            "kind": self.kinds[0] if len(self.kinds) == 1 else list(self.kinds),
            "false_alarm": FALSE_ALARM if any(check.tests for check in self.checks) else 0.0,
            "checks": [check.as_dict() for check in self.checks],
        }

    def text(self) -> str:
        """Return what people read."""
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
        """Return the first check of each subject that has a counter-example; it is the smallest."""
        first: dict[str, Check] = {}
        for check in self.failures:
            if check.counter_example is not None:
                first.setdefault(check.subject, check)
        return list(first.values())

    def _odds(self) -> Iterator[str]:
        most = max((sum(check.tests for check in self.checks if check.subject == name) for name in self.subjects), default=0)
        if most:
            yield (
                f"False alarms: a correct rule fails with chance {FALSE_ALARM:g} at most, over the choice of seeds; "
                f"its statistical tests, {most} at most, share that (Bonferroni). Exact checks raise none."
            )
        if any(check.name == "enumeration" for check in self.checks):
            yield f"Power: enumeration sees every error above {TOLERANCE:g} on the laws it tried."
        if any(check.name == "cases" for check in self.checks):
            yield "Power: of a rule that does not tell its law, errors as small as an epsilon in a denominator escape."
        seen = {(check.name, check.unit): check.detects for check in self.checks if check.detects is not None}
        for (name, unit), distance in seen.items():
            what = "share of prompts with a wrong text" if unit == "prompts" else "total-variation error"
            yield f"Power: {name} sees a {what} of {distance:.3f} or more with chance .99."


def describe(check: Check) -> str:
    """Say in one line what was tried and what came out."""
    if check.worst is None or check.threshold is None:
        return check.note
    worst, limit = (_number(value, digits=2) for value in (check.worst, check.threshold))
    return f"{check.size:,} {check.unit}{check.note and f' {check.note}'}: {check.measure} {worst} (limit {limit})"


def example_lines(example: CounterExample) -> Iterator[str]:
    """Say what went wrong, where, and how far."""
    yield f"  {example.reason}"
    if example.target_probs:
        yield f"  target_probs  {_law(example.target_probs)}"
        yield f"  draft_probs   {_law(example.draft_probs)}"
    if example.drafts is not None:
        yield f"  drafts        {example.drafts}"
    for drawing in example.drawings[:_SHOWN]:
        chance = f" (chance {_number(drawing['chance'])})" if "chance" in drawing else ""
        law = f": law {_law(drawing['law'])}" if "law" in drawing else ""
        yield f"    children {drawing['children']}{chance}{law}"
    if len(example.drawings) > _SHOWN:
        yield f"    and {len(example.drawings) - _SHOWN} more"
    if example.law:
        yield f"  came out      {_law(example.law)}"
        yield f"  should be     {_law(example.expected)}"
    if example.distance is not None:
        yield f"  total variation {_number(example.distance)}"
    for name, value in example.details.items():
        yield f"  {name}: {value}"


def _law(law: Sequence[float]) -> str:
    shown = ", ".join(_number(value) for value in law[: 2 * _SHOWN])
    return f"({shown}{', ...' if len(law) > 2 * _SHOWN else ''})"


def _number(value: float, digits: int = 4) -> str:
    """Write a number as short as it is clear."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.{digits}g}"
