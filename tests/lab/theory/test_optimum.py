"""Every optimum against the linear program and against all sets of tokens, on more than 500 tiny pairs."""

import math
import time

import pytest
import torch
from torch import Tensor

from covering import covering, some_slow
from exactness.checks import enumerated_acceptance
from polydraft.errors import UsageError
from polydraft.lab.theory import (
    acceptance,
    conditional_poisson_optimum,
    greedy_optimum,
    hybrid_optimum,
    linear_program_optimum,
    product_optimum,
    subset_optimum,
    top_optimum,
    with_replacement_optimum,
    without_replacement_optimum,
)
from polydraft.lab.theory.lp import without_replacement_distribution
from polydraft.lab.theory.without_replacement import escape_chances, inclusion
from polydraft.verify import SCHEMES

from .cases import SHAPES, hybrid_distribution, language_like, product_distribution, tiny

TOLERANCE = 1e-9
"""Of the linear program; the formulas are good to rounding, the integral to 1e-10."""

DISTRIBUTIONS = {
    "with replacement": (with_replacement_optimum, lambda draft, count: product_distribution(*[draft] * count)),
    "without replacement": (without_replacement_optimum, without_replacement_distribution),
    "greedy": (greedy_optimum, lambda draft, count: hybrid_distribution(draft, count, count - 1)),
    "top": (top_optimum, lambda draft, count: hybrid_distribution(draft, count, count)),
    "hybrid": (
        lambda target, draft, count: hybrid_optimum(target, draft, count, count // 2),
        lambda draft, count: hybrid_distribution(draft, count, count // 2),
    ),
}
OPTIMA = [*(function for function, _ in DISTRIBUTIONS.values()), conditional_poisson_optimum]


def distribution(*chances: float) -> Tensor:
    return torch.tensor(chances, dtype=torch.float64)


@pytest.mark.parametrize(("name", "vocabulary", "count"), covering(DISTRIBUTIONS, SHAPES))
def test_optimum_is_that_of_all_sets_and_of_the_linear_program(name: str, vocabulary: int, count: int) -> None:
    optimum, draft_distribution = DISTRIBUTIONS[name]
    target_CV, draft_CV = tiny(vocabulary, count)
    value_C = optimum(target_CV, draft_CV, count)
    assert value_C.dtype == torch.float64
    for case, (target, draft) in enumerate(zip(target_CV.tolist(), draft_CV.tolist(), strict=True)):
        table = draft_distribution(draft, count)
        assert value_C[case].item() == pytest.approx(subset_optimum(target, table), abs=1e-12)
        if case % 4 == 0:  # the two references are compared with each other on fewer, the program being slow
            assert value_C[case].item() == pytest.approx(linear_program_optimum(target, table), abs=TOLERANCE)


@pytest.mark.parametrize("count", some_slow([1, 2, 3], [1, 2]))
def test_optimum_of_different_draft_distributions(count: int) -> None:
    target_CV, first_CV = tiny(5, count)
    drafts = [first_CV, first_CV.roll(1, 0), first_CV.roll(2, 0)][:count]
    value_C = product_optimum(target_CV, drafts)
    for case, target in enumerate(target_CV.tolist()):
        table = product_distribution(*(draft_CV[case].tolist() for draft_CV in drafts))
        assert value_C[case].item() == pytest.approx(linear_program_optimum(target, table), abs=TOLERANCE)
        assert value_C[case].item() == pytest.approx(subset_optimum(target, table), abs=1e-12)


def test_equal_draft_distributions_are_drawing_with_replacement() -> None:
    target_CV, draft_CV = tiny(6, 3)
    same_C = with_replacement_optimum(target_CV, draft_CV, 3)
    torch.testing.assert_close(product_optimum(target_CV, [draft_CV] * 3), same_C, rtol=0, atol=1e-14)


def test_hybrid_contains_the_others_row_by_row() -> None:
    target_CV, draft_CV = tiny(6, 3)
    expected_CX = torch.stack([f(target_CV, draft_CV, 3) for f in (with_replacement_optimum, greedy_optimum, top_optimum)], 1)
    fixed_C = torch.tensor([0, 2, 3]).repeat(len(target_CV))[: len(target_CV)]
    mixed_C = hybrid_optimum(target_CV, draft_CV, 3, fixed_C)
    which_C1 = torch.tensor([0, 1, 2]).repeat(len(target_CV))[: len(target_CV), None]
    torch.testing.assert_close(mixed_C[:, None], expected_CX.gather(1, which_C1), rtol=0, atol=1e-14)


def test_the_paper_s_formula_is_no_bound_for_sequential_drafts() -> None:
    # Token 0 is drafted with chance 1 − 2 · (.2 · .2/.8) = .9, and must then be accepted; the paper's formula says 6/7.
    target_1V, draft_1V = distribution(1, 0, 0)[None], distribution(0.6, 0.2, 0.2)[None]
    paper = conditional_poisson_optimum(target_1V, draft_1V, 2).item()
    assert paper == pytest.approx(6 / 7, abs=1e-12)
    assert without_replacement_optimum(target_1V, draft_1V, 2).item() == pytest.approx(0.9, abs=1e-12)
    assert acceptance("rrs-wor", target_1V, draft_1V, 2).value_R.item() == pytest.approx(0.9, abs=1e-12)
    # Three drafts, all of p positive: rejection sampling accepts .840 where the formula allows .815.
    target_V = distribution(0.95, 0.01, 0.01, 0.0, 0.03, 0.0)
    draft_V = distribution(0.31, 0.22, 0.08, 0.07, 0.01, 0.31)
    attained = enumerated_acceptance(SCHEMES.get("rrs-wor")(), target_V, draft_V, 3)
    assert conditional_poisson_optimum(target_V[None], draft_V[None], 3).item() < attained - 0.02
    assert attained < without_replacement_optimum(target_V[None], draft_V[None], 3).item()


def test_the_paper_s_formula_is_right_for_drafts_given_that_they_are_distinct() -> None:
    for vocabulary, count in SHAPES:
        target_CV, draft_CV = tiny(vocabulary, count, cases=10)
        value_C = conditional_poisson_optimum(target_CV, draft_CV, count)
        for case, (target, draft) in enumerate(zip(target_CV.tolist(), draft_CV.tolist(), strict=True)):
            if sum(chance > 0 for chance in draft) < count:
                continue
            table = {
                drafts: chance for drafts, chance in product_distribution(*[draft] * count).items() if len(set(drafts)) == count
            }
            distinct = {drafts: chance / math.fsum(table.values()) for drafts, chance in table.items()}
            assert value_C[case].item() == pytest.approx(subset_optimum(target, distinct), abs=1e-11)


@pytest.mark.parametrize("optimum", OPTIMA)
def test_more_drafts_are_never_worse(optimum) -> None:
    target_RV, draft_RV = language_like(4, 300)
    target_CV, draft_CV = tiny(6, 4)
    for target, draft in ((target_RV, draft_RV), (target_CV, draft_CV)):
        values_XR = torch.stack([optimum(target, draft, count) for count in (1, 2, 3, 4, 6)])
        # One draft more changes what the others are drawn from in these two.
        if optimum not in (DISTRIBUTIONS["hybrid"][0], greedy_optimum):
            assert values_XR.diff(dim=0).min() > -1e-10
        assert values_XR.min() >= 0 and values_XR.max() <= 1


@pytest.mark.parametrize(
    ("vocabulary", "count"), some_slow([(60, 3), (60, 8), (300, 16), (300, 32), (50, 40)], [(300, 32), (50, 40)])
)
def test_drawing_from_the_uniform_distribution_is_counting(vocabulary: int, count: int) -> None:
    draft_1V = torch.full((1, vocabulary), 1 / vocabulary, dtype=torch.float64)
    held = [math.comb(size, count) / math.comb(vocabulary, count) for size in range(1, vocabulary + 1)]
    torch.testing.assert_close(escape_chances(draft_1V, count)[0], 1 - distribution(*held), rtol=0, atol=1e-10)
    weight_1V = torch.arange(vocabulary).double()[None] / vocabulary
    assert inclusion(weight_1V, draft_1V, count).item() == pytest.approx(weight_1V.sum().item() * count / vocabulary, abs=1e-8)


def test_drafts_sure_of_few_tokens_keep_their_digits() -> None:
    # The third draft is token 2 or 3 as one to three, however unlikely both are; so for all prefixes with both first tokens.
    draft_1V = distribution(1.0, 1e-15, 1e-30, 3e-30)[None]
    torch.testing.assert_close(escape_chances(draft_1V, 3)[0, 2].item(), 0.75, rtol=1e-10, atol=0)
    target_1V = distribution(0.25, 0.25, 0.25, 0.25)[None]
    assert without_replacement_optimum(target_1V, draft_1V, 3).item() == pytest.approx(0.5 + 0.5, abs=1e-10)
    assert acceptance("naive", target_1V, draft_1V, 3).value_R.item() == pytest.approx(0.75, abs=1e-10)


def test_large_vocabulary_in_bounded_time() -> None:
    target_RV, draft_RV = language_like(2, 32_000)
    begin = time.perf_counter()
    values_XR = torch.stack([optimum(target_RV, draft_RV, 4) for optimum in OPTIMA])
    assert time.perf_counter() - begin < 20  # about 0.3 s on one idle core
    with_R, without_R = values_XR[0], values_XR[1]
    assert torch.all(with_R < without_R) and torch.all(without_R < 1)
    wide_R = without_replacement_optimum(*language_like(1, 262_144), 3)
    assert 0.5 < wide_R.item() < 1


def test_float32_distributions_give_the_same_to_their_precision() -> None:
    target_RV, draft_RV = language_like(3, 5000)
    for optimum in OPTIMA:
        rounded_R = optimum(target_RV.float(), draft_RV.float(), 3)
        torch.testing.assert_close(rounded_R, optimum(target_RV, draft_RV, 3), rtol=0, atol=2e-6)


BAD = {
    "sums to 0.9": torch.tensor([[0.5, 0.5], [0.5, 0.4]]),
    "row 1 is not finite": torch.tensor([[0.5, 0.5], [0.5, float("nan")]]),
    "row 1 has a negative entry": torch.tensor([[0.5, 0.5], [1.5, -0.5]]),
    "floating point": torch.tensor([[1, 0], [0, 1]]),
    "probs[None]": torch.tensor([0.5, 0.5]),
    "differ in shape": torch.full((2, 4), 0.25),
}


@pytest.mark.parametrize("said", BAD)
@pytest.mark.parametrize("optimum", [*OPTIMA, lambda target, draft, count: product_optimum(target, [draft] * count)])
def test_tensors_that_are_no_distributions_are_refused_by_name(optimum, said: str) -> None:
    good_RV = torch.full((2, 2), 0.5)
    with pytest.raises(UsageError, match=r"draft_probs|differ") as error:
        optimum(good_RV, BAD[said], 2)
    assert said in str(error.value) and "\n" not in str(error.value)
    if said != "differ in shape":
        with pytest.raises(UsageError, match="target_probs_RV"):
            optimum(BAD[said], good_RV, 2)


@pytest.mark.parametrize("optimum", OPTIMA)
@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_counts_are_whole_numbers_from_one(optimum, count: object) -> None:
    distribution_RV = torch.full((1, 4), 0.25)
    with pytest.raises(UsageError, match=r"count is .*allowed: whole numbers from 1"):
        optimum(distribution_RV, distribution_RV, count)


def test_limits_are_said() -> None:
    distribution_RV = torch.full((1, 32), 1 / 32)
    with pytest.raises(UsageError, match="1 to 64"):
        without_replacement_optimum(distribution_RV, distribution_RV, 65)
    with pytest.raises(UsageError, match="at most 20"):
        product_optimum(distribution_RV, [distribution_RV])
    with pytest.raises(UsageError, match="draft_probs is empty"):
        product_optimum(distribution_RV, [])
    with pytest.raises(UsageError, match="fixed is 3; allowed: whole numbers from 0 to count, 2"):
        hybrid_optimum(distribution_RV, distribution_RV, 2, 3)
    with pytest.raises(UsageError, match="at most 20"):
        subset_optimum([1 / 32] * 32, {(0,): 1.0})
    with pytest.raises(UsageError, match=r"distribution sums to 0\.5"):
        linear_program_optimum([0.5, 0.5], {(0,): 0.5})
    with pytest.raises(UsageError, match="outside the vocabulary"):
        linear_program_optimum([0.5, 0.5], {(2,): 1.0})


def test_distributions_are_left_unchanged() -> None:
    target_CV, draft_CV = tiny(6, 3)
    before: tuple[Tensor, Tensor] = (target_CV.clone(), draft_CV.clone())
    for optimum in OPTIMA:
        optimum(target_CV, draft_CV, 3)
    assert torch.equal(target_CV, before[0]) and torch.equal(draft_CV, before[1])
