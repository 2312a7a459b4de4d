"""Memory that texts take block by block as they grow: a row has addresses for the longest text, and memory behind few of them.

See docs/decisions/064-memory-by-blocks-is-virtual-memory.md.
"""

import mmap
from abc import ABC, abstractmethod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from polydraft.rows import swap

_TOKENS = 32
"""Tokens per block on a host."""
SWAPPED_NUMBERS = 2**24
"""Most numbers that a swap of two rows copies aside at a time."""
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python's `mmap` does not name yet: the system reserves nothing for pages never written."""


class Pool:
    """A budget of bytes that texts share: the keys and values of several models and batches.

    Parameters
    ----------
    size : int
        Bytes that all texts together may take.
    """

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self.idle = self.least = 0
        """Bytes that slots without texts take, and bytes that are enough for any single text."""
        self.evictions = 0
        """How often a text was evicted, because others needed its memory."""
        self.evicted: WeakSet[Any] = WeakSet()
        """Evicted texts that wait for memory; they come before new ones."""
        self.spare: Any = None
        """Device memory that was given back, to be taken again."""

    @property
    def free(self) -> int:
        """Bytes left."""
        return self.size - self.used

    @property
    def usage(self) -> float:
        """Part of the bytes for texts that is taken."""
        return max(self.used - self.idle, 0) / max(self.size - self.idle, 1)

    def take(self, nbytes: int) -> bool:
        """Take this many bytes; return whether there were enough."""
        if nbytes > self.free:
            return False
        self.used += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        self.used -= nbytes
        assert self.used >= 0, "more was given than taken"

    def shrink(self) -> None:
        """Limit the pool to what is already taken, because the device has no more.

        Raises
        ------
        torch.OutOfMemoryError
            If that is too little for a single text.
        """
        self.size = self.used
        if self.size < self.least:
            raise torch.OutOfMemoryError("too little GPU memory for the keys and values of one text")


