"""What is drawn follows the distribution that verification assumes."""

import numpy as np
import pytest
import torch

from covering import some_slow
from polydraft.sampling import NO_TOKEN, draw_distinct, draw_independent, draw_one
from polydraft.verify import SCHEMES

from .checks import (
    FALSE_ALARM,
    FIXTURE_DRAFT_V,
    FIXTURE_TARGET_V,
    drawings,
    largest_count,
    random_cases,
    sample_node,
    token_p_value,
    tuple_p_value,
)

every_scheme = pytest.mark.parametrize("name", list(SCHEMES))
LARGEST_UNIFORM = 1 - 2.0**-53
"""The largest number that a float64 generator returns."""


def long_distribution(vocabulary: int, seed: int) -> torch.Tensor:
    """Return a float32 distribution over several blocks of 256 tokens, a fifth of them impossible, whole blocks among these."""
    generator = torch.Generator().manual_seed(seed)
    weights_V = torch.rand(vocabulary, generator=generator) ** 4
    weights_V[torch.rand(vocabulary, generator=generator) < 0.2] = 0
    weights_V[256:512] = 0
    return weights_V / weights_V.sum()


# False alarm 1e-4 for each scheme and count.
@every_scheme
@pytest.mark.parametrize("count", some_slow([1, 2, 3], [1, 2]))  # all children are tested jointly, the first ones with them
def test_drawn_children_follow_child_distribution(name: str, count: int) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, count)
    _, children_SK, chance_S = drawings(scheme, FIXTURE_DRAFT_V.float()[None], count)
    expected = dict(zip(map(tuple, children_SK.tolist()), chance_S.tolist(), strict=True))
    children_RK, _ = sample_node(scheme, FIXTURE_TARGET_V, FIXTURE_DRAFT_V, count, seed=20 + count)
    assert tuple_p_value(children_RK, expected) > FALSE_ALARM


@every_scheme
def test_first_child_follows_child_distribution_in_a_long_vocabulary(name: str) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, 2)
    distribution_V = long_distribution(1100, seed=3)
    distribution_1V = scheme.child_distribution(distribution_V[None], torch.empty(1, 0, dtype=torch.long), count)
    generator = torch.Generator().manual_seed(4)
    parts = []
    for _ in range(10):  # in parts: rows of a long vocabulary take room
        uniforms_RK = torch.rand(2_000, count, generator=generator, dtype=torch.float64)
        parts.append(scheme.draw(distribution_V.expand(2_000, -1), uniforms_RK)[:, 0])
    assert token_p_value(torch.cat(parts), distribution_1V[0]) > FALSE_ALARM


@every_scheme
def test_every_drawn_child_has_mass_given_the_earlier_ones(name: str) -> None:
    # Covers impossible tokens, and repeated ones wherever `child_distribution` excludes them.
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, 3)
    _, draft_CV = random_cases(6, cases=300, seed=12)
    generator = torch.Generator().manual_seed(12)
    for extreme in (None, 0.0, LARGEST_UNIFORM):
        uniforms_CK = torch.rand(300, count, generator=generator, dtype=torch.float64)
        if extreme is not None:
            uniforms_CK.fill_(extreme)
        children_CK = scheme.draw(draft_CV.float(), uniforms_CK)
        for rank in range(count):
            distribution_CV = scheme.child_distribution(draft_CV.float(), children_CK[:, :rank], count)
            child_C1 = children_CK[:, rank : rank + 1]
            missing_C1 = child_C1 == NO_TOKEN
            assert torch.equal(missing_C1[:, 0], distribution_CV.sum(-1) == 0)
            assert torch.all(missing_C1 | (distribution_CV.gather(1, child_C1.clamp(min=0)) > 0))


