"""What `acceptance` says of every registered scheme, against the sum over all its drawings."""

import sys
import time

import pytest
import torch
from torch import Tensor

from covering import all_slow, covering
from exactness.checks import enumerated_acceptance, largest_count
from polydraft.errors import UsageError
from polydraft.lab.theory import acceptance, naive_acceptance, with_replacement_optimum, without_replacement_optimum
from polydraft.verify import SCHEMES, Scheme

from .cases import language_like, product_distribution, tiny

SAMPLES = 1000
CHEAP = {"rrs-wor": 20_000}
EXACT = {"speculative", "naive", "top", "rrs-wr", "kseq", "greedy", "spechub", "race"}


def enumerated(scheme: Scheme, target_CV: Tensor, draft_CV: Tensor, count: int) -> Tensor:
    pairs = zip(target_CV, draft_CV, strict=True)
    values = [enumerated_acceptance(scheme, target_V, draft_V, count) for target_V, draft_V in pairs]
    return torch.tensor(values, dtype=torch.float64)


def assert_estimates(value_C: Tensor, error_C: Tensor, expected_C: Tensor, samples: int) -> None:
    """Within five standard errors, and what has a good chance not to be drawn once: false alarm below 1e-4 a row."""
    assert torch.all((value_C - expected_C).abs() <= 5 * error_C + 10 / samples)


@pytest.mark.parametrize(("name", "count", "vocabulary"), [
    *covering(list(SCHEMES), [3], [3, 5]),
    *covering(["rrs-wor"], [1, 2], [3, 5]),  # computed otherwise with fewer children
    *all_slow([name for name in SCHEMES if name != "rrs-wor"], [1, 2], [3, 5]),
])  # fmt: skip
def test_acceptance_is_the_sum_over_all_drawings(name: str, count: int, vocabulary: int) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, count)
    target_CV, draft_CV = tiny(vocabulary, count, cases=15)
    samples = CHEAP.get(name, SAMPLES)
    estimate = acceptance(name, target_CV, draft_CV, count, samples=samples)
    expected_C = enumerated(scheme, target_CV, draft_CV, count)
    if name in EXACT or (name, count) in {("rrs-wor", 1), ("rrs-wor", 2)}:
        assert torch.all(estimate.standard_error_R == 0)
        torch.testing.assert_close(estimate.value_R, expected_C, rtol=0, atol=1e-9)
    else:
        assert_estimates(estimate.value_R, estimate.standard_error_R, expected_C, samples)


@pytest.mark.parametrize("name", ["rrs-wor", "rrs-wr", "naive", "kseq"])
def test_a_scheme_of_one_s_own_needs_nothing(name: str) -> None:
    # A subclass is another scheme for all that is known; so the formula must not be taken, nor be needed.
    own = type("Own", (SCHEMES.get(name),), {"name": "own"})()
    target_CV, draft_CV = tiny(4, 2, cases=20)
    estimate = acceptance(own, target_CV, draft_CV, 2, samples=SAMPLES)
    assert estimate.standard_error_R.max() > 0
    expected_C = enumerated(own, target_CV, draft_CV, 2)
    assert_estimates(estimate.value_R, estimate.standard_error_R, expected_C, SAMPLES)


@pytest.mark.slow
def test_standard_errors_are_those_of_repetitions() -> None:
    target_CV, draft_CV = tiny(5, 3, cases=10)
    repeats, generator = 200, torch.Generator().manual_seed(1)
    target_RV, draft_RV = target_CV.repeat(repeats, 1), draft_CV.repeat(repeats, 1)
    estimate = acceptance("rrs-wor", target_RV, draft_RV, 3, samples=100, generator=generator)
    seen_C = estimate.value_R.view(repeats, -1).std(0)
    told_C = estimate.standard_error_R.view(repeats, -1).square().mean(0).sqrt()
    assert torch.all((seen_C - told_C).abs() <= 0.25 * told_C + 1e-3)
    expected_C = enumerated(SCHEMES.get("rrs-wor")(), target_CV, draft_CV, 3)
    mean_C = estimate.value_R.view(repeats, -1).mean(0)
    assert_estimates(mean_C, seen_C / repeats**0.5, expected_C, samples=100 * repeats)


def test_naive_acceptance_with_replacement() -> None:
    target_CV, draft_CV = tiny(5, 3)
    value_C = naive_acceptance(target_CV, draft_CV, 3, replacement=True)
    for case, (target, draft) in enumerate(zip(target_CV.tolist(), draft_CV.tolist(), strict=True)):
        table = product_distribution(*[draft] * 3)
        expected = sum(chance * sum(target[token] for token in set(drafts)) for drafts, chance in table.items())
        assert value_C[case].item() == pytest.approx(expected, abs=1e-12)


