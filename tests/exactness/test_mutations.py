"""The tests bite: every wrong rule is caught, by the checkers that the real tests use.

Enumeration catches all of them; samples of the fixture all but the two subtle ones; whole texts the structural ones.
"""

from collections.abc import Callable

import pytest

from covering import some_slow
from polydraft.certify.mutants import CORRECT, STRUCTURAL, SUBTLE, DistinctTestedAsIndependent, DrawnByRank
from polydraft.verify import SCHEMES, Scheme

from .checks import (
    FALSE_ALARM,
    FIXTURE_DRAFT_V,
    FIXTURE_TARGET_V,
    TOLERANCE,
    drawings,
    enumeration_error,
    random_cases,
    sample_node,
    token_p_value,
    tuple_p_value,
)
from .configurations import THRESHOLD, Configuration

pytestmark = pytest.mark.usefixtures("short_blocks")


def worst_error(scheme: Scheme) -> float:
    """Enumerate as `test_enumeration` does."""
    target_CV, draft_CV = random_cases(4, cases=120, seed=42)
    on_cases, _ = enumeration_error(scheme, target_CV, draft_CV, count=2)
    on_fixture, _ = enumeration_error(scheme, FIXTURE_TARGET_V[None], FIXTURE_DRAFT_V[None], count=2)
    return max(on_cases, on_fixture)


def fixture_p_value(scheme: Scheme) -> float:
    """Sample as `test_verified_token_follows_the_target_distribution` does."""
    _, token_R = sample_node(scheme, FIXTURE_TARGET_V, FIXTURE_DRAFT_V, count=2, seed=2)
    return token_p_value(token_R, FIXTURE_TARGET_V)


def named(mutant: type[Scheme]) -> str:
    return mutant.__name__


@pytest.mark.parametrize("rule", CORRECT, ids=named)
def test_the_rules_behind_the_mutants_are_correct(rule: type[Scheme]) -> None:
    assert worst_error(rule()) < TOLERANCE
    assert fixture_p_value(rule()) > FALSE_ALARM


@pytest.mark.parametrize("mutant", STRUCTURAL + SUBTLE, ids=named)
def test_enumeration_catches_every_wrong_rule(mutant: type[Scheme]) -> None:
    # Far above the tolerance: no rule escapes by a change of the random cases.
    assert worst_error(mutant()) > 1e5 * TOLERANCE


# All are caught by enumeration; by default some show that samples see them, too.
@pytest.mark.parametrize("mutant", some_slow(STRUCTURAL, STRUCTURAL[4:]), ids=named)
def test_the_fixture_catches_structural_mistakes(mutant: type[Scheme]) -> None:
    assert fixture_p_value(mutant()) < FALSE_ALARM


def test_the_test_of_draws_catches_children_of_another_distribution() -> None:
    _, children_SK, chance_S = drawings(DrawnByRank(), FIXTURE_DRAFT_V[None], 2)
    children_RK, _ = sample_node(DrawnByRank(), FIXTURE_TARGET_V, FIXTURE_DRAFT_V, 2, seed=2)
    assert tuple_p_value(children_RK, dict(zip(map(tuple, children_SK.tolist()), chance_S.tolist(), strict=True))) < FALSE_ALARM


def test_texts_catch_a_wrong_rule_of_one_node(registered: Callable[..., None]) -> None:
    registered(SCHEMES, "mutant", DistinctTestedAsIndependent)
    configuration = Configuration(label="mutant", scheme="mutant", tree="2x2x2", prompt=(0, 0), fixture=True)
    assert min(configuration.p_values(configuration.generate())) < THRESHOLD
