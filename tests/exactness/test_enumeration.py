"""Layer 1: summed over all drawings, the emitted token's distribution is the target's, to rounding."""

from itertools import product

import pytest
import torch
from torch import Tensor

from covering import chosen, covering, some_slow
from polydraft.verify import SCHEMES

from .checks import (
    FALSE_ALARM,
    FIXTURE_DRAFT_V,
    FIXTURE_TARGET_V,
    TOLERANCE,
    drawings,
    enumeration_error,
    largest_count,
    random_cases,
    sample_node,
    token_p_value,
    tuple_p_value,
)

every_scheme = pytest.mark.parametrize("name", list(SCHEMES))
COUNTS = [(name, count) for name in list(SCHEMES) for count in range(1, largest_count(SCHEMES.get(name)(), 3) + 1)]


CASES = [
    ((name, count), (name, vocabulary), (name, dtype))
    for (name, count), vocabulary, dtype in product(COUNTS, [2, 3, 4, 6], [torch.float64, torch.float32])
]
QUICK = set(chosen(CASES))
"""Every scheme with every number of children, every vocabulary and every type."""


@pytest.mark.parametrize(("name", "count", "vocabulary", "dtype"), [
    pytest.param(*one[0], one[1][1], one[2][1], marks=() if one in QUICK else pytest.mark.slow) for one in CASES
])  # fmt: skip
def test_emitted_distribution_is_the_target_distribution(name: str, count: int, vocabulary: int, dtype: torch.dtype) -> None:
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(vocabulary, cases=120, seed=10 * vocabulary + count)
    error, improper = enumeration_error(scheme, target_CV.to(dtype), draft_CV.to(dtype), count)
    assert error < TOLERANCE
    assert improper < TOLERANCE


@every_scheme
@pytest.mark.parametrize("count", [1, 2, 3])
def test_emitted_distribution_is_the_target_distribution_on_the_fixture(name: str, count: int) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, count)
    error, improper = enumeration_error(scheme, FIXTURE_TARGET_V[None], FIXTURE_DRAFT_V[None], count)
    assert max(error, improper) < TOLERANCE


@pytest.mark.parametrize(("name", "left"), covering(list(SCHEMES), [1, 2, 4]))
def test_emitted_distribution_of_masked_distributions(name: str, left: int) -> None:
    # Grammars mask both distributions alike, often down to one token.
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(6, cases=90, seed=60 + left)
    chance_CV = torch.rand(90, 6, generator=torch.Generator().manual_seed(left), dtype=torch.float64)
    allowed_CV = torch.zeros(90, 6, dtype=torch.bool).scatter(1, chance_CV.topk(left).indices, True)
    masked = [distribution_CV * allowed_CV for distribution_CV in (target_CV, draft_CV)]
    known_C = (masked[0].sum(1) > 0) & (masked[1].sum(1) > 0)
    target_CV, draft_CV = (
        distribution_CV[known_C] / distribution_CV[known_C].sum(1, keepdim=True) for distribution_CV in masked
    )
    for count in range(1, largest_count(scheme, 3) + 1):
        error, improper = enumeration_error(scheme, target_CV, draft_CV, count)
        assert max(error, improper) < TOLERANCE


@every_scheme
def test_missing_children_of_a_sparse_tree_change_nothing(name: str) -> None:
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(4, cases=60, seed=5)
    for count in range(1, largest_count(scheme, 2) + 1):
        error, improper = enumeration_error(scheme, target_CV, draft_CV, count, missing=2)
        assert max(error, improper) < TOLERANCE


@every_scheme
def test_without_children_the_distribution_is_the_target_whatever_the_draft_distribution(name: str) -> None:
    # A leaf inside a sparse tree: the walk hands over some distribution, or a zero one, with no child.
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(5, cases=30, seed=6)
    draft_CV[::3] = 0
    distribution_CV = scheme.distribution(target_CV, draft_CV, torch.full((30, 2), -1))
    assert (distribution_CV - target_CV).abs().max() < TOLERANCE


