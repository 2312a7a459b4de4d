"""Picking a child before accepting it: the picked child follows the distribution that is declared for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covering import all_slow, covering, some_slow
from polydraft.certify.mutants import RaceWithoutExchange
from polydraft.sampling import NO_TOKEN
from polydraft.verify import SCHEMES, Hybrid, Race, RaceBucketed, Scheme
from polydraft.verify.hybrid import split

from .checks import (
    FALSE_ALARM,
    FIXTURE_DRAFT_V,
    FIXTURE_SAMPLES,
    FIXTURE_TARGET_V,
    TOLERANCE,
    drawings,
    largest_count,
    random_cases,
    sample_node,
    token_p_value,
    tuple_p_value,
)

SELECTING = [name for name in SCHEMES if SCHEMES.get(name).select_uniforms is not None]
RACES: list[Race] = [
    Race(),
    RaceBucketed(),
    RaceBucketed(buckets=1),  # every token in one bucket
    RaceBucketed(buckets=3),
    Hybrid(),
    Hybrid(threshold=1.0, buckets=None),
    Hybrid(threshold=0.0, buckets=3),
    Hybrid(threshold=float("inf"), buckets=3),
]
ODD_RACES = [*RACES[2:4], *RACES[5:]]
# Distributions at which children of most cells exchange places, a third of them with two children, more with three.
LIVELY = (
    torch.tensor([0.281, 0.110, 0.054, 0.100, 0.455]).double(),
    torch.tensor([0.313, 0.055, 0.014, 0.083, 0.535]).double(),
)
DISTRIBUTIONS = {"fixture": (FIXTURE_TARGET_V, FIXTURE_DRAFT_V), "lively": LIVELY}
every_race = pytest.mark.parametrize(
    "scheme", RACES, ids=lambda race: f"{race.name} {race.buckets} {vars(race).get('threshold')}"
)
selecting = pytest.mark.parametrize("name", SELECTING)


def uniforms(scheme: Scheme, rows: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random numbers for drawing and for selecting."""
    assert scheme.select_uniforms is not None
    generator = torch.Generator().manual_seed(seed)
    uniforms_RU = torch.rand(rows, count + scheme.select_uniforms, generator=generator, dtype=torch.float64)
    return uniforms_RU[:, :count], uniforms_RU[:, count:]


def selection_p_value(scheme: Scheme, distributions: tuple[Tensor, Tensor], count: int) -> float:
    """Draw and select many times, as production does."""
    draw_RK, select_RU = uniforms(scheme, FIXTURE_SAMPLES, count, seed=count)
    target_RV, draft_RV = (distribution_V.float().expand(FIXTURE_SAMPLES, -1) for distribution_V in distributions)
    children_RK = scheme.draw(draft_RV, draw_RK)
    selection = scheme.select(target_RV, draft_RV, children_RK, select_RU)
    assert selection.distribution_RV.dtype == torch.float64
    assert torch.all((children_RK == selection.token_R[:, None]).any(-1))
    return token_p_value(selection.token_R, selection.distribution_RV[0])


@every_race
@pytest.mark.parametrize("count", some_slow([1, 2, 3], [1, 2]))
def test_the_selected_child_follows_the_declared_distribution(scheme: Race, count: int) -> None:
    for vocabulary in (1, 2, 4, 5):
        target_CV, draft_CV = random_cases(vocabulary, cases=60, seed=vocabulary + 7 * count)
        case_R, children_RK, chance_R = drawings(scheme, draft_CV, count)
        # A column more than children: the tree is wider elsewhere.
        children_RK = torch.nn.functional.pad(children_RK, (0, 1), value=NO_TOKEN)
        contest = scheme.contest(target_CV[case_R], draft_CV[case_R], children_RK)
        chances_RK = contest.chances()
        assert torch.all(chances_RK >= -TOLERANCE)
        assert torch.all((chances_RK.sum(-1) - 1).abs() < TOLERANCE)
        selected_RV = torch.zeros(len(case_R), vocabulary).double()
        selected_RV.scatter_add_(1, children_RK.clamp(min=0), chances_RK * (children_RK != NO_TOKEN))
        selected_CV = torch.zeros(target_CV.shape).double().index_add_(0, case_R, chance_R[:, None] * selected_RV)
        first_C = torch.zeros(len(target_CV), dtype=torch.long).scatter_(0, case_R, torch.arange(len(case_R)))
        torch.testing.assert_close(selected_CV, contest.distribution_RV[first_C], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "distributions", "count"), [
    # By default where most children exchange places.
    *covering(SELECTING, ["lively"], [3]),
    *all_slow(SELECTING, ["lively"], [1, 2]),
    *all_slow(SELECTING, ["fixture"], [1, 2, 3]),
])  # fmt: skip
def test_selected_samples_follow_the_declared_distribution(name: str, distributions: str, count: int) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, count)
    assert selection_p_value(scheme, DISTRIBUTIONS[distributions], count) > FALSE_ALARM


