"""The table model: its passes, trees included, say what the table says."""

import random

import pytest
import torch

from polydraft.models import TabularModel
from polydraft.trees import Block, Topology, causal_block

CPU = torch.device("cpu")


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_sequence_reads_the_table(order):
    model = TabularModel.random(6, order, seed=order)
    text = [5, 2, 2, 4, 1, 3, 0, 5]
    context = model.start(1, 8)
    features = context.extend(torch.tensor([text]), causal_block(1, 8, CPU))[0]
    for length in range(1, 9):
        assert torch.equal(model.head(features)[length - 1], model.logits_after(text[:length]))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_trees_read_the_table_after_ragged_commits(order):
    rng = random.Random(order)
    model = TabularModel.random(7, order, seed=order)
    texts = [[rng.randrange(7) for _ in range(length)] for length in (2, 6, 4)]
    context = model.start(3, capacity=60)
    context.prefill([text[:-1] for text in texts])
    for _ in range(3):
        topology = Topology((0, *sorted(rng.randrange(node) for node in range(1, 8))))
        tables = topology.tables(CPU)
        tokens = [[text[-1], *[rng.randrange(7) for _ in range(7)]] for text in texts]
        block = Block(0, tables.depths_N.expand(3, -1), tables.ancestors_NN.expand(3, -1, -1))
        logits = model.head(context.extend(torch.tensor(tokens), block))
        for row, text in enumerate(texts):
            for node in range(8):
                path = [tokens[row][other] for other in tables.ancestors_NN[node].nonzero()[:, 0].tolist()]
                assert torch.equal(logits[row, node], model.logits_after(text[:-1] + path))
        leaf = tables.ancestors_NN[7].nonzero()[:, 0]
        context.commit(leaf.expand(3, -1), torch.full((3,), len(leaf) - 1))
        texts = [text[:-1] + [tokens[row][node] for node in leaf.tolist()] for row, text in enumerate(texts)]
        context.settle([len(text) - 1 for text in texts])


def test_text_before_the_beginning_is_token_zero():
    model = TabularModel.random(4, 2, seed=0)
    assert torch.equal(model.logits_after([3]), model.logits_after([0, 3]))


def test_mixing_blends_logits():
    one, other = TabularModel.random(5, 1, seed=0), TabularModel.random(5, 1, seed=1)
    mixed = one.mixed_with(other, 0.75)
    expected = 0.75 * one.logits_after([2]) + 0.25 * other.logits_after([2])
    assert torch.allclose(mixed.logits_after([2]), expected)
    assert mixed.order == 1 and mixed.vocab_size == 5


def test_random_tables_are_reproducible_and_far_from_uniform():
    model = TabularModel.random(32, 1, seed=3)
    assert torch.equal(model.logits_after([1]), TabularModel.random(32, 1, seed=3).logits_after([1]))
    entropies = [torch.distributions.Categorical(logits=model.logits_after([token])).entropy() for token in range(32)]
    assert 1.5 < sum(entropies) / 32 < 2.9


def test_growing_keeps_the_text():
    model = TabularModel.random(6, 3, seed=5)
    context = model.start(1, capacity=4)
    context.prefill([[1, 2, 3]])
    context.reserve(9)
    logits = model.head(context.extend(torch.tensor([[4]]), causal_block(1, 1, CPU)))[0, 0]
    assert torch.equal(logits, model.logits_after([1, 2, 3, 4]))
