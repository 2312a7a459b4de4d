"""Pages of a GPU, with a driver that is made up: what is mapped where, and that rows keep what nobody else needs."""

import random
from typing import Any

import pytest
import torch

from polydraft.models import device_blocks
from polydraft.models.blocks import Pool
from polydraft.models.device_blocks import DeviceBlocks

PAGE, START = 4096, 2**40
LAYERS, ROWS, HEADS, SLOTS, CHANNELS = 2, 4, 2, 60, 8
SLOT = 2 * LAYERS * HEADS * CHANNELS * 4
PER_PAGE = PAGE // SLOT


class Driver:
    """Physical pages that are seen at addresses; what is seen where there is none is not a number."""

    def __init__(self, pages: int) -> None:
        self.left, self.made, self.calls = pages, 0, dict[str, int]()
        self.contents: dict[int, torch.Tensor] = {}
        self.mapped: dict[int, int] = {}
        self.open: set[int] = set()
        self.memory_X = torch.empty(0)

    def __call__(self, name: str, *arguments: Any) -> bool:
        self.calls[name] = self.calls.get(name, 0) + 1
        return bool(getattr(self, name)(*arguments) is not False)

    def cuMemAddressReserve(self, start: Any, nbytes: int, *rest: int) -> None:
        start._obj.value = START
        self.memory_X = torch.full((nbytes,), 255, dtype=torch.uint8)

    def cuMemCreate(self, handle: Any, nbytes: int, properties: Any, flags: int) -> bool:
        assert nbytes == PAGE and properties._obj.type == 1
        if not self.left:
            return False
        self.left, self.made = self.left - 1, self.made + 1
        handle._obj.value = self.made
        self.contents[self.made] = torch.full((PAGE,), 255, dtype=torch.uint8)
        return True

    def page(self, address: int) -> torch.Tensor:
        return self.memory_X[address - START : address - START + PAGE]

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert nbytes == PAGE and address not in self.mapped and handle not in self.mapped.values()
        self.mapped[address] = handle

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> None:
        assert count == 1 and access._obj.flags == 3
        for one in range(address, address + nbytes, PAGE):
            self.page(one).copy_(self.contents[self.mapped[one]])

    def cuMemUnmap(self, address: int, nbytes: int) -> None:
        self.contents[self.mapped.pop(address)] = self.page(address).clone()
        self.page(address).fill_(255)

    def cuMemRelease(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        del self.contents[handle]

    def cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert address == START and not self.mapped


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(pages=30)
    monkeypatch.setattr(device_blocks, "_PAGE", PAGE)
    monkeypatch.setattr(device_blocks, "_call", made)
    monkeypatch.setattr(device_blocks, "_number", lambda device: 0)
    monkeypatch.setattr(device_blocks._Addresses, "tensor", lambda self: made.memory_X)
    return made


def opened(pool: Pool) -> DeviceBlocks:
    like_BHTC = torch.empty(ROWS, HEADS, 0, CHANNELS)
    return DeviceBlocks(pool, like_BHTC, like_BHTC, LAYERS, ROWS, SLOTS)


def test_slots_of_a_row_follow_each_other_with_all_layers(driver: Driver) -> None:
    held = opened(Pool(10**9))
    assert held.hold(2, 40)
    keys_LBHSC, values_LBHSC = held.stored
    own = torch.rand(2, LAYERS, HEADS, 40, CHANNELS)
    keys_LBHSC[:, 2, :, :40], values_LBHSC[:, 2, :, :40] = own
    start = 2 * -(-SLOTS // PER_PAGE) * PAGE
    stream_SLX = driver.memory_X[start : start + 40 * SLOT].view(torch.float32).view(40, LAYERS, 2, HEADS, CHANNELS)
    assert torch.equal(stream_SLX.permute(2, 1, 3, 0, 4), own)


def test_a_row_keeps_its_pages_until_others_need_them(driver: Driver) -> None:
    pool = Pool(6 * PAGE)
    held = opened(pool)
    assert held.hold(0, 4 * PER_PAGE) and driver.made == 4
    held.trim(0, 1)
    assert pool.used == PAGE == held.nbytes and held.slots(0) == PER_PAGE
    assert held.hold(0, 3 * PER_PAGE) and "cuMemUnmap" not in driver.calls, "they were there"
    held.trim(0, 1)
    assert held.hold(1, 2 * PER_PAGE) and driver.made == 6
    assert held.hold(2, 3 * PER_PAGE) and driver.made == 6 and driver.calls["cuMemUnmap"] == 3
    assert not held.hold(0, 2 * PER_PAGE) and pool.used == 6 * PAGE


def test_who_goes_leaves_nothing_behind(driver: Driver) -> None:
    pool = Pool(9 * PAGE)
    held = opened(pool)
    assert held.hold(0, SLOTS) and held.hold(1, SLOTS)
    held.trim(0, 1)
    del held
    assert pool.used == 0 and not driver.mapped and len(driver.contents) == 8, "pages wait for others"
    del pool
    assert not driver.contents


def test_a_device_that_has_no_more_gives_back_first(driver: Driver) -> None:
    driver.left = 5
    pool = Pool(10**9)
    held = opened(pool)
    assert held.hold(0, 5 * PER_PAGE)
    held.trim(0, PER_PAGE)
    assert held.hold(1, 4 * PER_PAGE) and pool.size == 10**9
    assert not held.hold(2, 1) and pool.size == pool.used == 5 * PAGE, "from now on that is all there is"


def test_whatever_happens_rows_hold_their_own(driver: Driver) -> None:
    chance, pool = random.Random(7), Pool(9 * PAGE)
    held = opened(pool)
    texts: list[torch.Tensor] = [torch.empty(2, LAYERS, HEADS, 0, CHANNELS)] * ROWS
    dry = 0
    for _ in range(400):
        row, other = chance.sample(range(ROWS), 2)
        choice = chance.random()
        if choice < 0.5:
            length = min(texts[row].shape[3] + chance.randrange(1, 25), SLOTS)
            if held.hold(row, length):
                added = torch.rand(2, LAYERS, HEADS, length - texts[row].shape[3], CHANNELS)
                fresh = torch.stack([stored[:, row, :, texts[row].shape[3] : length] for stored in held.stored])
                assert not fresh.isnan().any(), "what is new is finite"
                texts[row] = torch.cat([texts[row], added], dim=3)
                for stored, own in zip(held.stored, texts[row], strict=True):
                    stored[:, row, :, :length] = own
            else:
                dry += 1
        elif choice < 0.75:
            length = chance.randrange(texts[row].shape[3] + 1)
            held.trim(row, length)
            texts[row] = texts[row][:, :, :, :length]
        else:
            held.swap(row, other)
            texts[row], texts[other] = texts[other], texts[row]
        for number, text in enumerate(texts):
            for stored, own in zip(held.stored, text, strict=True):
                assert torch.equal(stored[:, number, :, : own.shape[2]], own)
        assert pool.used == held.nbytes <= pool.size and len(driver.mapped) * PAGE <= pool.size
    assert dry > 20
