"""Tokens per pass and speed-up, against the papers' formulas, simulation and search over all trees."""

import itertools

import numpy as np
import pytest

from polydraft.errors import UsageError
from polydraft.lab.theory import (
    Costs,
    chain_tokens,
    cost_curve,
    fastest_tree,
    improvement_factor,
    largest_tree,
    speedup,
    token_acceptance,
    tree_tokens,
)
from polydraft.trees import Topology

RANKS = [0.55, 0.2, 0.1, 0.05]


def flat(nodes: int) -> float:
    return 1.0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999])
@pytest.mark.parametrize("length", [1, 5, 20])
def test_chain_is_the_papers_formula(alpha: float, length: int) -> None:
    tokens = (1 - alpha ** (length + 1)) / (1 - alpha)
    assert chain_tokens(alpha, length) == pytest.approx(tokens, rel=1e-12)
    assert improvement_factor(alpha, length, 0.1) == pytest.approx(tokens / (0.1 * length + 1), rel=1e-12)
    costs = Costs(draft_level=0.1, tree_pass=flat)
    assert speedup(tokens, length, length + 1, costs) == pytest.approx(improvement_factor(alpha, length, 0.1), rel=1e-12)


def test_a_perfect_draft_is_limited_by_its_cost() -> None:
    assert chain_tokens(1.0, 5) == 6
    assert improvement_factor(1.0, 5, 0.1) == pytest.approx(6 / 1.5)


def test_chain_of_unequal_places_matches_simulation() -> None:
    chances = [0.9, 0.5, 0.7]
    accepted_RL = np.random.default_rng(0).random((200_000, 3)) < chances
    simulated = 1 + accepted_RL.cumprod(1).sum(1).mean()
    assert chain_tokens(chances) == pytest.approx(simulated, abs=0.01)
    assert chain_tokens([]) == 1


def test_share_of_the_accepted_length_is_another_number() -> None:
    # What the paper tabulates as α = 0.43 at depth 5 is an acceptance of a token of 0.731.
    for alpha in (0.0, 0.2, 0.93, 1.0):
        share = (chain_tokens(alpha, 5) - 1) / 5
        assert share <= alpha
        assert token_acceptance(share, 5) == pytest.approx(alpha, abs=1e-12)
    assert token_acceptance(0.43, 5) == pytest.approx(0.73096, abs=1e-5)


def test_tree_tokens_is_the_sum_of_path_products() -> None:
    assert tree_tokens(Topology(), RANKS) == 1
    assert tree_tokens(Topology.fork(1, 5), RANKS) == pytest.approx(chain_tokens(0.55, 5))
    assert tree_tokens(Topology.from_widths([2, 2]), RANKS) == pytest.approx(1 + 0.75 + 0.75**2)
    assert tree_tokens(Topology.from_paths([[0], [1], [1, 0]]), RANKS) == pytest.approx(1 + 0.75 + 0.2 * 0.55)


def dynamic_program(ranks: list[float], nodes: int, depth: int) -> float:
    """Sequoia's recursion: the best tokens of a tree of at most `nodes` nodes, by splitting what is left over the ranks."""
    if nodes <= 0:
        return 0.0
    if depth == 0:
        return 1.0
    best_of_rest = [0.0] * nodes
    for chance in reversed(ranks):
        best_of_rest = [
            max(chance * dynamic_program(ranks, given, depth - 1) + best_of_rest[left - given] for given in range(left + 1))
            for left in range(nodes)
        ]
    return 1 + best_of_rest[nodes - 1]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 2, 4, 7, 9])
def test_largest_products_are_the_best_tree(nodes: int, depth: int) -> None:
    for ranks in (RANKS[:3], [0.4, 0.4, 0.2], [0.9, 0.05, 0.0]):
        tree = largest_tree(ranks, nodes, max_depth=depth)
        assert tree.num_nodes <= nodes and tree.depth <= depth
        assert tree_tokens(tree, ranks) == pytest.approx(dynamic_program(ranks, nodes, depth), abs=1e-12)


