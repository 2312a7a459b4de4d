"""Slots: writes where told, moves within rows, and not one byte more than context and tree need."""

import random

import pytest
import torch

from polydraft.errors import FailureError
from polydraft.models import TabularModel, blocks
from polydraft.models.cache import SlotCache
from polydraft.trees import Block, causal_block, parse_tree

LAYERS, BATCH, HEADS, CHANNELS = 2, 3, 2, 4


def states(size, seed, channels=CHANNELS):
    return torch.randn(BATCH, HEADS, size, channels, generator=torch.Generator().manual_seed(seed))


def slots(starts, size):
    return torch.tensor(starts)[:, None] + torch.arange(size)


def test_ragged_writes_land_in_each_rows_own_slots():
    cache = SlotCache(LAYERS, capacity=10)
    starts, keys, values = [0, 4, 2], states(3, 1), states(3, 2)
    cache.aim(slots(starts, 3), None, used=7)
    seen_keys, seen_values = cache.update(keys, values, 1)
    assert seen_keys.shape == (BATCH, HEADS, 7, CHANNELS)
    for row, start in enumerate(starts):
        assert torch.equal(seen_keys[row, :, start : start + 3], keys[row])
        assert torch.equal(seen_values[row, :, start : start + 3], values[row])
        untouched = [slot for slot in range(7) if not start <= slot < start + 3]
        assert (seen_keys[row, :, untouched] == 0).all()
    assert (cache.keys_LBHSC[0] == 0).all(), "the other layer is untouched"


