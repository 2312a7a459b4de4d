"""The losslessness kit: everything that is tried on a rule, in order."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from polydraft.certify.certificate import Certificate
from polydraft.certify.check import Check, CounterExample
from polydraft.certify.enumeration import ImproperDrawingError
from polydraft.certify.node_trials import black_box_trial, enumeration_trial, fixture_trials, support_trial
from polydraft.certify.own_rule import RuleError
from polydraft.certify.power import power_check
from polydraft.certify.sizes import FULL, Sizes
from polydraft.certify.smallest import of_error, rounded, smallest_enumerated, smallest_sampled
from polydraft.certify.subject import Subject
from polydraft.certify.text_trials import greedy_trial, texts_trial
from polydraft.certify.trial import NO_RESULT, Trial, decide, failed, passes, threshold_of

Observer = Callable[[str, int, int], None]
"""Told `(phase, done, total)`."""
Step = Callable[[Subject, Sizes], Trial | list[Trial]]

CLAIM = "no error was found in the law of what is emitted; what could have escaped is stated above"


def certify(
    subjects: Sequence[Subject], sizes: Sizes = FULL, *, power: bool = True, observer: Observer = lambda *_: None
) -> Certificate:
    """Try rules in every way there is.

    Parameters
    ----------
    subjects : sequence of Subject
        See `find_subject`.
    sizes : Sizes
        How much to try.
    power : bool
        Whether the known wrong rules go through the same checks.
    observer : callable
        Told how far it is.

    Returns
    -------
    Certificate
    """
    checks: list[Check] = []
    for subject in subjects:
        checks += check_subject(subject, sizes, observer)
    if power:
        checks.append(power_check(sizes, observer))
    kinds = {subject.name: subject.kind for subject in subjects}
    return Certificate(tuple(kinds), tuple(checks), CLAIM, tuple(kinds.values()))


def check_subject(subject: Subject, sizes: Sizes, observer: Observer = lambda *_: None) -> list[Check]:
    """Run all checks of one subject, and decide them together."""
    steps: list[tuple[str, Step]] = [*_node_steps(subject), ("texts", texts_trial), ("greedy", greedy_trial)]
    trials: list[Trial] = []
    for number, (name, step) in enumerate(steps, start=1):
        trials += _tried(name, step, subject, sizes)
        observer(subject.name, number, len(steps))
        if trials[-1].measure == NO_RESULT:  # nor will it return anything elsewhere
            break
    threshold = threshold_of(trials)
    wrong = [trial for trial in trials if not passes(trial, threshold)]
    if wrong:
        trials = _with_smallest(subject, trials, wrong[0])
    return [decide(subject.name, trial, threshold) for trial in trials]


def _node_steps(subject: Subject) -> list[tuple[str, Step]]:
    if subject.texts_only:
        return []
    first: tuple[str, Step] = ("enumeration", enumeration_trial) if subject.has_law else ("cases", black_box_trial)
    return [first, ("fixture", fixture_trials), ("support", support_trial)]


def _tried(name: str, step: Step, subject: Subject, sizes: Sizes) -> list[Trial]:
    """Run one step; what a rule raises is a finding like any other."""
    started = time.monotonic()
    try:
        found = step(subject, sizes)
    except RuleError as error:
        found = failed(name, of_error(error))
    except Exception as error:  # a scheme of the user's own may raise anything
        line = (str(error).strip().splitlines() or [""])[0]
        reason = line if isinstance(error, ImproperDrawingError) else f"raised {type(error).__name__}: {line}"
        found = failed(name, CounterExample(reason=reason))
    trials = found if isinstance(found, list) else [found]
    return [replace(trial, seconds=(time.monotonic() - started) / len(trials)) for trial in trials]


def _with_smallest(subject: Subject, trials: list[Trial], wrong: Trial) -> list[Trial]:
    """Give the first trial that failed the smallest counter-example there is, where a search can find one."""
    example = wrong.counter_example
    try:
        if wrong.name == "enumeration":
            example = smallest_enumerated(subject.scheme) or (example and rounded(subject.scheme, example)) or example
        elif wrong.name in ("fixture", "joint", "cases"):
            example = smallest_sampled(subject.scheme) or example
    except Exception:  # what the rule raises on other laws is no better than what it did on these
        return trials
    return [replace(trial, counter_example=example) if trial is wrong else trial for trial in trials]