class Blocks(ABC):
    """Keys and values of a batch; each row has memory for its first slots.

    Parameters
    ----------
    pool : Pool
    rows : int
    slots : int
        Slots per row.
    slot_bytes : int
        Bytes of a slot's keys and values in all layers.
    block_bytes : int
        Rows take whole blocks; slots may cross their borders.
    """

    stored: tuple[Tensor, Tensor]
    """Keys and values `[L, B, H, S, C]`."""

    def __init__(self, pool: Pool, rows: int, slots: int, slot_bytes: int, block_bytes: int) -> None:
        self.pool, self._slots = pool, slots
        self._slot_bytes, self._block_bytes = slot_bytes, block_bytes
        self._blocks = [0] * rows
        """Blocks that each row has."""

    def row_bytes(self, slots: int) -> int:
        """Return how many bytes a row with this many slots takes."""
        return self._count(slots) * self._block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that all rows have."""
        return sum(self._blocks) * self._block_bytes

    def slots(self, row: int) -> int:
        """Return how many slots a row has."""
        return min(self._blocks[row] * self._block_bytes // self._slot_bytes, self._slots)

    def hold(self, row: int, slots: int) -> bool:
        """Get memory for at least this many slots of a row; return whether there was enough. New slots hold finite numbers."""
        before, wanted = self._blocks[row], self._count(slots)
        if wanted <= before:
            return True
        nbytes = (wanted - before) * self._block_bytes
        if not self.pool.take(nbytes):
            return False
        self._blocks[row] = wanted
        if not self._take(row, before, wanted):
            self._blocks[row] = before
            self.pool.give(nbytes)
            self.pool.shrink()
            return False
        return True

    def trim(self, row: int, slots: int) -> None:
        """Give back a row's memory beyond this many slots."""
        before, wanted = self._blocks[row], self._count(slots)
        if wanted < before:
            self._blocks[row] = wanted
            self._give(row, wanted, before)
            self.pool.give((before - wanted) * self._block_bytes)

    def swap(self, first: int, second: int) -> None:
        """Swap two rows with their contents."""
        self._swap(first, second)
        blocks = self._blocks
        blocks[first], blocks[second] = blocks[second], blocks[first]

    def _count(self, slots: int) -> int:
        return -(-min(slots, self._slots) * self._slot_bytes // self._block_bytes)

    @abstractmethod
    def _take(self, row: int, start: int, stop: int) -> bool:
        """Get memory for these blocks of a row; return whether the device had it."""

    @abstractmethod
    def _give(self, row: int, start: int, stop: int) -> None:
        """Give the memory of these blocks of a row back."""

    @abstractmethod
    def _swap(self, first: int, second: int) -> None:
        """Swap the contents of two rows."""

    def __del__(self) -> None:
        self.pool.give(self.nbytes)


class HostBlocks(Blocks):
    """Memory on a host: the system provides pages when they are first written, and takes them back on request.

    The slots of each layer and head are adjacent, as kernels need them.
    """

    def __init__(self, pool: Pool, keys_BHTC: Tensor, values_BHTC: Tensor, layers: int, rows: int, slots: int) -> None:
        sizes = [(part.shape[1], part.shape[3], part.element_size()) for part in (keys_BHTC, values_BHTC)]
        slot_bytes = sum(layers * heads * channels * size for heads, channels, size in sizes)
        super().__init__(pool, rows, slots, slot_bytes, _TOKENS * slot_bytes)
        self._maps = [_anonymous(layers * rows * slots * heads * channels * size) for heads, channels, size in sizes]
        keys_LBHSC, values_LBHSC = (
            torch.frombuffer(memory, dtype=part.dtype).view(layers, rows, part.shape[1], slots, part.shape[3])
            for memory, part in zip(self._maps, (keys_BHTC, values_BHTC), strict=True)
        )
        self.stored = keys_LBHSC, values_LBHSC

    def _take(self, row: int, start: int, stop: int) -> bool:
        return True  # the system provides pages when they are written

    def _give(self, row: int, start: int, stop: int) -> None:
        first, last = start * _TOKENS, min(stop * _TOKENS, self._slots)
        for memory, stored_LBHSC in zip(self._maps, self.stored, strict=True):
            size, base = stored_LBHSC.element_size(), stored_LBHSC.data_ptr()
            for slots_SC in (head_SC for layer_HSC in stored_LBHSC[:, row] for head_SC in layer_HSC):
                begin = slots_SC[first].data_ptr() - base
                end = begin + (last - first) * slots_SC.shape[1] * size
                begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: those at the borders are shared
                if (length := end // mmap.PAGESIZE * mmap.PAGESIZE - begin) > 0:
                    memory.madvise(mmap.MADV_DONTNEED, begin, length)

    def _swap(self, first: int, second: int) -> None:
        used = max(self.slots(first), self.slots(second))
        for stored_LBHSC in self.stored:
            swap_slots(stored_LBHSC, first, second, used)
        longer, shorter = (first, second) if self._blocks[first] > self._blocks[second] else (second, first)
        self._give(longer, self._blocks[shorter], self._blocks[longer])  # this row now holds the shorter text


def swap_slots(stored_LBHSC: Tensor, first: int, second: int, used: int | None) -> None:
    """Swap the first `used` slots of two rows (all if None), a few layers at a time, so that long texts need little room."""
    layers = max(SWAPPED_NUMBERS // max(stored_LBHSC[0, 0, :, :used].numel(), 1), 1)
    for start in range(0, len(stored_LBHSC), layers):
        some = slice(start, start + layers)
        swap(stored_LBHSC[some, first, :, :used], stored_LBHSC[some, second, :, :used])


def _anonymous(nbytes: int) -> mmap.mmap:
    """Return memory of which only the pages that are written take up room."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, nbytes, flags=flags | (_NO_RESERVE if hasattr(mmap, "MADV_HUGEPAGE") else 0))
