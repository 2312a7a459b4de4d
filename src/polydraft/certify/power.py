"""The kit's power: known wrong rules and walks go through the same checks, and every one must be refused."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from polydraft.certify.check import FALSE_ALARM, Check
from polydraft.certify.mutants import CORRECT, STRUCTURAL, SUBTLE, DrawnByRank
from polydraft.certify.node_trials import enumeration_trial, fixture_trials
from polydraft.certify.sizes import Sizes
from polydraft.certify.subject import Subject
from polydraft.certify.text_trials import settings_of, texts_trial
from polydraft.certify.trial import passes
from polydraft.certify.wrong_walks import WRONG_WALKS
from polydraft.schemes import RejectionWithoutReplacement, Scheme
from polydraft.walks import NodeWalk

_TESTS = 100
"""Statistical tests that a certificate has at most; wrong rules are held against that threshold, the hardest to fall below."""


def power_check(sizes: Sizes, observer: Callable[[str, int, int], None] = lambda *_: None) -> Check:
    """Run the wrong rules, and the correct rules that they were made from, through the checks.

    Enumeration must refuse every wrong rule, samples of the fixture all but the subtle ones, texts every wrong walk; no
    check may refuse a correct rule.
    """
    started = time.monotonic()
    rules: list[type[Scheme]] = [*CORRECT, *STRUCTURAL, *SUBTLE, DrawnByRank]
    total = len(rules) + len(WRONG_WALKS)
    details: list[dict[str, Any]] = []
    for rule in rules:
        details.append(_tried(rule, sizes))
        observer("wrong rules", len(details), total)
    for walk in WRONG_WALKS:
        subject = Subject(walk.__name__, RejectionWithoutReplacement(), walk())
        settings = [setting for setting in settings_of(replace(sizes, small_texts=2_000)) if setting.whole]
        refused = not passes(texts_trial(subject, sizes, settings), FALSE_ALARM / _TESTS)
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
        note=_statement(wrong) if not missed else f"(not as they should be: {', '.join(missed)})",
        details=details,
    )


def _tried(rule: type[Scheme], sizes: Sizes) -> dict[str, Any]:
    subject = Subject(rule.__name__, rule(), NodeWalk())
    threshold = FALSE_ALARM / _TESTS
    # One shape is enough to refuse by, and keeps the list short.
    small = replace(sizes, vocabularies=(4,), counts=(2,))
    trials = [enumeration_trial(subject, small), *fixture_trials(subject, small)]
    refused_by = [trial.name for trial in trials if not passes(trial, threshold)]
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
