"""Correct rules are certified, wrong ones are refused with a counter-example that is one."""

import json
from dataclasses import replace

import pytest
import torch

from covering import some_slow
from exactness.checks import enumeration_error
from polydraft.certify import Subject, all_subjects, certify, find_subject
from polydraft.certify._kit import check_subject, power_check
from polydraft.certify.chi_square import FALSE_ALARM
from polydraft.certify.enumeration import TOLERANCE, round_cases
from polydraft.certify.mutants import STRUCTURAL, SUBTLE, WRONG_WALKS, DistinctTestedAsIndependent, Rejection
from polydraft.verify import SCHEMES, WALKS, NodeWalk, RejectionWithoutReplacement, Scheme
from polydraft.verify.weights import normalised

from .conftest import LEAST, TINY

QUICK = {"rrs-wor", "hybrid+block", "rrs-wor+node"}
"""One by each walk: the others have tests of their own, of the same checks, in `exactness` and `walks`."""


@pytest.mark.parametrize("subject", [
    pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.slow) for one in all_subjects()
])  # fmt: skip
def test_everything_that_is_registered_is_certified(subject: Subject) -> None:
    certificate = certify([subject], TINY, power=False)
    assert certificate.certified, certificate.text()
    tests = sum(check.tests for check in certificate.checks)
    assert sum(check.false_alarm for check in certificate.checks) == pytest.approx(FALSE_ALARM)
    assert all(check.threshold == pytest.approx(FALSE_ALARM / tests) for check in certificate.checks if check.tests)


def test_all_means_every_scheme_and_every_walk() -> None:
    names = [subject.name for subject in all_subjects()]
    assert set(SCHEMES) <= set(names)
    for walk in WALKS:
        assert walk == "node" or any(name.endswith(f"+{walk}") for name in names)


@pytest.mark.parametrize("walk", list(WALKS))
def test_a_walk_is_found_with_a_scheme_of_several_children(walk: str) -> None:
    subject = find_subject(walk)
    assert subject.walk.name == walk and subject.walk.fits(subject.scheme) and subject.scheme.max_children != 1


def emitted_distribution(scheme: Scheme, target: list[float], draft: list[float], drafts: int) -> list[float]:
    """Sum over drawings, one after the other, in plain Python."""
    target_1V, draft_1V = torch.tensor([target], dtype=torch.float64), torch.tensor([draft], dtype=torch.float64)
    total = [0.0] * len(target)

    def descend(children: list[int], chance: float) -> None:
        children_1K = torch.tensor([children], dtype=torch.long).reshape(1, -1)
        if len(children) == drafts:
            for token, share in enumerate(scheme.distribution(target_1V, draft_1V, children_1K)[0].tolist()):
                total[token] += chance * share
            return
        distribution = scheme.child_distribution(draft_1V, children_1K, drafts)[0].tolist()
        for child, share in enumerate(distribution):
            if share:
                descend([*children, child], chance * share)
        if not any(distribution):
            descend([*children, -1], chance)

    descend([], 1.0)
    return total


# Enumeration catches all of them in `exactness/test_mutations`; by default, here is what the command makes of some.
@pytest.mark.parametrize(
    "mutant", some_slow([*STRUCTURAL, *SUBTLE], [*STRUCTURAL[2:], *SUBTLE[2:]]), ids=lambda mutant: mutant.__name__
)
def test_wrong_rules_are_refused_with_a_counter_example_that_is_one(
    invoke, least_sizes, monkeypatch, mutant: type[Scheme]
) -> None:
    monkeypatch.setattr("polydraft.certify.QUICK", replace(LEAST, vocabularies=(4,), cases=40))
    name = f"{mutant.__module__}:{mutant.__name__}"
    code, out, err = invoke("certify", name, "--quick", "--no-power", "--json")
    result = json.loads(out)
    assert code == 1 and not result["certified"]
    assert err.splitlines()[-1].startswith(f"polydraft: error: {name} is not certified")
    failed = next(check for check in result["checks"] if not check["passed"])
    example = failed["counter_example"]
    assert failed["name"] == "enumeration" and failed["worst"] > failed["threshold"]
    target, draft, drafts = example["target_probs"], example["draft_probs"], example["drafts"]
    distribution = emitted_distribution(mutant(), target, draft, drafts)
    assert distribution == pytest.approx(example["distribution"]) and example["expected"] == pytest.approx(target)
    assert max(abs(one - other) for one, other in zip(distribution, target, strict=True)) > 1e-6
    assert len(target) <= 4 and drafts <= 3
    assert sum(drawing["chance"] for drawing in example["drawings"]) == pytest.approx(1)
    assert all(len(str(round(value, 12))) <= 6 for value in (*target, *draft)), "round numbers"


