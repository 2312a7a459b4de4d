"""Acceptance: never above what any verifier of the same children could reach, and just that for schemes that claim it."""

import functools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.verify import SCHEMES, Greedy, Hybrid, KSeq, Race, RaceBucketed, Scheme, SpecHub, Speculative

from .checks import TOLERANCE, drawings, largest_count, random_cases

CASES = (
    60  # for each vocabulary and count: 720 in all, every tenth with equal distributions, many with zeros, one-hot, support < n
)
SHAPES = [(vocabulary, count) for vocabulary in (2, 3, 4, 5) for count in (1, 2, 3)]


def acceptance(scheme: Scheme, target_CV: Tensor, draft_CV: Tensor, count: int) -> Tensor:
    """Chance that the emitted token is one of the children, by enumeration."""
    case_R, children_RK, chance_R = drawings(scheme, draft_CV, count)
    distribution_RV = scheme.distribution(target_CV[case_R], draft_CV[case_R], children_RK)
    among_RV = (
        torch.zeros_like(distribution_RV).scatter_add_(1, children_RK.clamp(min=0), (children_RK != NO_TOKEN).double()) > 0
    )
    return torch.zeros(len(target_CV)).double().index_add_(0, case_R, chance_R * (distribution_RV * among_RV).sum(-1))


def optimum(scheme: Scheme, target_CV: Tensor, draft_CV: Tensor, count: int) -> Tensor:
    """1 + min over sets H of P(H) − Q(H), Q the chance that all children are in H (optimal-multi-draft eq. 8)."""
    cases, vocabulary = target_CV.shape
    case_R, children_RK, chance_R = drawings(scheme, draft_CV, count)
    bits_RK = torch.where(children_RK == NO_TOKEN, 0, 1 << children_RK.clamp(min=0))
    bits_R = functools.reduce(torch.bitwise_or, bits_RK.unbind(1))
    best_C = torch.ones(cases).double()
    for subset in range(1 << vocabulary):
        inside_V = torch.tensor([bool(subset >> token & 1) for token in range(vocabulary)])
        covered_R = ((bits_R & ~subset) == 0) & (bits_R > 0)
        drawn_C = torch.zeros(cases).double().index_add_(0, case_R, chance_R * covered_R)
        best_C = torch.minimum(best_C, 1 + target_CV[:, inside_V].sum(-1) - drawn_C)
    return best_C


def linear_programme(scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int) -> float:
    """The same optimum as a transport problem: the most mass that can go from drawings to their own tokens."""
    _, children_RK, chance_R = drawings(scheme, draft_V[None], count)
    pairs = [(token, row) for row, children in enumerate(children_RK.tolist()) for token in {*children} - {NO_TOKEN}]
    constraints = np.zeros((len(target_V) + len(chance_R), len(pairs)))
    for column, (token, row) in enumerate(pairs):
        constraints[token, column] = constraints[len(target_V) + row, column] = 1
    limits = np.concatenate([target_V.numpy(), chance_R.numpy()])
    return -linprog(-np.ones(len(pairs)), A_ub=constraints, b_ub=limits, bounds=(0, None), method="highs").fun