@every_scheme
def test_rows_are_computed_independently(name: str) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, 3)
    target_CV, draft_CV = random_cases(4, cases=12, seed=7)
    case_R, children_RK, _ = drawings(scheme, draft_CV, count)
    case_R, children_RK = case_R[::7], children_RK[::7]

    def row_by_row(function, *tensors: Tensor) -> Tensor:
        return torch.cat([function(*(tensor[row : row + 1] for tensor in tensors)) for row in range(len(case_R))])

    target_RV, draft_RV = target_CV[case_R], draft_CV[case_R]
    distribution_RV = scheme.distribution(target_RV, draft_RV, children_RK)
    torch.testing.assert_close(
        row_by_row(scheme.distribution, target_RV, draft_RV, children_RK), distribution_RV, rtol=0, atol=1e-14
    )
    for rank in range(count):
        earlier_RJ = children_RK[:, :rank]
        child_distribution_RV = scheme.child_distribution(draft_RV, earlier_RJ, count)
        alone_RV = row_by_row(lambda draft, earlier: scheme.child_distribution(draft, earlier, count), draft_RV, earlier_RJ)
        torch.testing.assert_close(alone_RV, child_distribution_RV, rtol=0, atol=1e-14)


@every_scheme
def test_distributions_are_left_unchanged(name: str) -> None:
    # The same tensors serve the next level and the bonus token.
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(6, cases=20, seed=8)
    before = target_CV.clone(), draft_CV.clone()
    children_CK = scheme.draw(draft_CV, torch.rand(20, largest_count(scheme, 3), dtype=torch.float64))
    scheme.distribution(target_CV, draft_CV, children_CK)
    scheme.verify(target_CV, draft_CV, children_CK, torch.rand(20, scheme.verify_uniforms, dtype=torch.float64))
    assert torch.equal(target_CV, before[0])
    assert torch.equal(draft_CV, before[1])


# `distribution` is what enumeration proves; `verify` is what production runs. False alarm 1e-4 for each scheme and count.
@every_scheme
@pytest.mark.parametrize("count", some_slow([1, 2, 3], [1, 2]))  # two children are tested jointly below
def test_verified_token_follows_the_target_distribution(name: str, count: int) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, count)
    _, token_R = sample_node(scheme, FIXTURE_TARGET_V, FIXTURE_DRAFT_V, count, seed=count)
    assert token_p_value(token_R, FIXTURE_TARGET_V) > FALSE_ALARM


@every_scheme
def test_verify_draws_from_distribution_given_the_children(name: str) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, 2)
    _, children_SK, chance_S = drawings(scheme, FIXTURE_DRAFT_V[None], count)
    rows = len(children_SK)
    distribution_SV = scheme.distribution(FIXTURE_TARGET_V.expand(rows, -1), FIXTURE_DRAFT_V.expand(rows, -1), children_SK)
    expected = {
        (*children, token): chance * distribution
        for children, chance, distribution_V in zip(
            children_SK.tolist(), chance_S.tolist(), distribution_SV.tolist(), strict=True
        )
        for token, distribution in enumerate(distribution_V)
    }
    children_RK, token_R = sample_node(scheme, FIXTURE_TARGET_V, FIXTURE_DRAFT_V, count, seed=11)
    assert tuple_p_value(torch.cat([children_RK, token_R[:, None]], dim=1), expected) > FALSE_ALARM


@every_scheme
def test_verified_token_always_has_target_mass(name: str) -> None:
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(6, cases=400, seed=9)
    generator = torch.Generator().manual_seed(9)
    draw_CK = torch.rand(400, largest_count(scheme, 3), generator=generator, dtype=torch.float64)
    children_CK = scheme.draw(draft_CV.float(), draw_CK)
    largest = 1 - 2.0**-53
    for uniform in (0.0, 0.5, largest):
        verify_CU = torch.full((400, scheme.verify_uniforms), uniform, dtype=torch.float64)
        token_C = scheme.verify(target_CV.float(), draft_CV.float(), children_CK, verify_CU)
        assert torch.all(target_CV.gather(1, token_C[:, None]) > 0)