def test_the_smallest_counter_example_comes_first() -> None:
    rule = DistinctTestedAsIndependent()
    checks = check_subject(Subject("wrong", rule, NodeWalk()), TINY)
    example = next(check.counter_example for check in checks if not check.passed)
    assert example is not None and example.drafts == 2 and len(example.target_probs) == 3
    for vocabulary, count in ((2, 1), (2, 2), (2, 3), (3, 1)):
        assert enumeration_error(rule, *round_cases(vocabulary, 5), count)[0] < TOLERANCE


def test_a_counter_example_without_round_neighbours_is_rounded() -> None:
    class WrongWhereTheDraftHasALittle(Rejection):  # no multiple of 1/20 is so little
        def distribution(self, target_probs_RV, draft_probs_RV, children_RK):
            little_R1 = ((draft_probs_RV > 1e-3) & (draft_probs_RV < 0.049)).any(-1, keepdim=True)
            return torch.where(
                little_R1, normalised(draft_probs_RV), super().distribution(target_probs_RV, draft_probs_RV, children_RK)
            )

    checks = check_subject(Subject("wrong", WrongWhereTheDraftHasALittle(), NodeWalk()), TINY)
    example = next(check.counter_example for check in checks if not check.passed)
    assert example is not None and example.distance is not None and example.distance > 1e-3
    assert all(round(value, 3) == pytest.approx(value, abs=1e-9) for value in (*example.target_probs, *example.draft_probs))


@pytest.mark.parametrize("walk", WRONG_WALKS, ids=lambda walk: walk.__name__)
def test_wrong_walks_are_refused(walk) -> None:
    sizes = replace(LEAST, small_texts=2_000)
    certificate = certify([Subject("wrong", RejectionWithoutReplacement(), walk(), texts_only=True)], sizes, power=False)
    failed = certificate.failures[0]
    assert failed.name == "texts" and failed.counter_example is not None
    assert "three tokens" in certificate.text()


@pytest.mark.slow
def test_every_wrong_rule_is_refused_by_the_checks_that_should() -> None:
    sizes = replace(TINY, cases=40, node_samples=12_000)
    seen = []
    check = power_check(sizes, observer=lambda *report: seen.append(report))
    assert check.passed, check.note
    assert check.size == len(STRUCTURAL) + len(SUBTLE) + len(WRONG_WALKS) + 1
    assert seen[-1][1] == seen[-1][2] == len(check.details)


@pytest.mark.parametrize(("group", "rule"), [("STRUCTURAL", Rejection), ("CORRECT", STRUCTURAL[0])])
def test_the_power_check_is_able_to_fail(monkeypatch: pytest.MonkeyPatch, group: str, rule: type[Scheme]) -> None:
    for name in ("CORRECT", "STRUCTURAL", "SUBTLE"):
        monkeypatch.setattr(f"polydraft.certify._kit.{name}", [rule] if name == group else [])
    monkeypatch.setattr("polydraft.certify._kit.WRONG_WALKS", [])
    check = power_check(TINY)
    assert not check.passed and rule.__name__ in check.note