def test_contiguous_and_scattered_writes_agree():
    scattered, contiguous = SlotCache(LAYERS, 8), SlotCache(LAYERS, 8)
    scattered.aim(slots([2, 2, 2], 4), None, used=6)
    contiguous.aim(slots([2, 2, 2], 4), 2, used=6)
    for layer in range(LAYERS):
        for one, other in zip(
            scattered.update(states(4, layer), states(4, 9), layer),
            contiguous.update(states(4, layer), states(4, 9), layer),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_attention_gets_a_view_not_a_copy():
    cache = SlotCache(LAYERS, 8)
    cache.aim(slots([0, 0, 0], 3), 0, used=3)
    keys, values = cache.update(states(3, 1), states(3, 2), 0)
    assert keys.data_ptr() == cache.keys_LBHSC.data_ptr()
    assert values.data_ptr() == cache.values_LBHSC.data_ptr()


def test_moves_happen_within_rows_in_all_layers_at_once():
    cache = SlotCache(LAYERS, 9)
    cache.aim(slots([0, 0, 0], 9), 0, used=9)
    for layer in range(LAYERS):
        cache.update(states(9, layer), states(9, 10 + layer), layer)
    before_keys, before_values = cache.keys_LBHSC.clone(), cache.values_LBHSC.clone()
    # Overlapping on purpose: a target slot of one move is the source of another.
    source, target = torch.tensor([[2, 5, 8], [3, 3, 3], [1, 4, 6]]), torch.tensor([[1, 2, 3], [3, 4, 5], [4, 5, 6]])
    cache.move(source, target)
    for row in range(BATCH):
        assert torch.equal(cache.keys_LBHSC[:, row, :, target[row]], before_keys[:, row, :, source[row]])
        assert torch.equal(cache.values_LBHSC[:, row, :, target[row]], before_values[:, row, :, source[row]])
        kept = [slot for slot in range(9) if slot not in target[row]]
        assert torch.equal(cache.keys_LBHSC[:, row, :, kept], before_keys[:, row, :, kept])


def test_growing_keeps_what_is_stored():
    cache = SlotCache(LAYERS, 4)
    cache.aim(slots([0, 0, 0], 4), 0, used=4)
    cache.update(states(4, 1), states(4, 2), 0)
    before = cache.keys_LBHSC.clone()
    cache.grow(11)
    assert cache.capacity == 11 and cache.keys_LBHSC.shape[3] == 11
    assert torch.equal(cache.keys_LBHSC[:, :, :, :4], before)
    assert (cache.keys_LBHSC[:, :, :, 4:] == 0).all()


def test_sizes_that_transformers_asks_for():
    cache = SlotCache(LAYERS, 12)
    assert cache.nbytes == 0 and len(cache) == LAYERS
    cache.aim(slots([5, 5, 5], 3), 5, used=8)
    assert cache.get_seq_length() == cache.get_query_offset() == 5
    assert cache.get_mask_sizes(3) == (8, 0)


def test_layers_of_different_shapes_are_refused():
    cache = SlotCache(LAYERS, 4)
    cache.aim(slots([0, 0, 0], 2), 0, used=2)
    cache.update(states(2, 1), states(2, 2), 0)
    with pytest.raises(FailureError, match="different shapes"):
        cache.update(states(2, 1, channels=6), states(2, 2, channels=6), 1)


@torch.inference_mode()
def test_memory_is_context_plus_tree_and_no_copy_a_candidate(tiny):
    """Keys and values of 24 candidates behind one text cost 24 slots, not 24 texts."""
    model, topology = tiny("llama"), parse_tree("8x2")
    context = model.start(2, capacity=40 + topology.num_nodes)
    rng = random.Random(0)
    context.prefill([[rng.randrange(96) for _ in range(40)] for _ in range(2)])
    config = model.config
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4
    expected = 2 * (40 + topology.num_nodes) * slot
    assert context.cache.nbytes == expected
    tables = topology.tables(torch.device("cpu"))
    block = Block(0, tables.depths_N.expand(2, -1), tables.ancestors_NN.expand(2, -1, -1))
    storage = context.cache.keys_LBHSC.data_ptr()
    for _ in range(3):
        context.extend(torch.randint(96, (2, topology.num_nodes)), block)
        context.commit(torch.tensor([[0], [0]]), torch.tensor([0, 0]))
    assert context.cache.nbytes == expected
    assert context.cache.keys_LBHSC.data_ptr() == storage, "rounds write in place"


def test_overflow_is_caught_before_it_writes():
    model = TabularModel.random(5, 1, seed=0)
    context = model.start(1, capacity=4)
    with pytest.raises(AssertionError), torch.inference_mode():
        context.extend(torch.tensor([[1, 2, 3, 4, 0]]), causal_block(1, 5, torch.device("cpu")))


@pytest.mark.parametrize("at_once", [1, 10**9])
def test_rows_change_places_and_come_back(at_once, monkeypatch):
    """One of them may be out of use; a few layers at a time, if texts are long."""
    monkeypatch.setattr(blocks, "SWAPPED_NUMBERS", at_once)
    cache = SlotCache(LAYERS, capacity=6)
    keys, values = states(4, 1), states(4, 2)
    cache.aim(slots([0, 0, 0], 4), 0, used=4)
    for layer in range(LAYERS):
        cache.update(keys, values, layer)
    address, whole = cache.address, cache.nbytes
    cache.resize(2, BATCH)
    assert cache.keys_LBHSC.shape[1] == 2 and cache.nbytes == whole
    cache.swap_rows(0, 2, used=3)
    cache.resize(3, BATCH)
    cache.grow(9)
    assert cache.keys_LBHSC.shape == (LAYERS, BATCH, HEADS, 9, CHANNELS) and address
    for layer in range(LAYERS):
        for stored, new in ((cache.keys_LBHSC, keys), (cache.values_LBHSC, values)):
            assert torch.equal(stored[layer, [0, 1, 2], :, :3], new[[2, 1, 0], :, :3])
            assert torch.equal(stored[layer, :, :, 3], new[:, :, 3]), "what is not in use stays"


def test_storage_is_made_for_all_rows_there_may_be():
    cache = SlotCache(LAYERS, capacity=5)
    cache.resize(BATCH, 8)
    cache.aim(slots([0, 0, 0], 2), 0, used=2)
    cache.update(states(2, 1), states(2, 2), 0)
    address = cache.address
    cache.resize(8, 8)
    assert cache.address == address and cache.keys_LBHSC.shape[1] == 8