@every_scheme
@pytest.mark.parametrize("support", [1, 2])
def test_missing_children_stand_at_the_end(name: str, support: int) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, 4)
    distribution_V = torch.zeros(600)
    distribution_V[[300, 599][:support]] = 1 / support
    children_RK = scheme.draw(distribution_V.expand(50, -1), torch.rand(50, count, dtype=torch.float64))
    there_RK = children_RK != NO_TOKEN
    assert torch.all(there_RK[:, 0])
    assert torch.all(there_RK[:, 1:] <= there_RK[:, :-1])
    assert torch.all(distribution_V[children_RK[there_RK]] > 0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
@pytest.mark.parametrize("vocabulary", [1, 5, 256, 257, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_weight_is_found_wherever_it_stands(vocabulary: int, uniform: float, dtype: torch.dtype) -> None:
    weights_VV = 1e-3 * torch.eye(vocabulary, dtype=dtype)
    uniforms_V = torch.full((vocabulary,), uniform, dtype=torch.float64)
    assert torch.equal(draw_one(weights_VV, uniforms_V), torch.arange(vocabulary))


def test_no_weight_at_all_gives_no_token() -> None:
    weights_RV = torch.zeros(2, 300)
    uniforms_RK = torch.tensor([[0.0, 0.5], [0.9, LARGEST_UNIFORM]], dtype=torch.float64)
    assert torch.all(draw_independent(weights_RV, uniforms_RK) == NO_TOKEN)
    assert torch.all(draw_distinct(weights_RV, uniforms_RK) == NO_TOKEN)


@pytest.mark.parametrize("vocabulary", [3, 256, 700])
def test_distinct_draws_take_every_token_once_and_then_none(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights_RV = torch.rand(4, vocabulary, generator=generator) + 1e-6
    uniforms_RK = torch.rand(4, vocabulary + 2, generator=generator, dtype=torch.float64)
    uniforms_RK[0], uniforms_RK[1] = 0.0, LARGEST_UNIFORM
    before_RV = weights_RV.clone()
    tokens_RK = draw_distinct(weights_RV, uniforms_RK)
    assert torch.equal(tokens_RK[:, :-2].sort(-1).values, torch.arange(vocabulary).expand(4, -1))
    assert torch.all(tokens_RK[:, -2:] == NO_TOKEN)
    assert torch.equal(weights_RV, before_RV)


def test_long_float32_weights_are_inverted_like_their_exact_cumulative_sum() -> None:
    # A plain float32 running sum over so many tokens would be off by far more than the grid below.
    distribution_V = long_distribution(50_000, seed=5)
    exact_V = np.cumsum(distribution_V.double().numpy())
    exact_V /= exact_V[-1]
    uniforms_K = torch.linspace(0, LARGEST_UNIFORM, 2_001, dtype=torch.float64)
    tokens_K = draw_independent(distribution_V[None], uniforms_K[None])[0].numpy()
    assert np.all(distribution_V.numpy()[tokens_K] > 0)
    assert np.all(np.diff(tokens_K) >= 0)
    before_K, after_K = exact_V[tokens_K] - distribution_V.numpy()[tokens_K], exact_V[tokens_K]
    assert np.all(before_K < uniforms_K.numpy() + 1e-6)
    assert np.all(after_K > uniforms_K.numpy() - 1e-6)


def test_a_block_whose_sum_rounds_never_gives_an_impossible_token() -> None:
    # Float32 sums of a block fall short of, or beyond, the sum of its float64 values; zeros follow the last weight.
    weights_RV = torch.zeros(200, 512)
    weights_RV[:, :200] = torch.rand(200, 200, generator=torch.Generator().manual_seed(6)) ** 3
    weights_RV[100:, 256:456] = weights_RV[:100, :200]
    uniforms_R = torch.full((200,), LARGEST_UNIFORM, dtype=torch.float64)
    tokens_R = draw_one(weights_RV, uniforms_R)
    assert torch.all(weights_RV.gather(1, tokens_R[:, None]) > 0)


def test_a_mark_on_the_border_of_two_blocks_never_gives_an_impossible_token() -> None:
    # (0.43 + 0.61) - 0.61 is above 0.43: the second block must begin where the first one ended, not where a
    # subtraction says. This uniform, a multiple of 2^-53, puts the mark into the gap.
    weights_1V = torch.zeros(1, 512, dtype=torch.float64)
    weights_1V[0, 0], weights_1V[0, 300] = 0.43, 0.61
    token = draw_one(weights_1V, torch.tensor([0.41346153846153844], dtype=torch.float64)).item()
    assert weights_1V[0, token] > 0
