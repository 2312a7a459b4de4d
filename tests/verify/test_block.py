"""The block walk: exact on every small tree, and never behind verification node by node."""

import pytest
import torch

from covering import all_slow, chosen, covering, some_slow
from polydraft.sampling import NO_TOKEN, PartialVocabulary, SamplingParams, Warper
from polydraft.trees import DraftTree
from polydraft.verify import SCHEMES, BlockWalk, NodeWalk, Scheme, Speculative, TargetDistributions
from polydraft.verify.walk import LEAST_WEIGHT

from .cases import TREES, batch_of, theory_batch
from .doubles import AnyPicked, HighestPicked, by_distribution
from .enumeration import TOLERANCE, Batch, enumerate_walk

SELECTING = [name for name in SCHEMES if BlockWalk.fits(SCHEMES.get(name))]
REGULAR = ["1x2", "2x1", "2x2", "3x1x1"]
WALK = BlockWalk(least_weight=0.0)
"""The one that theory is about; what is not worth a look otherwise costs it hundredths of a token."""


def trees_of(name: str) -> list[str]:
    return ["chain:3"] if SCHEMES.get(name).max_children == 1 else REGULAR


def spelled(value: object) -> str | None:
    return value.name if isinstance(value, Scheme) else None


def test_it_fits_schemes_that_can_pick() -> None:
    assert "speculative" in SELECTING
    assert not BlockWalk.fits(SCHEMES.get("rrs-wor")) and not BlockWalk.fits(SCHEMES.get("top"))


@pytest.mark.parametrize(("tree", "scheme", "least_weight"), [
    # Any pick of three is one of six orders: by default it is tried with fewer children, and patience with all trees.
    *all_slow(["3x1x1"], [AnyPicked()], [0.0, 0.4]),
    *covering([tree for tree in TREES if tree != "3x1x1"], [AnyPicked()], [0.0, 0.4]),
    *covering(TREES, [HighestPicked()], [0.0]),
    *covering(TREES, [HighestPicked()], [0.4]),
], ids=spelled)  # fmt: skip
def test_texts_follow_the_target_distribution(tree: str, scheme: Scheme, least_weight: float) -> None:
    outcomes = enumerate_walk(BlockWalk(least_weight), scheme, batch_of(tree, TREES[tree]))
    assert (outcomes.totals() - 1).abs().max() < TOLERANCE
    assert outcomes.text_error() < TOLERANCE


@pytest.mark.parametrize("scheme", [HighestPicked(), AnyPicked()], ids=lambda scheme: scheme.name)
def test_distributions_need_not_sum_to_one(scheme: Scheme) -> None:
    batch = batch_of("2x2", 3)
    scaled = Batch(batch.topology, batch.cases, target_scale=0.8, draft_scale=1.3)
    outcomes, expected = (enumerate_walk(WALK, scheme, one) for one in (scaled, batch))
    assert outcomes.text_error() < TOLERANCE
    torch.testing.assert_close(outcomes.accepted(), expected.accepted())


@pytest.mark.parametrize(("tree", "scheme"), [
    *covering(REGULAR, [HighestPicked()]),
    *covering(REGULAR[:-1], [AnyPicked()]),
    *all_slow(REGULAR[-1:], [AnyPicked()]),
], ids=spelled)  # fmt: skip
def test_a_path_is_a_chain_with_the_distributions_of_its_picks(tree: str, scheme: Scheme) -> None:
    batch = batch_of(tree, TREES[tree])
    chains = enumerate_walk(WALK, Speculative(), batch.picked_chains(scheme))
    torch.testing.assert_close(chains.accepted(), enumerate_walk(WALK, scheme, batch).accepted())


PAIRS = [(name, tree) for name in SELECTING for tree in trees_of(name)]


@pytest.mark.parametrize(("name", "tree"), some_slow(PAIRS, set(PAIRS).difference(chosen(PAIRS))))
def test_picked_paths_follow_the_target_distribution_and_accept_more_than_node_by_node(name: str, tree: str) -> None:
    batch = batch_of(tree, TREES[tree])
    outcomes = enumerate_walk(WALK, Speculative(), batch.picked_chains(SCHEMES.get(name)()))
    assert outcomes.text_error() < TOLERANCE
    behind_C = enumerate_walk(NodeWalk(), by_distribution(SCHEMES.get(name)), batch).accepted() - outcomes.accepted()
    assert behind_C.max() < TOLERANCE


def test_a_draft_equal_to_the_target_is_accepted_whole() -> None:
    assert enumerate_walk(WALK, Speculative(), batch_of("chain:3", 3)).accepted()[-1].item() == pytest.approx(3)


def test_figures_of_the_theory_note() -> None:
    chains = theory_batch().picked_chains(SCHEMES.get("race")())
    node, block = (
        enumerate_walk(NodeWalk(), by_distribution(SCHEMES.get("race")), theory_batch()),
        enumerate_walk(WALK, Speculative(), chains),
    )
    assert node.accepted().mean().item() == pytest.approx(1.1982, abs=5e-5)
    assert block.accepted().mean().item() == pytest.approx(1.2240, abs=5e-5)


@pytest.mark.parametrize("tree", REGULAR)
def test_impatience_costs_little(tree: str) -> None:
    batch = batch_of(tree, TREES[tree])
    lost_C = (
        enumerate_walk(WALK, HighestPicked(), batch).accepted() - enumerate_walk(BlockWalk(), HighestPicked(), batch).accepted()
    )
    assert lost_C.min() > -TOLERANCE and lost_C.max() < LEAST_WEIGHT * batch.topology.depth


@pytest.mark.parametrize("known", [False, True], ids=["all tokens", "part of the tokens"])
def test_a_root_alone_gets_the_token_that_it_gets_where_others_have_drafts(known: bool) -> None:
    """Rows that rest together are verified by a shorter way; a text must not tell in which company it rested."""
    size, rows, depth = 40, 64, 3
    generator = torch.Generator().manual_seed(1)
    vocabulary = PartialVocabulary(torch.arange(0, size, 3), size) if known else None
    logits_B1V = 2 * torch.randn(rows, 1, size, generator=generator)
    warper = Warper(SamplingParams(temperature=0.8, top_p=0.9), size, [[1]] * rows, torch.device("cpu"))
    distribution_1 = torch.full((1,), 0.1).expand(rows, 1, len(vocabulary.tokens_D) if vocabulary else size)
    scheme = SCHEMES.get("hybrid")()
    uniforms_BU = torch.rand(rows, WALK.uniforms(scheme, depth), generator=generator, dtype=torch.float64)
    verdicts = []
    for nodes in (1, 2):  # the second node is nobody's
        draft = DraftTree(
            torch.tensor([[5, NO_TOKEN][:nodes]] * rows),
            torch.tensor([[0, 1][:nodes]] * rows),
            torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(rows, -1, -1),
            torch.tensor([[[1], [0]][:nodes]] * rows) * (nodes - 1),
            depth,
            (distribution_1,) * depth,
            torch.zeros(rows, nodes, dtype=torch.long),
            vocabulary,
        )
        distributions = TargetDistributions(logits_B1V.expand(-1, nodes, -1), lambda logits: logits, warper, whole=True)
        verdicts.append(WALK.run(scheme, draft, distributions, uniforms_BU))
    short, long = verdicts
    assert short.tokens_BD[:, 0].tolist() == long.tokens_BD[:, 0].tolist() and len(set(short.tokens_BD[:, 0].tolist())) > 5
    for name in ("path_BD", "accepted_B", "offered_B", "fault_B"):
        assert getattr(short, name).tolist() == getattr(long, name).tolist(), name
