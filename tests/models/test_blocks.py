"""Memory by blocks: rows hold what they need of a pool, and what they hold is theirs."""

import itertools
import random

import pytest
import torch

from polydraft.models import blocks
from polydraft.models.blocks import HostBlocks, Pool
from polydraft.models.cache import SlotCache

LAYERS, ROWS, HEADS, SLOTS, CHANNELS = 3, 4, 2, 200, 8
BLOCK = 32 * LAYERS * 2 * HEADS * CHANNELS * 4


def opened(pool: Pool) -> HostBlocks:
    like_BHTC = torch.empty(ROWS, HEADS, 0, CHANNELS)
    return HostBlocks(pool, like_BHTC, like_BHTC, LAYERS, ROWS, SLOTS)


def test_rows_take_blocks_as_they_grow_and_give_them_back() -> None:
    pool = Pool(12 * BLOCK)
    held = opened(pool)
    assert pool.used == held.nbytes == 0 and held.row_bytes(33) == 2 * BLOCK and held.slots(0) == 0
    assert held.hold(0, 1) and held.hold(0, 32) and held.slots(0) == 32 and pool.used == BLOCK
    assert held.hold(1, 100) and pool.used == 5 * BLOCK
    assert held.hold(2, 10**6) and held.slots(2) == SLOTS, "no more than there are"
    assert pool.free == 0 and not held.hold(3, 1)
    held.trim(2, 1)
    assert held.hold(3, 64) and pool.used == held.nbytes == 8 * BLOCK
    held.trim(3, 64)
    held.trim(0, 10**6)
    assert pool.used == 8 * BLOCK, "there was nothing to give back"
    del held
    assert pool.used == 0, "whoever goes leaves nothing behind"


def test_a_row_that_finds_too_little_takes_nothing() -> None:
    pool = Pool(3 * BLOCK)
    held = opened(pool)
    assert held.hold(0, 40) and not held.hold(1, 64) and held.slots(1) == 0 and pool.used == 2 * BLOCK
    assert held.hold(1, 20) and not held.hold(0, 65) and held.slots(0) == 64


def test_what_was_given_back_comes_back_as_zeros() -> None:
    held = opened(Pool(10**9))
    assert held.hold(1, SLOTS)
    for stored in held.stored:
        stored[:, 1] = 7
        stored[:, 2, :, 0] = 5
    held.trim(1, 32)
    for stored in held.stored:
        assert (stored[:, 1, :, :32] == 7).all() and (stored[:, 2, :, 0] == 5).all()
        assert not stored[:, 1].isnan().any()


@pytest.mark.parametrize("at_once", [1, 2**24])
def test_rows_trade_places_with_all_that_they_hold(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SWAPPED_NUMBERS", at_once)
    pool, chance = Pool(10**9), random.Random(1)
    held, texts = opened(pool), [torch.empty(0)] * ROWS
    for row in range(ROWS):
        length = chance.randrange(1, SLOTS)
        assert held.hold(row, length)
        texts[row] = torch.rand(2, LAYERS, HEADS, length, CHANNELS)
        for stored, own in zip(held.stored, texts[row], strict=True):
            stored[:, row, :, :length] = own
    used = pool.used
    for first, second in itertools.islice(itertools.cycle(itertools.permutations(range(ROWS), 2)), 30):
        held.swap(first, second)
        texts[first], texts[second] = texts[second], texts[first]
        for row, text in enumerate(texts):
            assert held.slots(row) >= text.shape[3]
            for stored, own in zip(held.stored, text, strict=True):
                assert torch.equal(stored[:, row, :, : text.shape[3]], own)
    assert pool.used == used == held.nbytes


def test_a_pool_that_shrinks_says_so_where_no_text_could_end() -> None:
    pool = Pool(10 * BLOCK)
    assert pool.take(4 * BLOCK)
    pool.least = 3 * BLOCK
    pool.shrink()
    assert pool.size == 4 * BLOCK and pool.free == 0 and not pool.take(1)
    pool.least = 5 * BLOCK
    with pytest.raises(torch.OutOfMemoryError, match="one text"):
        pool.shrink()


def test_a_cache_lent_a_pool_has_memory_for_what_rows_hold() -> None:
    pool, like_B = Pool(10**9), torch.empty(ROWS)
    cache = SlotCache(LAYERS, SLOTS)
    cache.pool = pool
    assert cache.hold(0, 100) and cache.row_bytes(100) == 0, "nobody knows yet what that takes"
    keys_LBHSC, _ = cache.held(like_B, HEADS, CHANNELS)
    assert keys_LBHSC.shape == (LAYERS, ROWS, HEADS, SLOTS, CHANNELS) and cache.nbytes == 0
    assert cache.hold(1, 100) and cache.nbytes == pool.used == cache.row_bytes(100) == 4 * BLOCK
    keys_LBHSC[:, 1, :, :100] = torch.nan
    cache.clear(1)
    assert not keys_LBHSC.isnan().any()
    other = SlotCache(LAYERS, SLOTS)
    assert not other.adopt(cache, ROWS), "it has no pool"
    other.pool = pool
    assert other.adopt(cache, ROWS) and other.address == cache.address and other.nbytes == 4 * BLOCK
    other.trim(1, 0)
    assert pool.used == 0
