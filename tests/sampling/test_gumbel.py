"""Noise that is a function of seed, position and token: its distribution, and that it is like new for each of them."""

import numpy as np
import pytest
import torch
from scipy import stats

from polydraft import operations
from polydraft.sampling import NO_TOKEN
from polydraft.sampling.gumbel import largest_perturbed, perturbed

SIGNIFICANT = 1e-5


@pytest.fixture(params=["reference", "fastest"], autouse=True)
def _forms(request: pytest.FixtureRequest):
    backends = operations.BACKENDS if request.param == "fastest" else ()
    with operations.using(*backends):
        yield


def table(seeds: int, positions: int, tokens: int) -> torch.Tensor:
    """Return the noise of neighbouring seeds, positions and tokens."""
    return noise(torch.arange(seeds), torch.arange(positions).expand(seeds, -1).contiguous(), tokens)


def noise(keys_B: torch.Tensor, positions_BG: torch.Tensor, tokens: int, only: torch.Tensor | None = None) -> torch.Tensor:
    """Return what is added to scores of zero."""
    columns = tokens if only is None else len(only)
    return perturbed(torch.zeros(*positions_BG.shape, columns), keys_B, positions_BG, torch.ones(len(keys_B)), only)


def test_the_distribution_is_gumbel() -> None:
    noise_BGV = table(20, 50, 1_000)
    assert noise_BGV.isfinite().all() and noise_BGV.dtype == torch.float32
    uniforms_X = torch.exp(-torch.exp(-noise_BGV.double())).flatten().numpy()
    counts_K = np.histogram(uniforms_X, 1_000, (0, 1))[0]
    assert stats.chisquare(counts_K).pvalue > SIGNIFICANT
    assert stats.kstest(uniforms_X[::10], "uniform").pvalue > SIGNIFICANT


def test_tails_are_those_of_gumbel() -> None:
    # Rare tokens win by noise that is rarer still: 1 in 100,000 and less must be as rare as that.
    noise_X = table(40, 50, 10_000).flatten()
    for chance in (1e-3, 1e-4, 1e-5, 1e-6):
        above = -np.log(-np.log1p(-chance))
        found = int((noise_X > above).sum())
        assert stats.binomtest(found, len(noise_X), chance).pvalue > SIGNIFICANT


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
@pytest.mark.parametrize("step", [1, 2, 8, 64])
def test_neighbours_are_independent(axis: int, step: int) -> None:
    noise_X = table(*(200 if one == axis else 40 for one in range(3)))
    first_X = noise_X.narrow(axis, 0, 200 - step).flatten().numpy()
    second_X = noise_X.narrow(axis, step, 200 - step).flatten().numpy()
    assert stats.spearmanr(first_X, second_X).pvalue > SIGNIFICANT
    halves = np.histogram2d(stats.rankdata(first_X), stats.rankdata(second_X), bins=8)[0]
    assert stats.chi2_contingency(halves).pvalue > SIGNIFICANT


@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_the_largest_sum_is_a_sample(sharpness: float) -> None:
    logits_V = sharpness * torch.randn(12, generator=torch.Generator().manual_seed(1))
    winners_X = (table(100, 400, 12) + logits_V).argmax(-1).flatten().numpy()
    expected_V = torch.softmax(logits_V.double(), -1).numpy() * len(winners_X)
    assert stats.chisquare(np.bincount(winners_X, minlength=12), expected_V).pvalue > SIGNIFICANT


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_the_largest_is_found_without_computing_all(temperature: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    scores_BGV = spread * torch.randn(4, 3, 1_000, generator=generator)
    scores_BGV[1, :, ::2], scores_BGV[2, 1] = -torch.inf, -torch.inf
    scores_BGV[3, 0, 700], scores_BGV[3, 1, 5], scores_BGV[3, 2, 9] = torch.nan, torch.inf, scores_BGV[3, 2].max()
    noise = torch.arange(4), torch.arange(3).expand(4, -1).contiguous(), torch.full((4,), temperature), None
    best_BG = perturbed(scores_BGV, *noise).argmax(-1)
    best_BG[2, 1], best_BG[3, :2] = NO_TOKEN, NO_TOKEN
    assert torch.equal(largest_perturbed(scores_BGV, *noise)[..., 0], best_BG)
    for count in (3, 64):
        value_BGK, best_BGK = (
            part_BGV[..., :count] for part_BGV in perturbed(scores_BGV, *noise).sort(dim=-1, descending=True, stable=True)
        )
        found_BGK = largest_perturbed(scores_BGV, *noise, count)
        fair_BG = torch.ones(4, 3, dtype=torch.bool)
        fair_BG[3, :2] = False  # NaN and infinity: the first one says so, the others do not matter
        assert torch.equal(found_BGK[fair_BG], best_BGK.where(value_BGK > -torch.inf, NO_TOKEN)[fair_BG])


def test_fewer_columns_than_asked_for() -> None:
    noise = torch.arange(1), torch.zeros(1, 1, dtype=torch.long), torch.ones(1), None
    found_11K = largest_perturbed(torch.zeros(1, 1, 2), *noise, 4)
    assert sorted(found_11K.flatten().tolist()) == [NO_TOKEN, NO_TOKEN, 0, 1]


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    noise_BGV = table(3, 4, 50)
    tokens_D = torch.tensor([7, 3, 49])
    own_11D = noise(torch.tensor([2]), torch.tensor([[3]]), 50, tokens_D)
    assert torch.equal(own_11D[0, 0], noise_BGV[2, 3, tokens_D])
    assert len(noise_BGV.flatten().unique()) > 0.99 * noise_BGV.numel()
