"""Drawing and verification in C against the arrays that it stands for, whose distributions are enumerated elsewhere."""

import dataclasses

import numpy as np
import pytest
import torch

from covering import covering
from polydraft.backends.native import build
from polydraft.backends.native.verification import draw, largest_weights
from polydraft.sampling import NO_TOKEN, PartialVocabulary
from polydraft.sampling.categorical import _BlockedWeights
from polydraft.trees import DraftTree, parse_tree
from polydraft.verify import Fault
from polydraft.verify import block as block_walk
from polydraft.verify._native_block import compiled_verdict
from polydraft.verify.block import BlockWalk
from polydraft.verify.hybrid import Hybrid, RaceBucketed

VOCABULARY, BUCKETS = 60, 12
KNOWN = PartialVocabulary(torch.arange(3, VOCABULARY, 2), VOCABULARY)
COMPILED = {"hybrid": Hybrid(buckets=BUCKETS), "hybrid:0": Hybrid(0.0, BUCKETS), "race": RaceBucketed(BUCKETS)}
VOCABULARIES = {"whole": None, "partial": KNOWN}


@pytest.fixture(autouse=True)
def library():
    found = build.kernels()
    if found is None:
        pytest.skip("no C compiler here")
    return found


def distributions(generator, *shape, alike=None):
    """Distributions of all kinds: flat, peaked, with zeros, of one token."""
    logits = torch.randn(*shape, generator=generator) * 3
    if alike is not None:
        logits = 0.5 * logits + alike
    kind = int(torch.randint(4, (1,), generator=generator))
    if kind == 1:
        logits = torch.where(torch.rand(*shape, generator=generator) < 0.6, -torch.inf, logits)
        logits[..., 0] = 0.0
    elif kind == 2:
        logits = logits * 8
    return logits.softmax(-1), logits.clamp(min=-50)


def trees(seed, scheme, tree, vocabulary, batch):
    """A tree drawn from random distributions, the target's distributions at its nodes, and random numbers."""
    generator, topology = torch.Generator().manual_seed(seed), parse_tree(tree)
    size = VOCABULARY if vocabulary is None else len(vocabulary.tokens_D)
    target_BNV, logits_BNV = distributions(generator, batch, topology.num_nodes, VOCABULARY)
    tokens_BN = torch.randint(VOCABULARY, (batch, topology.num_nodes), generator=generator)
    levels, distribution_rows_N = [], torch.zeros(topology.num_nodes, dtype=torch.long)
    for draws in topology.draws:
        drawing = sorted(node for group in draws for node in group.nodes)
        if not drawing:
            continue
        alike = logits_BNV[:, drawing] if vocabulary is None else logits_BNV[:, drawing][..., vocabulary.tokens_D]
        distribution_BGD = distributions(generator, batch, len(drawing), size, alike=alike if seed % 2 else None)[0]
        levels.append(distribution_BGD)
        distribution_rows_N[drawing] = torch.arange(len(drawing))
        for group in draws:
            for node, children in zip(group.nodes, group.children, strict=True):
                uniforms = torch.rand(batch, len(children), generator=generator, dtype=torch.float64)
                drawn = scheme.draw(distribution_BGD[:, drawing.index(node)], uniforms)
                tokens_BN[:, list(children)] = drawn if vocabulary is None else vocabulary.tokens(drawn)
    draft = DraftTree.from_topology(topology, tokens_BN, tuple(levels), distribution_rows_N, vocabulary)
    if seed % 3 == 0:  # a node without children where others have some
        draft = dataclasses.replace(draft, child_table_BNK=draft.child_table_BNK.clone())
        draft.child_table_BNK[0, 1] = 0
    uniforms_BU = torch.rand(batch, BlockWalk().uniforms(scheme, draft.depth), generator=generator, dtype=torch.float64)
    return draft, target_BNV, uniforms_BU


def distribution_of(target_BNV):
    return lambda node_B, path_BP: target_BNV[torch.arange(len(node_B)), node_B]


@pytest.mark.parametrize(("name", "known"), covering(COMPILED, VOCABULARIES))
def test_verdicts_are_those_of_the_arrays(name, known, monkeypatch):
    scheme, vocabulary = COMPILED[name], VOCABULARIES[known]
    walk, seen = BlockWalk(), set()
    for seed in range(60):
        tree, batch = [("4", 1), ("2x2x1", 1), ("3x2", 3), ("1x1x1x1", 2), ("4x2x2x1x1", 1)][seed % 5]
        draft, target_BNV, uniforms_BU = trees(seed, scheme, tree, vocabulary, batch)
        found = compiled_verdict(scheme, draft, distribution_of(target_BNV), uniforms_BU, walk.least_weight)
        with monkeypatch.context() as patch:
            patch.setattr(block_walk, "compiled_verdict", lambda *_: None)
            # In float64, as the compiled code computes: cells of float32 ratios may be other cells.
            wide = dataclasses.replace(
                draft, distributions=tuple(distribution.double() for distribution in draft.distributions)
            )
            expected = walk.run(scheme, wide, distribution_of(target_BNV), uniforms_BU)
        assert found is not None
        for part in ("accepted_B", "path_BD", "offered_B", "fault_B"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), (seed, part)
        for row, accepted in enumerate(found.accepted_B.tolist()):
            assert found.tokens_BD[row, : accepted + 1].tolist() == expected.tokens_BD[row, : accepted + 1].tolist(), seed
            seen.add(accepted)
    assert {0, 1, 2} <= seen


