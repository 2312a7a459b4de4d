"""Blocks on NVIDIA GPUs: pages of physical memory, mapped to the addresses of a row's next slots.

Kernels see one tensor whose addresses never change, so captured passes stay valid, and results have the same bits as with any
other memory. A slot holds its keys and values of all layers, and a row's slots are adjacent, so a page belongs to one text.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from polydraft.devices import captures, is_host, wait_for
from polydraft.errors import FailureError
from polydraft.models.blocks import Blocks, HostBlocks, Pool

_PAGE = 2**21
"""Bytes of the smallest piece of memory that these GPUs map."""
_OUT_OF_MEMORY = 2
_SUPPORTS_VIRTUAL_MEMORY = 102
"""The driver's number for this device attribute."""


def open_blocks(pool: Pool, keys_BHTC: Tensor, values_BHTC: Tensor, layers: int, rows: int, slots: int) -> Blocks:
    """Return blocks for keys and values like these, without memory except for a first block on a GPU."""
    kind = HostBlocks if is_host(keys_BHTC.device) else DeviceBlocks
    return kind(pool, keys_BHTC, values_BHTC, layers, rows, slots)


def maps_memory(device: torch.device) -> bool:
    """Whether memory can be taken by blocks on this device."""
    if is_host(device):
        return True
    if not captures(device) or torch.version.hip is not None:
        return False
    wait_for(device)  # the driver knows no device before torch has initialised it
    found = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(found), _SUPPORTS_VIRTUAL_MEMORY, _number(device))
    return bool(found.value)


