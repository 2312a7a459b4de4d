"""What one check has found, before it is decided whether that is too much."""

from dataclasses import dataclass, field
from typing import Any

from polydraft.certify.check import FALSE_ALARM, Check, CounterExample
from polydraft.certify.chi_square import detectable_distance

NO_RESULT = "no result"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Findings of one check of one subject.

    Either exact, with a `worst` value and the largest one `allowed`, or statistical, with `p_values`: how small these may be
    depends on how many there are in all trials of the subject.
    """

    name: str
    size: int
    unit: str
    measure: str = "smallest p-value"
    worst: float | None = None
    allowed: float | None = None
    p_values: list[float] = field(default_factory=list)
    tested: tuple[int, int] | None = None
    """Samples and degrees of freedom of the test whose power can be told."""
    pooled: float = 0.0
    """Mass of the cells that this test cannot tell apart, where an error may hide."""
    seconds: float = 0.0
    note: str = ""
    counter_example: CounterExample | None = None
    details: list[dict[str, Any]] = field(default_factory=list)


def failed(name: str, example: CounterExample) -> Trial:
    """Return the trial of a rule that did not even return."""
    return Trial(name=name, size=0, unit="", measure=NO_RESULT, note=example.reason, counter_example=example)


def threshold_of(trials: list[Trial]) -> float:
    """Return how small a p-value may be: all statistical tests of a subject are one family (Bonferroni)."""
    return FALSE_ALARM / max(sum(len(trial.p_values) for trial in trials), 1)


def passes(trial: Trial, threshold: float) -> bool:
    """Whether findings are as they would be for a correct rule."""
    if trial.measure == NO_RESULT:
        return False
    if trial.p_values:
        return min(trial.p_values) > threshold
    return trial.worst is not None and trial.allowed is not None and trial.worst <= trial.allowed


def decide(subject: str, trial: Trial, threshold: float) -> Check:
    """Turn findings into a check."""
    statistical, passed = bool(trial.p_values), passes(trial, threshold)
    distance = detectable_distance(*trial.tested, threshold) + trial.pooled if trial.tested and statistical else None
    return Check(
        name=trial.name,
        subject=subject,
        passed=passed,
        size=trial.size,
        unit=trial.unit,
        measure=trial.measure,
        worst=min(trial.p_values) if statistical else trial.worst,
        threshold=threshold if statistical else trial.allowed,
        tests=len(trial.p_values),
        false_alarm=len(trial.p_values) * threshold,
        detects=distance,
        seconds=round(trial.seconds, 3),
        note=trial.note,
        counter_example=None if passed else trial.counter_example,
        details=trial.details,
    )
