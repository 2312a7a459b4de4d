"""Memory by blocks on a GPU: pages come and go under addresses that captured rounds keep, and texts are the same to the bit."""

import gc

import pytest
import torch

from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Engine, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.models.blocks import Pool
from polydraft.models.device_blocks import DeviceBlocks, maps_memory
from polydraft.models.hf import HFModel
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.trees import parse_tree

from .test_prefixes import STEM, finish
from .test_round import head_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PAGE = 2**21
LAYERS, ROWS, HEADS, SLOTS, CHANNELS = 4, 3, 2, 5000, 64
SLOT = 2 * LAYERS * HEADS * CHANNELS * 2
LONGEST = 300


def opened(pool: Pool) -> DeviceBlocks:
    like_BHTC = torch.empty(ROWS, HEADS, 0, CHANNELS, dtype=torch.bfloat16, device="cuda")
    return DeviceBlocks(pool, like_BHTC, like_BHTC, LAYERS, ROWS, SLOTS)


def fill(held: DeviceBlocks, row: int, slots: int) -> torch.Tensor:
    """Write numbers into the first slots of a row, and return them."""
    numbers_2LHSC = torch.randn(2, LAYERS, HEADS, slots, CHANNELS, dtype=torch.bfloat16, device="cuda")
    for stored_LBHSC, own_LHSC in zip(held.stored, numbers_2LHSC, strict=True):
        stored_LBHSC[:, row, :, :slots] = own_LHSC
    return numbers_2LHSC


def read(held: DeviceBlocks, row: int, slots: int) -> torch.Tensor:
    return torch.stack([stored_LBHSC[:, row, :, :slots] for stored_LBHSC in held.stored])


def test_pages_come_and_go() -> None:
    assert maps_memory(torch.device("cuda"))
    pool = Pool(9 * PAGE)
    held = opened(pool)
    per_page = PAGE // SLOT
    assert pool.used == PAGE and held.slots(0) == per_page and held.row_bytes(per_page + 1) == 2 * PAGE
    assert held.hold(0, 2 * per_page) and held.hold(1, 10) and held.hold(2, SLOTS) and pool.used == held.nbytes
    own = [fill(held, row, slots) for row, slots in enumerate((2 * per_page, 10, SLOTS))]
    for row, numbers in enumerate(own):
        assert torch.equal(read(held, row, numbers.shape[3]), numbers)
    assert not held.hold(1, 4 * per_page) and held.slots(1) == per_page
    held.trim(2, 100)
    assert held.hold(1, 2 * per_page)
    assert not read(held, 1, 2 * per_page)[:, :, :, per_page + 5 :].any(), "what others left is wiped"
    assert torch.equal(read(held, 1, 10), own[1]) and torch.equal(read(held, 2, 100), own[2][:, :, :, :100])
    held.swap(1, 2)
    assert torch.equal(read(held, 2, 10), own[1]) and torch.equal(read(held, 1, 100), own[2][:, :, :, :100])
    assert held.slots(2) == 2 * per_page and held.slots(1) == per_page and torch.equal(read(held, 0, 2 * per_page), own[0])


def test_a_gpu_gives_only_what_rows_hold() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 2**32, dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    pool = Pool(10**12)
    like_BHTC = torch.empty(64, 8, 0, 128, dtype=torch.bfloat16, device="cuda")
    held = DeviceBlocks(pool, like_BHTC, like_BHTC, 32, 64, 2**16)
    assert sum(stored.nbytes for stored in held.stored[:1]) > free, "addresses for more than there is"
    assert held.hold(5, 4096)
    assert 0.9 * pool.used < free - torch.cuda.mem_get_info()[0] < 1.5 * pool.used + 2**26
    held.stored[0][31, 5, 7, 4095] = 1.0
    assert held.stored[0][31, 5, 7, 4095].sum().item() == 128
    assert not held.hold(6, 2**16), "more than there is"
    assert held.slots(6) == 0 and pool.size == pool.used == held.nbytes, "and the pool knows"
    del held, pool
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - 2**26 and len(ballast) > 0


def test_captured_work_sees_pages_that_came_later() -> None:
    pool = Pool(10**9)
    held = opened(pool)
    keys_LBHSC, per_page = held.stored[0], PAGE // SLOT
    place = torch.zeros(1, dtype=torch.long, device="cuda")
    out = torch.zeros(LAYERS, HEADS, 1, CHANNELS, dtype=torch.bfloat16, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out.copy_(keys_LBHSC[:, 0].index_select(2, place))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.copy_(keys_LBHSC[:, 0].index_select(2, place))
    for slots in (2 * per_page, 4 * per_page):
        assert held.hold(0, slots)
        keys_LBHSC[:, 0, :, slots - 1] = slots / 64
        place.fill_(slots - 1)
        graph.replay()
        assert (out == slots / 64).all()
    assert held.hold(1, 10)
    fill(held, 1, 10)
    held.swap(0, 1)
    place.fill_(7)
    graph.replay()
    assert torch.equal(out, keys_LBHSC[:, 0, :, 7:8])


def wide(kind: str) -> Decoder:
    """Make a decoder whose texts take a page for every sixteen tokens."""
    sizes = {"num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    target = HFModel(FAMILIES.get("llama").build(max_position_embeddings=512, **sizes).to("cuda"), invariant=True)
    if kind == "none":
        return Decoder(target)
    drafter = head_tree(target, parse_tree("3x1")) if kind == "head" else TreeDrafter(target, parse_tree("1x1x1"))
    return Decoder(target, drafter)


def engine_of(decoder: Decoder, slots: int, pool: Pool | None, prefixes: Prefixes | None) -> Engine:
    params = RowParams((IDLE,) * slots)
    workspace = Workspace(decoder.target, decoder.drafter, params, True, True, pool)
    workspace.reserve(LONGEST)
    return Engine(workspace, elastic=True, chunk=96, prefixes=prefixes, isolate=True)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("kind", ["none", "model", "head"])
def test_texts_are_the_same_to_the_bit_however_little_memory_there_is(kind: str, shares: bool) -> None:
    decoder = wide(kind)
    drawn = SamplingParams(temperature=0.8)
    prompts = [[*STEM[: 3 + 11 * number], 3 + number, 5] for number in range(12)]

    def texts() -> list[TokenSequence]:
        limits = [200 - 9 * row for row in range(len(prompts))]
        return [
            decoder.sequence(
                prompt, [SamplingParams(temperature=0), drawn][row % 2], seed=row, max_new_tokens=limits[row],
                row=row,
            )
            for row, prompt in enumerate(prompts)
        ]  # fmt: skip

    wanted, found = texts(), texts()
    finish(engine_of(decoder, 6, None, None), wanted)
    pool = Pool(10**10)
    engine = engine_of(decoder, 6, pool, Prefixes(2**28) if shares else None)
    assert engine.workspace.memory.context.lent and pool.used > 0
    idle, one_text = pool.used, engine.workspace.room(LONGEST, 2)
    pool.size, pool.least = idle + one_text * 3 // 2, idle + one_text
    finish(engine, found)
    assert pool.evictions and engine.stats.replayed_rounds > 0 and engine.stats.rounds_ahead > 0 and pool.used == idle
    assert [one.new_tokens for one in found] == [one.new_tokens for one in wanted]