def test_no_tree_of_the_same_size_beats_it() -> None:
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    trees = []
    for chosen in itertools.combinations(paths, 5):
        try:
            trees.append(Topology.from_paths(chosen))
        except UsageError:
            continue
    assert len(trees) == 13
    best = max(tree_tokens(tree, RANKS) for tree in trees)
    assert best == pytest.approx(tree_tokens(largest_tree(RANKS[:2], 6, max_depth=3), RANKS))


def test_impossible_nodes_are_left_out() -> None:
    assert largest_tree([0.5, 0.0], 50, max_depth=3).num_nodes == 4
    assert largest_tree([0.0], 50) == Topology()
    assert largest_tree(RANKS, 1) == Topology()
    assert largest_tree(RANKS, 200).num_nodes == 200


def test_fastest_tree_is_the_best_of_all_sizes_and_depths() -> None:
    costs = Costs(draft_level=0.12, tree_pass=cost_curve({1: 20.0, 16: 24.0, 64: 60.0}), overhead=0.05)
    best = fastest_tree(RANKS, costs, max_nodes=64, max_depth=8)
    assert best.tokens == pytest.approx(tree_tokens(best.topology, RANKS))
    assert best.speedup == pytest.approx(speedup(best.tokens, best.topology.depth, best.topology.num_nodes, costs))
    others = [largest_tree(RANKS, nodes, max_depth=depth) for nodes in range(2, 65) for depth in range(1, 9)]
    factors = [speedup(tree_tokens(tree, RANKS), tree.depth, tree.num_nodes, costs) for tree in others]
    assert best.speedup == pytest.approx(max(factors))


def test_where_drafting_never_pays_the_fastest_tree_is_none() -> None:
    best = fastest_tree([0.1], Costs(draft_level=0.5, tree_pass=flat), max_nodes=16, max_depth=4)
    assert best.topology == Topology() and best.speedup == 1


def test_cost_curve_goes_through_its_points_and_on() -> None:
    curve = cost_curve({1: 20.0, 11: 30.0, 31: 40.0})
    assert [curve(nodes) for nodes in (1, 6, 11, 21, 31, 51)] == pytest.approx([1, 1.25, 1.5, 1.75, 2, 2.5])
    assert cost_curve({4: 10.0})(100) == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: chain_tokens(1.2, 5), "acceptance is 1.2; allowed: numbers from 0 to 1"),
        (lambda: chain_tokens(float("nan"), 5), "acceptance is nan"),
        (lambda: chain_tokens(0.5), "length is missing"),
        (lambda: chain_tokens(0.5, 2.5), "length is 2.5; allowed: whole numbers"),
        (lambda: improvement_factor(0.5, 5, -1), "draft_cost is -1"),
        (lambda: token_acceptance(2, 5), "accepted_share is 2"),
        (lambda: Costs(draft_level=float("inf"), tree_pass=flat), "draft_level is inf"),
        (lambda: speedup(0.5, 1, 2, Costs(draft_level=0.1, tree_pass=flat)), "tokens is 0.5"),
        (lambda: cost_curve({}), "measured is empty"),
        (lambda: cost_curve({0: 1.0}), "tokens of a measured pass is 0"),
        (lambda: cost_curve({1: 0.0}), "time of a measured pass is 0"),
        (lambda: tree_tokens(Topology.fork(3, 1), [0.5]), "rank_acceptance has 1 numbers"),
        (lambda: largest_tree([0.2, 0.5], 8), "rank_acceptance rises"),
        (lambda: largest_tree([0.7, 0.6], 8), "sum to at most 1"),
        (lambda: largest_tree([], 8), "rank_acceptance is []"),
        (lambda: largest_tree([0.5], 0), "nodes is 0; allowed: whole numbers from 1 to 1024"),
        (lambda: fastest_tree([0.5], Costs(draft_level=0.1, tree_pass=flat), 5000, 3), "max_nodes is 5000"),
    ],
)
def test_bad_numbers_are_refused_by_name(call, said: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert said in str(error.value) and "\n" not in str(error.value)