def test_numbers_do_not_depend_on_neighbours_or_repeat_differently() -> None:
    target_CV, draft_CV = tiny(5, 3)
    twice = [acceptance("rrs-wor", target_CV, draft_CV, 3).value_R for _ in range(2)]
    assert torch.equal(*twice)
    for name in sorted(EXACT - {"speculative", "spechub"} & set(SCHEMES)):
        alone_1 = acceptance(name, target_CV[3:4], draft_CV[3:4], 3).value_R
        torch.testing.assert_close(alone_1, acceptance(name, target_CV, draft_CV, 3).value_R[3:4], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", sorted({*SCHEMES} - EXACT))
def test_drawings_of_a_row_do_not_depend_on_how_many_are_computed_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU computes more rows and more drawings at a time than a host, from the same random numbers.
    target_CV, draft_CV = tiny(5, 3)
    count, generator = largest_count(SCHEMES.get(name), 3), torch.Generator().manual_seed(7)
    whole_C = acceptance(name, target_CV, draft_CV, count, samples=20, generator=generator).value_R
    for module in ("acceptance", "_formulas"):
        monkeypatch.setattr(sys.modules[f"polydraft.lab.theory.{module}"], "chunk_size", lambda device: 16)
    generator = torch.Generator().manual_seed(7)
    parts = [
        acceptance(name, target_CV[rows], draft_CV[rows], count, samples=20, generator=generator).value_R
        for rows in (slice(2), slice(2, None))
    ]
    torch.testing.assert_close(torch.cat(parts), whole_C, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "hybrid" else pytest.mark.slow) for name in sorted(SCHEMES)]
)
def test_large_vocabulary_in_bounded_time(name: str) -> None:
    target_RV, draft_RV = language_like(2, 32_000)
    count = largest_count(SCHEMES.get(name), 4)
    begin = time.perf_counter()
    estimate = acceptance(name, target_RV, draft_RV, count, samples=16)
    assert time.perf_counter() - begin < 20
    best_R = torch.maximum(
        with_replacement_optimum(target_RV, draft_RV, count), without_replacement_optimum(target_RV, draft_RV, count)
    )
    assert torch.all(estimate.value_R > 0.02)
    assert torch.all(estimate.value_R <= best_R + 5 * estimate.standard_error_R + 0.02)  # fixed drafts may exceed both


def test_peaked_distributions_in_float32() -> None:
    # Low temperature: most of the draft's mass on one token, the rest down to denormal numbers.
    target_RV, draft_RV = language_like(4, 3000)
    target_RV, draft_RV = (distribution_RV.log().mul(8).softmax(-1).float() for distribution_RV in (target_RV, draft_RV))
    for name in SCHEMES:
        count = largest_count(SCHEMES.get(name), 4)
        value_R = acceptance(name, target_RV, draft_RV, count, samples=50).value_R
        assert torch.isfinite(value_R).all() and value_R.min() >= 0 and value_R.max() <= 1 + 1e-9


def test_bad_input_is_refused_by_name() -> None:
    distribution_RV = torch.full((1, 4), 0.25)
    with pytest.raises(UsageError, match="unknown scheme 'rrs'"):
        acceptance("rrs", distribution_RV, distribution_RV, 2)
    with pytest.raises(UsageError, match="count is 2; allowed: whole numbers from 1 to 1"):
        acceptance("speculative", distribution_RV, distribution_RV, 2)
    with pytest.raises(UsageError, match="count is 0"):
        acceptance("rrs-wor", distribution_RV, distribution_RV, 0)
    with pytest.raises(UsageError, match="samples is 1"):
        acceptance("rrs-wor", distribution_RV, distribution_RV, 3, samples=1)
    with pytest.raises(UsageError, match=r"draft_probs_RV row 0 sums to 0\.8"):
        acceptance("rrs-wor", distribution_RV, distribution_RV * 0.8, 3)
    with pytest.raises(UsageError, match="target_probs_RV row 0 is not finite"):
        acceptance("top", distribution_RV * torch.nan, distribution_RV, 3)
    with pytest.raises(UsageError, match="negative"):
        naive_acceptance(torch.tensor([[1.5, -0.5]]), torch.tensor([[0.5, 0.5]]), 1, replacement=True)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_naive_sampling_accepts_no_more_than_rejection_with_replacement(count: int) -> None:
    """MCSD Appendix C, for the sum that it bounds and on the distributions that a language model has."""
    for target_CV, draft_CV in (tiny(5, 4, cases=300), language_like(40, 500)):
        naive_C = naive_acceptance(target_CV, draft_CV, count, replacement=True)
        rejection_C = acceptance("rrs-wr", target_CV, draft_CV, count).value_R
        assert torch.all(naive_C <= rejection_C + 1e-12)
        assert torch.any(naive_C < rejection_C - 0.05)