def test_a_row_gets_what_it_gets_alone():
    scheme, walk = Hybrid(buckets=BUCKETS), BlockWalk()
    draft, target_BNV, uniforms_BU = trees(7, scheme, "3x2x1", KNOWN, 6)
    together = compiled_verdict(scheme, draft, distribution_of(target_BNV), uniforms_BU, walk.least_weight)
    for row in range(6):
        one = slice(row, row + 1)
        alone = dataclasses.replace(
            draft,
            tokens_BN=draft.tokens_BN[one],
            depths_BN=draft.depths_BN[one],
            ancestors_BNN=draft.ancestors_BNN[one],
            child_table_BNK=draft.child_table_BNK[one],
            distributions=tuple(distribution[one] for distribution in draft.distributions),
            distribution_rows_BN=draft.distribution_rows_BN[one],
        )
        found = compiled_verdict(scheme, alone, distribution_of(target_BNV[one]), uniforms_BU[one], walk.least_weight)
        assert torch.equal(found.path_BD[0], together.path_BD[row])
        assert (
            found.tokens_BD[0, : found.accepted_B[0] + 1].tolist()
            == together.tokens_BD[row, : found.accepted_B[0] + 1].tolist()
        )


@pytest.mark.parametrize(("who", "fault"), [("target", Fault.TARGET), ("draft", Fault.DRAFT)])
def test_distributions_that_are_not_numbers_are_reported(who, fault):
    scheme, walk = Hybrid(buckets=BUCKETS), BlockWalk()
    draft, target_BNV, uniforms_BU = trees(8, scheme, "2x1", None, 2)
    (target_BNV[1, 0] if who == "target" else draft.distributions[0][1]).fill_(torch.nan)
    found = compiled_verdict(scheme, draft, distribution_of(target_BNV), uniforms_BU, walk.least_weight)
    assert found.fault_B.tolist() == [Fault.NONE, fault]


def test_what_it_does_not_know_is_left_to_the_arrays():
    class Own(Hybrid):
        def select(self, *args):
            return super().select(*args)

    draft, target_BNV, uniforms_BU = trees(8, Hybrid(buckets=BUCKETS), "2x1", None, 1)
    for scheme in (Own(buckets=BUCKETS), Hybrid(buckets=None), Hybrid(buckets=VOCABULARY + 1)):
        assert compiled_verdict(scheme, draft, distribution_of(target_BNV), uniforms_BU, 0.0) is None


@pytest.mark.parametrize("size", [1, 17, 255, 256, 257, 1000])
def test_draws_are_those_of_the_arrays(library, size):
    generator = torch.Generator().manual_seed(size)
    weights_RV = torch.rand(5, size, generator=generator) ** 4 * (torch.rand(5, size, generator=generator) < 0.5)
    weights_RV[3] = 0.0
    uniforms_RK = torch.rand(5, 40, generator=generator, dtype=torch.float64)
    uniforms_RK[:, 0], uniforms_RK[:, 1] = 0.0, 1 - 2**-53
    found_RK, expected_RK = draw(library, weights_RV, uniforms_RK), _BlockedWeights(weights_RV.double()).draw(uniforms_RK)
    assert torch.equal(found_RK, expected_RK)
    assert (found_RK[3] == NO_TOKEN).all()


def test_largest_weights_in_order(library):
    generator = torch.Generator().manual_seed(1)
    for size, count in ((1, 1), (5, 5), (64, 3), (65, 64), (1000, 16), (16384, 33)):
        weights_RV = torch.randint(50 if size < 100 else 10**6, (4, size), generator=generator).float()
        value_RK, token_RK = largest_weights(library, weights_RV, count)
        order_RV = (-weights_RV.numpy()).argsort(1, kind="stable")[:, :count]
        assert np.array_equal(token_RK, order_RV)
        assert np.array_equal(value_RK, np.take_along_axis(weights_RV.numpy(), order_RV, 1))
    weights_RV[2, 7] = torch.nan
    assert largest_weights(library, weights_RV, 3) is None