def test_samples_catch_a_race_without_exchange() -> None:
    # The fixture happens to need none, so enumeration alone sees the mutant there.
    assert selection_p_value(RaceWithoutExchange(), LIVELY, 2) < FALSE_ALARM


@selecting
def test_verified_samples_follow_the_target_distribution_where_places_are_exchanged(name: str) -> None:
    scheme = SCHEMES.get(name)()
    _, token_R = sample_node(scheme, *LIVELY, largest_count(scheme, 3), seed=6)
    assert token_p_value(token_R, LIVELY[0]) > FALSE_ALARM


# Enumeration proves `chances`; this ties it to the random numbers that production uses, by default as they are registered.
@pytest.mark.parametrize(
    "scheme",
    [pytest.param(race, marks=pytest.mark.slow if race in ODD_RACES else ()) for race in RACES],
    ids=lambda race: f"{race.name} {race.buckets} {vars(race).get('threshold')}",
)
def test_selected_samples_follow_the_chances_given_the_children(scheme: Race) -> None:
    _, children_SK, chance_S = drawings(scheme, LIVELY[1][None], 3)
    distributions = [distribution_V.expand(len(children_SK), -1) for distribution_V in LIVELY]
    chances_SK = scheme.contest(*distributions, children_SK).chances()
    expected: dict[tuple[int, ...], float] = {}
    for children, chance, chances in zip(children_SK.tolist(), chance_S.tolist(), chances_SK.tolist(), strict=True):
        for token, selected in zip(children, chances, strict=True):
            expected[(*children, token)] = expected.get((*children, token), 0.0) + chance * selected
    draw_RK, select_RU = uniforms(scheme, FIXTURE_SAMPLES, 3, seed=5)
    target_RV, draft_RV = (distribution_V.expand(FIXTURE_SAMPLES, -1) for distribution_V in LIVELY)
    children_RK = scheme.draw(draft_RV, draw_RK)
    token_R = scheme.select(target_RV, draft_RV, children_RK, select_RU).token_R
    assert tuple_p_value(torch.cat([children_RK, token_R[:, None]], dim=1), expected) > FALSE_ALARM


@selecting
def test_rows_without_children_select_nothing(name: str) -> None:
    scheme = SCHEMES.get(name)()
    target_CV, draft_CV = random_cases(5, cases=30, seed=6)
    draft_CV[::3] = 0
    selection = scheme.select(target_CV, draft_CV, torch.full((30, 2), NO_TOKEN), uniforms(scheme, 30, 0, seed=1)[1])
    assert torch.all(selection.token_R == NO_TOKEN)
    assert torch.all(selection.distribution_RV == 0)