class DeviceBlocks(Blocks):
    """Pages of a GPU.

    Mapping a page takes as long as computing a third of a token, so rows keep pages they no longer need until others need them:
    the next text in the row reuses them.
    """

    def __init__(self, pool: Pool, keys_BHTC: Tensor, values_BHTC: Tensor, layers: int, rows: int, slots: int) -> None:
        _, heads, _, channels = keys_BHTC.shape
        assert values_BHTC.shape == keys_BHTC.shape, "keys and values alternate in memory"
        slot = 2 * layers * heads * channels
        slot_bytes = slot * keys_BHTC.element_size()
        super().__init__(pool, rows, slots, slot_bytes, _PAGE)
        self._row_pages = -(-slots * slot_bytes // _PAGE)
        self._mapped = [0] * rows
        """Mapped pages of each row, needed or not."""
        pool.spare = pool.spare or _Spare(keys_BHTC.device)
        self._spare: _Spare = pool.spare
        self._spare.owners.add(self)
        self._addresses = _Addresses(self._spare, rows * self._row_pages)
        self._bytes_X: Tensor | None = None
        if not self.hold(0, 1):  # mapped first, because torch asks the driver which device owns the first byte
            raise torch.OutOfMemoryError("too little GPU memory for keys and values")
        self._bytes_X = self._addresses.tensor()
        self._bytes_X[:_PAGE].zero_()
        numbers_X = self._bytes_X.view(keys_BHTC.dtype)
        shape = (layers, rows, heads, slots, channels)
        strides = (2 * heads * channels, self._row_pages * _PAGE // keys_BHTC.element_size(), channels, slot, 1)
        self.stored = numbers_X.as_strided(shape, strides), numbers_X.as_strided(shape, strides, heads * channels)

    def _take(self, row: int, start: int, stop: int) -> bool:
        start, first = self._mapped[row], row * self._row_pages
        if stop <= start:
            return True
        handles = self._spare.take(stop - start, self.pool.size // _PAGE)
        if handles is None:
            return False
        self._addresses.put(first + start, handles)
        self._mapped[row] = stop
        if self._bytes_X is not None:
            # Masked slots are still multiplied by 0, and recycled pages may hold NaNs.
            self._bytes_X[(first + start) * _PAGE : (first + stop) * _PAGE].zero_()
        return True

    def _give(self, row: int, start: int, stop: int) -> None:
        """Keep the pages until `surrender`."""

    def surrender(self, count: int) -> list[int]:
        """Unmap and return up to `count` pages that rows have but do not need."""
        found = list[int]()
        for row, (mapped, needed) in enumerate(zip(self._mapped, self._blocks, strict=True)):
            stay = max(mapped - (count - len(found)), needed)
            if stay < mapped:
                wait_for(self._spare.device)  # rounds in flight may still write there
                first = row * self._row_pages
                found += self._addresses.empty(first + stay, first + mapped)
                self._mapped[row] = stay
        return found

    def _swap(self, first: int, second: int) -> None:
        wait_for(self._spare.device)
        places = [(row * self._row_pages, self._mapped[row]) for row in (first, second)]
        pages = [self._addresses.empty(start, start + count) for start, count in places]
        for (start, _), handles in zip(places, reversed(pages), strict=True):
            self._addresses.put(start, handles)
        self._mapped[first], self._mapped[second] = self._mapped[second], self._mapped[first]


class _Spare:
    """Unused pages, and where to get more."""

    def __init__(self, device: torch.device) -> None:
        wait_for(device)  # initialises the driver
        self.device, self.number = device, _number(device)
        self.owners: WeakSet[DeviceBlocks] = WeakSet()
        self.handles: list[int] = []
        self._made = 0
        """Pages created so far, unused or mapped."""

    def take(self, count: int, most: int) -> list[int] | None:
        """Return `count` pages, creating up to `most` in all; None if the device has no more."""
        while len(self.handles) < count and self._made < most and self._make():
            pass
        for owner in self.owners:
            if (missing := count - len(self.handles)) > 0:
                self.handles += owner.surrender(missing)
        if len(self.handles) < count:
            return None
        taken, self.handles = self.handles[:count], self.handles[count:]
        return taken

    def _make(self) -> bool:
        handle = ctypes.c_uint64()
        properties = _Properties(type=1, location=_Location(1, self.number))
        if not _call("cuMemCreate", ctypes.byref(handle), _PAGE, ctypes.byref(properties), 0):
            return False
        self.handles.append(handle.value)
        self._made += 1
        return True

    def __del__(self) -> None:
        for handle in [] if sys.is_finalizing() else self.handles:
            _call("cuMemRelease", handle)


class _Addresses:
    """A range of addresses, and the pages mapped there; it lives as long as any tensor over it."""

    def __init__(self, spare: _Spare, pages: int) -> None:
        self._spare, self._nbytes = spare, pages * _PAGE
        self._handles: dict[int, int] = {}
        """Mapped pages, by place."""
        start = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(start), self._nbytes, _PAGE, 0, 0)
        self._start = start.value

    def tensor(self) -> Tensor:
        """Return the whole range as bytes."""
        return torch.as_tensor(self, device=self._spare.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Description of the range, from which torch makes a tensor."""
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._start, False), "version": 3}

    def put(self, start: int, handles: Sequence[int]) -> None:
        """Map pages next to each other, from place `start` on."""
        if not handles:
            return
        for place, handle in enumerate(handles, start=start):
            _call("cuMemMap", self._at(place), _PAGE, 0, handle, 0)
            self._handles[place] = handle
        access = _Access(_Location(1, self._spare.number), 3)
        _call("cuMemSetAccess", self._at(start), len(handles) * _PAGE, ctypes.byref(access), 1)

    def empty(self, start: int, stop: int) -> list[int]:
        """Unmap the pages at these places, and return them."""
        for place in range(start, stop):
            _call("cuMemUnmap", self._at(place), _PAGE)
        return [self._handles.pop(place) for place in range(start, stop)]

    def _at(self, place: int) -> int:
        return self._start + place * _PAGE

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        wait_for(self._spare.device)
        for place in list(self._handles):
            self._spare.handles += self.empty(place, place + 1)
        _call("cuMemAddressFree", self._at(0), self._nbytes)


class _Location(ctypes.Structure):
    """The driver's CUmemLocation; type 1 is a device."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The driver's CUmemAllocationProp; type 1 is pinned memory."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """The driver's CUmemAccessDesc; flags 3 are for reading and writing."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> bool:
    """Call the CUDA driver, passing all numbers as 64 bits; return whether there was enough memory."""
    code = getattr(_driver(), name)(*(ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments))
    if code not in (0, _OUT_OF_MEMORY):
        raise FailureError(f"the GPU's driver refused {name} (error {code}); please report this")
    return bool(code == 0)
