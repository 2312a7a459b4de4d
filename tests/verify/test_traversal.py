"""The traversal walk: exact on every small tree, and never behind recursive rejection."""

import pytest
import torch

from covering import chosen, some_slow
from polydraft.verify import SCHEMES, BlockWalk, NodeWalk, RejectionWithReplacement, Scheme, TraversalWalk
from polydraft.verify.walk import LEAST_WEIGHT

from .cases import TREES, batch_of, theory_batch
from .doubles import by_distribution
from .enumeration import TOLERANCE, Batch, enumerate_walk

FITTING = [name for name in SCHEMES if TraversalWalk.fits(SCHEMES.get(name))]


def fitting_trees(name: str) -> list[str]:
    limit = SCHEMES.get(name).max_children
    return [tree for tree in TREES if limit is None or batch_of(tree, TREES[tree]).topology.max_children <= limit]


WALK = TraversalWalk(least_weight=0.0)
"""The one that theory is about; what is not worth a look otherwise costs it hundredths of a token."""

PAIRS = [(name, tree) for name in FITTING for tree in fitting_trees(name)]
QUICK_PAIRS = set(chosen(PAIRS)) - {("rrs-wr", "3x1x1")}
"""Every tree and every scheme, but for the one that takes longest: their distribution is tested all the same."""
quick_pairs = pytest.mark.parametrize(("name", "tree"), some_slow(PAIRS, set(PAIRS) - QUICK_PAIRS))


def test_it_fits_the_rejection_schemes() -> None:
    assert {"rrs-wor", "rrs-wr", "speculative"} <= {*FITTING}
    assert not TraversalWalk.fits(SCHEMES.get("naive"))


@pytest.mark.parametrize(("name", "tree"), some_slow(PAIRS, set(PAIRS).difference(chosen(PAIRS))))
def test_texts_follow_the_target_distribution(name: str, tree: str) -> None:
    scheme: Scheme = SCHEMES.get(name)()
    outcomes = enumerate_walk(WALK, scheme, batch_of(tree, TREES[tree]))
    assert (outcomes.totals() - 1).abs().max() < TOLERANCE
    assert outcomes.text_error() < TOLERANCE
    behind_C = (
        enumerate_walk(NodeWalk(), by_distribution(type(scheme)), batch_of(tree, TREES[tree])).accepted() - outcomes.accepted()
    )
    assert behind_C.max() < TOLERANCE


@quick_pairs
def test_impatience_is_exact_and_costs_little(name: str, tree: str) -> None:
    scheme, batch = SCHEMES.get(name)(), batch_of(tree, TREES[tree])
    assert enumerate_walk(TraversalWalk(least_weight=0.4), scheme, batch).text_error() < TOLERANCE
    lost_C = enumerate_walk(WALK, scheme, batch).accepted() - enumerate_walk(TraversalWalk(), scheme, batch).accepted()
    assert lost_C.min() > -TOLERANCE and lost_C.max() < LEAST_WEIGHT * batch.topology.depth


@pytest.mark.parametrize("name", some_slow(["rrs-wor", "rrs-wr"], ["rrs-wr"]))
def test_distributions_need_not_sum_to_one(name: str) -> None:
    batch = batch_of("2x2", 3)
    scaled = Batch(batch.topology, batch.cases, target_scale=0.8, draft_scale=1.3)
    outcomes, expected = (enumerate_walk(WALK, SCHEMES.get(name)(), one) for one in (scaled, batch))
    assert outcomes.text_error() < TOLERANCE
    torch.testing.assert_close(outcomes.accepted(), expected.accepted())


def test_on_a_chain_it_is_block_verification() -> None:
    batch, scheme = batch_of("chain:3", 3), SCHEMES.get("speculative")()
    torch.testing.assert_close(
        enumerate_walk(WALK, scheme, batch).accepted(), enumerate_walk(BlockWalk(least_weight=0.0), scheme, batch).accepted()
    )


@quick_pairs
def test_a_draft_equal_to_the_target_is_accepted_whole(name: str, tree: str) -> None:
    batch = batch_of(tree, TREES[tree])
    deepest_first = enumerate_walk(WALK, SCHEMES.get(name)(), batch).accepted()[-1].item()
    # The first leaf in draw order is always right; it need not be among the deepest.
    first_leaf = 0
    while batch.topology.children[first_leaf]:
        first_leaf = batch.topology.children[first_leaf][0]
    assert deepest_first == pytest.approx(batch.topology.depths[first_leaf], abs=TOLERANCE)


def test_figures_of_the_theory_note() -> None:
    scheme = RejectionWithReplacement()
    assert enumerate_walk(NodeWalk(), by_distribution(type(scheme)), theory_batch()).accepted().mean().item() == pytest.approx(
        1.1058, abs=5e-5
    )
    assert enumerate_walk(WALK, scheme, theory_batch()).accepted().mean().item() == pytest.approx(1.1447, abs=5e-5)