@pytest.mark.parametrize("threshold", some_slow([0.0, 0.5, 1.0, 2.0, float("inf")], [0.5, 1.0, 2.0]))
def test_verification_finds_the_certain_children_that_were_drawn(threshold: float) -> None:
    scheme = Hybrid(threshold)
    generator = torch.Generator().manual_seed(3)
    seen = set()
    for vocabulary in (1, 2, 3, 5, 40, 1_024):
        draft_RV = torch.softmax(3 * torch.randn(200, vocabulary, generator=generator), -1)
        draft_RV[::3] = (4 * torch.rand(67, vocabulary, generator=generator)).round()  # equal weights, and none
        for count in (1, 2, 4):
            children_RK = scheme.draw(draft_RV, torch.rand(200, count, generator=generator, dtype=torch.float64))
            drawn_R = split(draft_RV, count, threshold)[1].sum(-1)
            for row in range(0, 200, 7):  # one row alone, as at verification
                children_1K = torch.nn.functional.pad(children_RK[row : row + 1], (0, 1), value=NO_TOKEN)
                distribution_1V = draft_RV[row : row + 1]
                certain_1K = scheme.contest(distribution_1V, distribution_1V, children_1K).certain_RK
                assert certain_1K is not None
                assert (certain_1K > 0).sum() == drawn_R[row]
            seen |= {*drawn_R.tolist()}
    assert seen == {0: {0, 1, 2, 3}, float("inf"): {0}}.get(threshold, seen)


@pytest.mark.parametrize("scheme", [Race(), RaceBucketed(), RaceBucketed(buckets=2)], ids=["sorted", "bucketed", "coarse"])
def test_the_order_of_racing_children_does_not_matter(scheme: Race) -> None:
    target_CV, draft_CV = random_cases(5, cases=25, seed=4)
    case_R, children_RK, _ = drawings(scheme, draft_CV, 3)
    distributions = target_CV[case_R], draft_CV[case_R]
    distribution_RV = scheme.distribution(*distributions, children_RK)
    for order in ([1, 0, 2], [2, 0, 1], [2, 1, 0]):
        torch.testing.assert_close(
            scheme.distribution(*distributions, children_RK[:, order]), distribution_RV, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("scheme", [RaceBucketed(), Hybrid()], ids=["race-bucketed", "hybrid"])
def test_a_long_vocabulary_gives_what_a_short_one_gives(scheme: Race) -> None:
    # Enumerations have short vocabularies, whose buckets are renumbered; long ones use them as they are.
    target_CV, draft_CV = random_cases(5, cases=40, seed=8)
    case_R, children_RK, _ = drawings(scheme, draft_CV, 2)
    case_R, children_RK = case_R[::3], children_RK[::3]
    short = scheme.distribution(target_CV[case_R], draft_CV[case_R], children_RK)
    long_tokens_V = torch.arange(5) * 600 + 40
    long_target_CV, long_draft_CV = torch.zeros(2, 40, 5_000).double()
    long_target_CV[:, long_tokens_V], long_draft_CV[:, long_tokens_V] = target_CV, draft_CV
    long_children_RK = torch.where(children_RK == NO_TOKEN, NO_TOKEN, long_tokens_V[children_RK])
    long = scheme.distribution(long_target_CV[case_R], long_draft_CV[case_R], long_children_RK)
    torch.testing.assert_close(long[:, long_tokens_V], short, rtol=0, atol=1e-12)
    assert torch.all((long.sum(-1) - 1).abs() < TOLERANCE)


@pytest.mark.parametrize("name", ["race", "race-bucketed", "hybrid", "rrs-wor", "rrs-wr", "greedy", "spechub", "kseq"])
def test_what_other_devices_run_gives_the_same(name: str, hide_values: Callable[[], None]) -> None:
    scheme = SCHEMES.get(name)()
    count = largest_count(scheme, 3)
    generator = torch.Generator().manual_seed(9)
    target_CV, draft_CV = (distribution_CV.float() for distribution_CV in random_cases(6, cases=300, seed=9))
    draw_CK = torch.rand(300, count, generator=generator, dtype=torch.float64)
    verify_CU = torch.rand(300, scheme.verify_uniforms, generator=generator, dtype=torch.float64)
    children_CK = scheme.draw(draft_CV, draw_CK)
    token_C = scheme.verify(target_CV, draft_CV, children_CK, verify_CU)
    hide_values()
    assert torch.equal(scheme.draw(draft_CV, draw_CK), children_CK)
    assert torch.equal(scheme.verify(target_CV, draft_CV, children_CK, verify_CU), token_C)