def test_the_formula_of_the_optimum_is_the_linear_programme() -> None:
    for scheme in (Race(), Hybrid(), SCHEMES.get("rrs-wor")()):
        for vocabulary, count in ((3, 2), (4, 2), (4, 3)):
            target_CV, draft_CV = random_cases(vocabulary, cases=11, seed=vocabulary)
            expected = [linear_programme(scheme, *pair, count) for pair in zip(target_CV, draft_CV, strict=True)]
            np.testing.assert_allclose(optimum(scheme, target_CV, draft_CV, count).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_no_scheme_accepts_more_than_is_possible(name: str) -> None:
    # More would mean that children were not drawn, or tokens not emitted, by the distributions that were enumerated.
    scheme = SCHEMES.get(name)()
    for vocabulary, count in SHAPES[::2]:
        count = largest_count(scheme, count)
        target_CV, draft_CV = random_cases(vocabulary, cases=40, seed=31 * vocabulary + count)
        reached_C, most_C = (measure(scheme, target_CV, draft_CV, count) for measure in (acceptance, optimum))
        assert torch.all(reached_C <= most_C + TOLERANCE)


OPTIMAL = [
    Race(),
    Greedy(),
    SpecHub(),
    Speculative(),
    *(Hybrid(threshold, buckets=None) for threshold in (0.0, 0.5, 1.0, float("inf"))),
]


@pytest.mark.parametrize("scheme", OPTIMAL, ids=lambda scheme: f"{scheme.name} {getattr(scheme, 'threshold', '')}")
def test_optimal_schemes_reach_the_optimum_of_their_children(scheme: Scheme) -> None:
    worst = 0.0
    for vocabulary, count in SHAPES:
        if count <= largest_count(scheme, count):
            target_CV, draft_CV = random_cases(vocabulary, CASES, seed=17 * vocabulary + count)
            reached_C, most_C = (measure(scheme, target_CV, draft_CV, count) for measure in (acceptance, optimum))
            worst = max(worst, (reached_C - most_C).abs().max().item())
    assert worst < TOLERANCE


@pytest.mark.parametrize("scheme", [RaceBucketed(), Hybrid()], ids=["race-bucketed", "hybrid"])
def test_bucketed_schemes_stay_near_the_optimum_even_where_tokens_are_few(scheme: Scheme) -> None:
    for vocabulary, count in SHAPES:
        target_CV, draft_CV = random_cases(vocabulary, CASES, seed=17 * vocabulary + count)
        reached_C, most_C = (measure(scheme, target_CV, draft_CV, count) for measure in (acceptance, optimum))
        assert torch.all(reached_C >= most_C - 2.0**-7)


def language_like(vocabulary: int, temperature: float, noise: float, rows: int) -> tuple[Tensor, Tensor]:
    """Return float32 distributions of a Zipf vocabulary, target and draft differing by lognormal noise."""
    generator = torch.Generator().manual_seed(0)
    common_RV = -1.3 * torch.arange(1, vocabulary + 1).log() + torch.randn(rows, vocabulary, generator=generator)
    distributions = [
        torch.softmax((common_RV + noise * torch.randn(rows, vocabulary, generator=generator)) / temperature, -1)
        for _ in range(2)
    ]
    return distributions[0], distributions[1]


@pytest.mark.parametrize(("temperature", "noise"), [(0.6, 0.7), (1.0, 0.7), (1.0, 1.5), (0.3, 1.0), (1.0, 0.01)])
def test_buckets_cost_less_than_a_ten_thousandth_of_acceptance(temperature: float, noise: float) -> None:
    target_RV, draft_RV = language_like(30_000, temperature, noise, rows=3)
    for count in (2, 4, 8):
        for exact, bucketed in ((Race(), RaceBucketed()), (Hybrid(buckets=None), Hybrid())):
            uniforms_RK = torch.rand(3, count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
            children_RK = bucketed.draw(draft_RV, uniforms_RK)
            distribution_RV = target_RV.double() / target_RV.double().sum(-1, keepdim=True)
            reached_R, most_R = (
                torch.minimum(distribution_RV, scheme.contest(target_RV, draft_RV, children_RK).distribution_RV).sum(-1)
                for scheme in (bucketed, exact)
            )
            assert torch.all(most_R - reached_R < 1e-4)
            assert torch.all(most_R - reached_R > -1e-12)


def test_kseq_accepts_what_its_equation_says() -> None:
    for vocabulary, count in SHAPES:
        target_CV, draft_CV = random_cases(vocabulary, cases=30, seed=vocabulary)
        rho_C1 = KSeq()._rho(target_CV, draft_CV, torch.full((30, 1), count))
        each_C = torch.minimum(target_CV / rho_C1, draft_CV).sum(-1)
        tested_C = 1 - (1 - each_C) ** count
        # Eq. 30, but for the last halving of the interval.
        assert torch.all((tested_C - rho_C1[:, 0] * each_C).abs() < 1e-6)
        # The residual may hit a child once more, so this is a lower bound.
        assert torch.all(acceptance(KSeq(), target_CV, draft_CV, count) >= tested_C - TOLERANCE)
