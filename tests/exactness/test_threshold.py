"""The tuned threshold of `hybrid`: the acceptances it goes by are true, and what it picks is exact."""

import re

import pytest
import torch

from polydraft.errors import UsageError
from polydraft.verify import SCHEMES, Hybrid, ThresholdTuner
from polydraft.verify.hybrid import THRESHOLDS, acceptances, certain_of_top

from .checks import TOLERANCE, enumeration_error, random_cases
from .test_optimality import acceptance


@pytest.mark.parametrize("count", [1, 2, 3])
def test_counterfactual_acceptances_are_those_of_the_scheme(count: int) -> None:
    target_CV, draft_CV = random_cases(5, cases=80, seed=count)
    value_CK = draft_CV.topk(count, dim=1).values.numpy()
    foreseen_CK = acceptances(target_CV, draft_CV, count)
    for threshold in (0.0, 0.4, 0.9, float("inf")):
        certain_C1 = torch.as_tensor(certain_of_top(value_CK, draft_CV.sum(-1, keepdim=True).numpy(), count, threshold))
        actual_C = acceptance(Hybrid(threshold, buckets=None), target_CV, draft_CV, count)
        torch.testing.assert_close(foreseen_CK.gather(1, certain_C1)[:, 0], actual_C, rtol=0, atol=2e-3)


def test_the_best_candidate_is_found_and_forgotten_again() -> None:
    # Distributions at which it is best to have no certain child, and such at which two are, each by far.
    target_CV, draft_CV = random_cases(6, cases=400, seed=3)
    foreseen_CK = acceptances(target_CV, draft_CV, 3)
    gain_C = (foreseen_CK[:, 2] - foreseen_CK[:, 0]) * (draft_CV.amin(-1) > 1e-6)  # with enough tokens for two
    tuner = ThresholdTuner(decay=0.5)
    for case, expected in ((gain_C.argmin(), 0), (gain_C.argmax(), 2), (gain_C.argmin(), 0)):
        assert gain_C[case].abs() > 0.05
        draft_1V = draft_CV[case][None]
        for _ in range(20):
            tuner.observe(target_CV[case][None], draft_1V, 3)
        chosen = certain_of_top(draft_1V.topk(3).values.numpy(), draft_1V.sum(-1, keepdim=True).numpy(), 3, tuner.threshold)
        assert chosen.item() == expected


def test_the_tuner_maximises_mean_acceptance_over_its_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    draft_RV = torch.softmax(2 * torch.randn(60, 40, generator=generator), -1)
    target_RV = torch.softmax(draft_RV.log() + torch.randn(60, 40, generator=generator), -1)
    tuner = ThresholdTuner(decay=1.0)
    for row in range(0, 60, 6):
        tuner.observe(target_RV[row : row + 6], draft_RV[row : row + 6], 4)
    value_RK, total_R1 = draft_RV.topk(4).values.numpy(), draft_RV.double().sum(-1, keepdim=True).numpy()
    foreseen_RK = acceptances(target_RV, draft_RV, 4)
    means = [
        foreseen_RK.gather(1, torch.as_tensor(certain_of_top(value_RK, total_R1, 4, threshold))).mean().item()
        for threshold in THRESHOLDS
    ]
    assert max(means) - min(means) > 0.003  # there is something to choose
    assert means[THRESHOLDS.index(tuner.threshold.item())] == pytest.approx(max(means), abs=1e-12)


def test_a_tuned_scheme_is_exact() -> None:
    target_CV, draft_CV = random_cases(5, cases=60, seed=1)
    tuner = ThresholdTuner()
    tuner.observe(target_CV, draft_CV, 3)
    assert max(enumeration_error(Hybrid(tuner.threshold), target_CV, draft_CV, 3)) < TOLERANCE


def test_a_tuner_says_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="seen nothing yet"):
        _ = ThresholdTuner().threshold
    with pytest.raises(UsageError, match="thresholds="):
        ThresholdTuner(thresholds=[])
    with pytest.raises(UsageError, match="decay=0"):
        ThresholdTuner(decay=0)


def test_a_threshold_can_be_part_of_the_name() -> None:
    kind = SCHEMES.get("hybrid:0.7")
    assert isinstance(kind(), Hybrid) and kind().threshold == 0.7 and SCHEMES.get("hybrid")().threshold == 0.5
    assert SCHEMES.get(kind.name) is kind and kind.name in SCHEMES and kind.name not in list(SCHEMES)
    assert SCHEMES.get("hybrid:inf")().threshold == float("inf")
    draft_RV = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    # q₁ n = 0.8 is enough for 0.7 and not for 0.9.
    assert kind().child_distribution(draft_RV, torch.empty(1, 0, dtype=torch.long), 2)[0].tolist() == [1, 0, 0, 0]
    first_RV = SCHEMES.get("hybrid:0.9")().child_distribution(draft_RV, torch.empty(1, 0, dtype=torch.long), 2)
    assert first_RV[0].tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert max(enumeration_error(kind(), *random_cases(4, cases=20, seed=1), 2)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hybrid:-1", "scheme 'hybrid:-1' has no threshold; allowed: hybrid, or hybrid:X with X from 0 to inf"),
        ("hybrid:", "scheme 'hybrid:' has no threshold"),
        ("hybrid:nan", "has no threshold"),
        ("naive:3", "scheme 'naive' has no setting, but naive:3 is given; use naive"),
        ("hybird:0.7", "unknown scheme 'hybird'; did you mean 'hybrid'?"),
    ],
)
def test_wrong_settings_are_refused(name: str, message: str) -> None:
    assert name not in SCHEMES
    with pytest.raises(UsageError, match=re.escape(message)):
        SCHEMES.get(name)
