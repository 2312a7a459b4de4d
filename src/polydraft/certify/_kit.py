"""The losslessness kit: run all checks of a rule, and the same checks of known wrong rules, to show their power."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from polydraft.certify._certificate import Certificate, Check, CounterExample, Trial
from polydraft.certify._node_trials import (
    black_box_trial,
    enumeration_trial,
    fixture_trials,
    of_error,
    rounded,
    smallest_enumerated,
    smallest_sampled,
    support_trial,
)
from polydraft.certify._subject import FULL, RuleError, Sizes, Subject
from polydraft.certify._text_trials import greedy_trial, settings_of, texts_trial
from polydraft.certify.chi_square import FALSE_ALARM
from polydraft.certify.enumeration import ImproperDrawingError
from polydraft.certify.mutants import CORRECT, STRUCTURAL, SUBTLE, WRONG_WALKS, DrawnByRank
from polydraft.errors import first_line
from polydraft.verify import NodeWalk, RejectionWithoutReplacement, Scheme

Observer = Callable[[str, int, int], None]
"""Called with `(phase, done, total)`."""
Step = Callable[[Subject, Sizes], Trial | list[Trial]]

CLAIM = "no error was found in the distribution of emitted tokens; what could have escaped is stated above"
_NO_RESULT = "no result"
_HARDEST = FALSE_ALARM / 100
"""Threshold for wrong rules: that of a certificate with 100 statistical tests, more than any has."""


def certify(
    subjects: Sequence[Subject], sizes: Sizes = FULL, *, power: bool = True, observer: Observer = lambda *_: None
) -> Certificate:
    """Run all checks of some rules.

    Parameters
    ----------
    subjects : sequence of Subject
        See `find_subject`.
    sizes : Sizes
        How much to try.
    power : bool
        Whether to run the known wrong rules through the same checks.
    observer : callable
        Called with progress.
    """
    checks: list[Check] = []
    for subject in subjects:
        checks += check_subject(subject, sizes, observer)
    if power:
        checks.append(power_check(sizes, observer))
    kinds = {subject.name: subject.kind for subject in subjects}
    return Certificate(tuple(kinds), tuple(checks), CLAIM, tuple(kinds.values()))


def check_subject(subject: Subject, sizes: Sizes, observer: Observer = lambda *_: None) -> list[Check]:
    """Run all checks of one subject; all its statistical tests share one threshold."""
    steps: list[tuple[str, Step]] = [*_node_steps(subject), ("texts", texts_trial), ("greedy", greedy_trial)]
    trials: list[Trial] = []
    for number, (name, step) in enumerate(steps, start=1):
        trials += _tried(name, step, subject, sizes)
        observer(subject.name, number, len(steps))
        if trials[-1].measure == _NO_RESULT:  # other checks would fail the same way
            break
    # All statistical tests of a subject are one family (Bonferroni).
    threshold = FALSE_ALARM / max(sum(len(trial.p_values) for trial in trials), 1)
    wrong = [trial for trial in trials if not trial.passes(threshold)]
    if wrong:
        trials = _with_smallest(subject, trials, wrong[0])
    return [trial.check(subject.name, threshold) for trial in trials]


def _node_steps(subject: Subject) -> list[tuple[str, Step]]:
    if subject.texts_only:
        return []
    first: tuple[str, Step] = ("enumeration", enumeration_trial) if subject.has_distribution else ("cases", black_box_trial)
    return [first, ("fixture", fixture_trials), ("support", support_trial)]


def _tried(name: str, step: Step, subject: Subject, sizes: Sizes) -> list[Trial]:
    """Run one step; an exception raised by the rule is a finding too."""
    started = time.monotonic()
    try:
        found = step(subject, sizes)
    except Exception as error:  # a user's own scheme may raise anything
        example = _raised(error)
        found = Trial(name=name, size=0, unit="", measure=_NO_RESULT, note=example.reason, counter_example=example)
    trials = found if isinstance(found, list) else [found]
    return [replace(trial, seconds=(time.monotonic() - started) / len(trials)) for trial in trials]


def _raised(error: Exception) -> CounterExample:
    if isinstance(error, RuleError):
        return of_error(error)
    improper = isinstance(error, ImproperDrawingError)
    return CounterExample(reason=first_line(error) if improper else f"raised {first_line(error, kind=True)}")


def _with_smallest(subject: Subject, trials: list[Trial], wrong: Trial) -> list[Trial]:
    """Replace the counter-example of the first failed trial by the smallest one that a search finds."""
    example = wrong.counter_example
    try:
        if wrong.name == "enumeration":
            example = smallest_enumerated(subject.scheme) or (example and rounded(subject.scheme, example)) or example
        elif wrong.name in ("fixture", "joint", "cases"):
            example = smallest_sampled(subject.scheme) or example
    except Exception:  # an exception on other distributions is not a better counter-example
        return trials
    return [replace(trial, counter_example=example) if trial is wrong else trial for trial in trials]


def power_check(sizes: Sizes, observer: Observer = lambda *_: None) -> Check:
    """Run the wrong rules through the checks, and the correct rules that they derive from.

    Enumeration must refuse every wrong rule, samples of the fixture all but the subtle ones, and texts every wrong walk. No
    check may refuse a correct rule.
    """
    started = time.monotonic()
    rules: list[type[Scheme]] = [*CORRECT, *STRUCTURAL, *SUBTLE, DrawnByRank]
    total = len(rules) + len(WRONG_WALKS)
    details: list[dict[str, Any]] = []
    for rule in rules:
        details.append(_power_over(rule, sizes))
        observer("wrong rules", len(details), total)
    for walk in WRONG_WALKS:
        subject = Subject(walk.__name__, RejectionWithoutReplacement(), walk())
        settings = [setting for setting in settings_of(replace(sizes, small_texts=2_000)) if setting.whole]
        refused = not texts_trial(subject, sizes, settings).passes(_HARDEST)
        details.append({"rule": subject.name, "wrong": True, "refused_by": ["texts"] * refused, "expected": ["texts"]})
        observer("wrong rules", len(details), total)
    missed = [entry["rule"] for entry in details if set(entry["expected"]) - set(entry["refused_by"])]
    missed += [entry["rule"] for entry in details if not entry["wrong"] and entry["refused_by"]]
    wrong = [entry for entry in details if entry["wrong"]]
    return Check(
        name="power",
        subject="the kit itself",
        passed=not missed,
        size=len(wrong),
        unit="wrong rules",
        measure="judged wrongly",
        worst=float(len(missed)),
        threshold=0.0,
        seconds=round(time.monotonic() - started, 3),
        note=_statement(wrong) if not missed else f"(wrong verdict on {', '.join(missed)})",
        details=details,
    )


def _power_over(rule: type[Scheme], sizes: Sizes) -> dict[str, Any]:
    subject = Subject(rule.__name__, rule(), NodeWalk())
    # One vocabulary and one number of drafts are enough to refuse a wrong rule, and fast.
    small = replace(sizes, vocabularies=(4,), counts=(2,))
    trials = [enumeration_trial(subject, small), *fixture_trials(subject, small)]
    refused_by = [trial.name for trial in trials if not trial.passes(_HARDEST)]
    if rule in CORRECT:
        expected = []
    elif rule is DrawnByRank:
        expected = ["draws"]
    else:
        expected = ["enumeration"] if rule in SUBTLE else ["enumeration", "fixture"]
    return {"rule": rule.__name__, "wrong": rule not in CORRECT, "refused_by": refused_by, "expected": expected}


def _statement(wrong: list[dict[str, Any]]) -> str:
    by = {name: sum(name in entry["refused_by"] for entry in wrong) for name in ("enumeration", "fixture", "draws", "texts")}
    return (
        f"refused, {by['enumeration']} by enumeration, {by['fixture']} by tokens of fixture F, {by['draws']} by its draws, "
        f"{by['texts']} by texts"
    )
