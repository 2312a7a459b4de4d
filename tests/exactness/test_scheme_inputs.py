"""What a scheme makes of unnormalised distributions, and of rows that nobody will look at."""

import pytest
import torch

from polydraft.errors import UsageError
from polydraft.sampling import NO_TOKEN
from polydraft.verify import SCHEMES, Hybrid
from polydraft.verify.weights import largest, likeliest

from .checks import TOLERANCE, enumeration_error, largest_count, random_cases

every_scheme = pytest.mark.parametrize("name", list(SCHEMES))


@every_scheme
def test_distributions_may_come_in_any_scale(name: str) -> None:
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(4, cases=60, seed=2)
    error, improper = enumeration_error(scheme, 3 * target_CV.float(), draft_CV.float() / 7, largest_count(scheme, 3))
    assert max(error, improper) < TOLERANCE


@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distributions_may_come_in_half_precision(name: str, dtype: torch.dtype) -> None:
    # As any other numbers: drawing and verifying by the same ones is exact.
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, 2)
    target_CV, draft_CV = (distribution_CV.to(dtype) for distribution_CV in random_cases(4, cases=60, seed=4))
    assert max(enumeration_error(scheme, target_CV, draft_CV, count)) < TOLERANCE
    uniforms_CU = torch.rand(
        60, count + scheme.verify_uniforms, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    children_CK = scheme.draw(draft_CV, uniforms_CU[:, :count])
    token_C = scheme.verify(target_CV, draft_CV, children_CK, uniforms_CU[:, count:])
    assert torch.all(target_CV.gather(1, token_C[:, None]) > 0)


@every_scheme
@pytest.mark.parametrize("missing", [1, 3])
def test_three_children_of_a_wider_tree(name: str, missing: int) -> None:
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(5, cases=40, seed=15)
    width = largest_count(scheme, 3)
    error, improper = enumeration_error(scheme, target_CV, draft_CV, width, missing if scheme.max_children is None else 0)
    assert max(error, improper) < TOLERANCE


@every_scheme
def test_columns_that_other_rows_need_change_nothing(name: str) -> None:
    # Tables are as wide as the batch's fullest row: same seed, same text only if the rest of a row's columns does not count.
    scheme = SCHEMES.get(name)()
    generator = torch.Generator().manual_seed(6)
    target_CV, draft_CV = (distribution_CV.float() for distribution_CV in random_cases(9, cases=400, seed=6))
    width = largest_count(scheme, 3)
    children_CK = scheme.draw(draft_CV, torch.rand(400, width, generator=generator, dtype=torch.float64))
    uniforms_CU = torch.rand(400, scheme.verify_uniforms, generator=generator, dtype=torch.float64)
    token_C = scheme.verify(target_CV, draft_CV, children_CK, uniforms_CU)
    most = 64 if scheme.max_children is None else scheme.max_children
    for added in range(1, min(6, most - width) + 1):
        wider_CK = torch.nn.functional.pad(children_CK, (0, added), value=NO_TOKEN)
        assert scheme.verify(target_CV, draft_CV, wider_CK, uniforms_CU).equal(token_C)
        if scheme.select_uniforms is not None:
            selected, same = (scheme.select(target_CV, draft_CV, table, uniforms_CU) for table in (children_CK, wider_CK))
            assert selected.token_R.equal(same.token_R)


@every_scheme
def test_rows_that_idle_along_do_no_harm(name: str) -> None:
    # A row whose walk has ended hands over children of one node with the distribution of another.
    scheme = SCHEMES.get(name)()
    generator = torch.Generator().manual_seed(1)
    target_CV, draft_CV = (distribution_CV.float() for distribution_CV in random_cases(9, cases=600, seed=1))
    width = largest_count(scheme, 4)
    children_CK = torch.randint(NO_TOKEN, 9, (600, width), generator=generator)
    uniforms_CU = torch.rand(600, scheme.verify_uniforms, generator=generator, dtype=torch.float64)
    token_C = scheme.verify(target_CV, draft_CV, children_CK, uniforms_CU)
    assert torch.all((token_C >= NO_TOKEN) & (token_C < 9))
    if scheme.select_uniforms is not None:
        selected_C = scheme.select(target_CV, draft_CV, children_CK, uniforms_CU).token_R
        assert torch.all((selected_C >= NO_TOKEN) & (selected_C < 9))


@every_scheme
@pytest.mark.parametrize("rows", [1, 3])
def test_a_target_that_is_not_a_number_gives_no_token(name: str, rows: int) -> None:
    # The walk reports it then.
    scheme = SCHEMES.get(name)()
    draft_RV = torch.full((rows, 6), 1 / 6)
    uniforms_RU = torch.rand(rows, 4 + scheme.verify_uniforms, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    children_RK = scheme.draw(draft_RV, uniforms_RU[:, : largest_count(scheme, 2)])
    target_RV = draft_RV.clone()
    target_RV[0] = torch.nan
    token_R = scheme.verify(target_RV, draft_RV, children_RK, uniforms_RU[:, 4:])
    assert token_R[0] == NO_TOKEN
    assert torch.all(token_R[1:] >= 0)


@pytest.mark.parametrize("vocabulary", [1, 5, 300, 1_024, 5_120])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_largest_weights_are_found_in_order(vocabulary: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights_RV = torch.rand(3, vocabulary, generator=generator)
    weights_RV[1] = weights_RV[1].mul(4).round() / 4  # many equal ones
    value_RK, token_RK = largest(weights_RV, count)
    assert torch.equal(value_RK, weights_RV.topk(min(count, vocabulary), dim=1).values)
    assert torch.equal(weights_RV.gather(1, token_RK), value_RK)
    assert all(len({*row}) == len(row) for row in token_RK.tolist())
    assert torch.equal(likeliest(weights_RV)[:, 0], weights_RV.argmax(-1))


def test_a_threshold_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="threshold=-1"):
        Hybrid(threshold=-1)


@every_scheme
def test_room_for_more_children_changes_no_token(name: str) -> None:
    """Rows of one batch may have fewer children than others, or none: then the distribution there is not looked at."""
    scheme, generator = SCHEMES.get(name)(), torch.Generator().manual_seed(5)
    target_RV, draft_RV, other_RV = (torch.softmax(2 * torch.randn(60, 30, generator=generator), -1).double() for _ in range(3))
    uniforms_RU = torch.rand(60, max(scheme.verify_uniforms, 64), generator=generator, dtype=torch.float64)
    most = min(4, scheme.max_children or 4)
    for count in range(1, most):
        children_RK = scheme.draw(draft_RV, uniforms_RU[:, :count])
        padded_RK = torch.nn.functional.pad(children_RK, (0, most - count), value=NO_TOKEN)
        few, many = (scheme.verify(target_RV, draft_RV, own_RK, uniforms_RU) for own_RK in (children_RK, padded_RK))
        assert few.equal(many)
    none_RK = torch.full((60, most), NO_TOKEN)
    own, other = (scheme.verify(target_RV, distribution_RV, none_RK, uniforms_RU) for distribution_RV in (draft_RV, other_RV))
    assert own.equal(other)
