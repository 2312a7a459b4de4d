"""Blocks on NVIDIA GPUs: pages of physical memory, mapped where a row's next slots are to be.

Kernels see one tensor whose addresses never change, so that captured passes stay valid, and bits are those of any other memory.
Slots of a row follow each other with all that they hold of all layers, so that a page is a piece of one text.
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
"""Bytes: the least that these GPUs map."""
_OUT_OF_MEMORY = 2
_SUPPORTS_VIRTUAL_MEMORY = 102
"""Number of a device attribute."""


def open_blocks(pool: Pool, keys_BHTC: Tensor, values_BHTC: Tensor, layers: int, rows: int, slots: int) -> Blocks:
    """Return room for keys and values like these, with no memory behind it but that of a first block."""
    kind = HostBlocks if is_host(keys_BHTC.device) else DeviceBlocks
    return kind(pool, keys_BHTC, values_BHTC, layers, rows, slots)


def maps_memory(device: torch.device) -> bool:
    """Whether memory can be had by blocks there."""
    if is_host(device):
        return True
    if not captures(device) or torch.version.hip is not None:
        return False
    wait_for(device)  # until torch has set the driver up, this knows no device
    found = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(found), _SUPPORTS_VIRTUAL_MEMORY, _number(device))
    return bool(found.value)


class DeviceBlocks(Blocks):
    """Pages of a GPU.

    Mapping a page takes as long as computing a third of a token, so rows keep pages that they need no more until others need
    them: the next text in the row finds them there.
    """

    def __init__(self, pool: Pool, keys_BHTC: Tensor, values_BHTC: Tensor, layers: int, rows: int, slots: int) -> None:
        _, heads, _, channels = keys_BHTC.shape
        assert values_BHTC.shape == keys_BHTC.shape, "keys and values lie side by side"
        slot = 2 * layers * heads * channels
        slot_bytes = slot * keys_BHTC.element_size()
        super().__init__(pool, rows, slots, slot_bytes, _PAGE)
        self._row_pages = -(-slots * slot_bytes // _PAGE)
        self._mapped = [0] * rows
        """Pages that each row has, needed or not."""
        pool.spare = pool.spare or _Spare(keys_BHTC.device)
        self._spare: _Spare = pool.spare
        self._spare.owners.add(self)
        self._addresses = _Addresses(self._spare, rows * self._row_pages)
        self._bytes_X: Tensor | None = None
        if not self.hold(0, 1):  # torch asks the driver whose the first byte is
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
            # Masked slots still meet 0 * value, and what was left here by others may not be numbers.
            self._bytes_X[(first + start) * _PAGE : (first + stop) * _PAGE].zero_()
        return True

    def _give(self, row: int, start: int, stop: int) -> None:
        """Keep them until others ask."""

    def surrender(self, count: int) -> list[int]:
        """Return up to so many pages that rows have and do not need."""
        found = list[int]()
        for row, (mapped, needed) in enumerate(zip(self._mapped, self._blocks, strict=True)):
            stay = max(mapped - (count - len(found)), needed)
            if stay < mapped:
                wait_for(self._spare.device)  # rounds under way may still write there
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
    """Pages that no row has, and how to come by more."""

    def __init__(self, device: torch.device) -> None:
        wait_for(device)  # from here on the driver knows which device is meant
        self.device, self.number = device, _number(device)
        self.owners: WeakSet[DeviceBlocks] = WeakSet()
        self.handles: list[int] = []
        self._made = 0
        """Pages that there are, here or with owners."""

    def take(self, count: int, most: int) -> list[int] | None:
        """Return so many pages, of which there are never more than `most`; None if the device has no more."""
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
    """Addresses for pages, and which pages are there. They last as long as any tensor that shows them."""

    def __init__(self, spare: _Spare, pages: int) -> None:
        self._spare, self._nbytes = spare, pages * _PAGE
        self._handles: dict[int, int] = {}
        """By place."""
        start = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(start), self._nbytes, _PAGE, 0, 0)
        self._start = start.value

    def tensor(self) -> Tensor:
        """Return all of them as bytes."""
        return torch.as_tensor(self, device=self._spare.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch makes a tensor of."""
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._start, False), "version": 3}

    def put(self, start: int, handles: Sequence[int]) -> None:
        """Put some pages side by side, from a place on."""
        if not handles:
            return
        for place, handle in enumerate(handles, start=start):
            _call("cuMemMap", self._at(place), _PAGE, 0, handle, 0)
            self._handles[place] = handle
        access = _Access(_Location(1, self._spare.number), 3)
        _call("cuMemSetAccess", self._at(start), len(handles) * _PAGE, ctypes.byref(access), 1)

    def empty(self, start: int, stop: int) -> list[int]:
        """Take the pages away from these places, and return them."""
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
    """Call the CUDA driver, to which sizes, addresses and handles are 64 bits wide; return whether there was memory."""
    code = getattr(_driver(), name)(*(ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments))
    if code not in (0, _OUT_OF_MEMORY):
        raise FailureError(f"the GPU's driver refused {name} (error {code}); please report this")
    return bool(code == 0)
