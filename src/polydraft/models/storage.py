"""What a model keeps of the tokens it has read, in slots: storage whose rows are moved, put to sleep, enlarged and reused."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.models.blocks import Blocks, Pool, swap_slots
from polydraft.models.device_blocks import open_blocks
from polydraft.operations import operation
from polydraft.rows import ByRow

Copies = Mapping[Any, Tensor]
"""Contents of some slots of a row, by names that all storages of the same model share."""
Pieces = Sequence[tuple[Copies, int]]
"""Copies of consecutive slots, and how many slots of each to use."""


class Storage(ByRow, ABC):
    """Slots of a batch's texts; the model decides what is in them."""

    @property
    @abstractmethod
    def address(self) -> int:
        """Address of the storage, 0 before it is allocated; it changes when the storage grows."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, by rows in use or not."""

    @abstractmethod
    def move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy slots within each row."""

    @abstractmethod
    def grow(self, capacity: int) -> None:
        """Enlarge the storage, keeping its content."""

    @abstractmethod
    def part(self, rows: slice) -> Self:
        """Return a view of adjacent rows; the storage must be allocated."""

    def copied(self, row: int, start: int, stop: int) -> Copies:
        """Return copies of adjacent slots of a row; only if a row is nothing but its slots."""
        raise NotImplementedError

    def paste(self, row: int, pieces: Pieces, rows: int) -> None:
        """Write copies of slots into the first slots of one of `rows` rows."""
        raise NotImplementedError

    def clear(self, row: int) -> None:
        """Overwrite a row with zeros, if it may hold NaNs: even masked slots must not."""

    def adopt(self, other: Any, rows: int) -> bool:
        """Take over the memory of another storage of the same model; return whether it fits this many rows."""
        return False

    pool: Pool | None = None
    """Where rows take memory as they need it; None if all of it is allocated at once."""

    def row_bytes(self, slots: int) -> int:
        """Return how many bytes of the pool a row with this many slots takes; 0 if not known yet."""
        return 0

    def hold(self, row: int, slots: int) -> bool:
        """Get memory for at least this many slots of a row; return whether there was enough."""
        return True

    def trim(self, row: int, slots: int) -> None:
        """Give back a row's memory beyond this many slots, if it came from a pool."""


@operation
def move_up(storage: Storage, lengths_B: Tensor, places_BD: Tensor, slot_positions_BS: Tensor) -> None:
    """Move the uncommitted tokens at `places_BD` to the first uncommitted places, and set their positions."""
    source_BD = lengths_B[:, None] + places_BD
    target_BD = lengths_B[:, None] + torch.arange(places_BD.shape[1], device=places_BD.device)
    storage.move(source_BD, target_BD)
    slot_positions_BS.scatter_(1, target_BD, target_BD)


class KeyValues(Storage):
    """Keys and values of all layers in one tensor each, so that committing a path is one gather and one write.

    The tensors are allocated once their shape is known.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.num_layers, self.capacity = num_layers, capacity
        self.keys_LBHSC: Tensor | None = None
        self.values_LBHSC: Tensor | None = None
        """Keys and values of the rows in use."""
        self._all: tuple[Tensor, Tensor] | None = None
        """Keys and values of all rows."""
        self._most = 0
        """Most rows that there will ever be."""
        self._blocks: Blocks | None = None
        """The rows' memory, if it comes from a pool."""

    def held(self, like_BX: Tensor, heads: int, channels: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all layers, allocating them first if necessary with rows, dtype and device of `like_BX`."""
        if self._stored is not None:
            return self._stored
        like_BHTC = like_BX.new_empty(len(like_BX), heads, 0, channels)
        return self._allocated(like_BHTC, like_BHTC)

    def part(self, rows: slice) -> Self:
        """Return a view of adjacent rows; the storage must be allocated."""
        part = copy.copy(self)
        assert self.keys_LBHSC is not None and self.values_LBHSC is not None, "storage is not allocated"
        part.keys_LBHSC, part.values_LBHSC = self.keys_LBHSC[:, rows], self.values_LBHSC[:, rows]
        return part

    def resize(self, rows: int, most: int) -> None:
        """Use this many rows; if there is no room for them yet, allocate room for `most`, so that later rows need no move."""
        super().resize(rows, most)
        self._most = most
        if self._all is None:
            return
        missing = most - self._all[0].shape[1] if rows > self._all[0].shape[1] else 0
        more = (0, 0, 0, 0, 0, 0, 0, missing)
        self._use((functional.pad(stored, more) for stored in self._all) if missing else self._all, rows)

    def swap_rows(self, first: int, second: int, used: int | None = None) -> None:
        """Swap the first `used` slots of two rows; the second row may be asleep."""
        super().swap_rows(first, second, used)
        if self._blocks is not None:
            self._blocks.swap(first, second)
            return
        for stored in self._all or ():
            swap_slots(stored, first, second, used)

    def copied(self, row: int, start: int, stop: int) -> Copies:
        """Return copies of adjacent slots of a row."""
        assert self._stored is not None, "storage is not allocated"
        copies = (stored[:, row, :, start:stop].clone(memory_format=torch.contiguous_format) for stored in self._stored)
        return dict(zip(("keys", "values"), copies, strict=True))

    def paste(self, row: int, pieces: Pieces, rows: int) -> None:
        """Write copies of slots into the first slots of one of `rows` rows."""
        done = 0
        for copies, count in pieces:
            both = copies["keys"], copies["values"]
            likes = (copy_LHTC.new_empty(rows, copy_LHTC.shape[1], 0, copy_LHTC.shape[3]) for copy_LHTC in both)
            for stored, copy_LHTC in zip(self._stored or self._allocated(*likes), both, strict=True):
                stored[:, row, :, done : done + count] = copy_LHTC[:, :, :count]
            done += count

    def clear(self, row: int) -> None:
        """Overwrite a row with zeros: even masked slots must not hold NaNs."""
        for stored in self._all or ():
            stored[:, row, :, : None if self._blocks is None else self._blocks.slots(row)].zero_()

    def adopt(self, other: "KeyValues", rows: int) -> bool:
        """Take over the memory of another storage of the same model; return whether it fits this many rows."""
        if (
            other._all is None
            or other._all[0].shape[1] != rows
            or other.capacity != self.capacity
            or other.pool is not self.pool
        ):
            return False
        self._use(other._all, rows)
        self._blocks = other._blocks
        return True

    def row_bytes(self, slots: int) -> int:
        """Return how many bytes of the pool a row with this many slots takes; 0 before allocation."""
        return 0 if self._blocks is None else self._blocks.row_bytes(slots)

    def hold(self, row: int, slots: int) -> bool:
        """Get memory for at least this many slots of a row; return whether there was enough."""
        return self._blocks is None or self._blocks.hold(row, slots)

    def trim(self, row: int, slots: int) -> None:
        """Give back a row's memory beyond this many slots, if it came from a pool."""
        if self._blocks is not None:
            self._blocks.trim(row, slots)

    def move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy slots within each row, in all layers at once."""
        rows_B1 = torch.arange(len(source_BD), device=source_BD.device)[:, None]
        for stored_LBHSC in self._stored or ():
            stored_LBHSC[:, rows_B1, :, target_BD] = stored_LBHSC[:, rows_B1, :, source_BD]

    def grow(self, capacity: int) -> None:
        """Enlarge the storage, keeping its content."""
        assert self._blocks is None, "blocks already have addresses for the longest text"
        more = capacity - self.capacity
        self.capacity = capacity
        if self._all is not None and self.keys_LBHSC is not None:
            grown = [functional.pad(stored, (0, 0, 0, more)) for stored in self._all]
            self._use(grown, self.keys_LBHSC.shape[1])

    @property
    def address(self) -> int:
        """Address of the storage, 0 before it is allocated."""
        return 0 if self.keys_LBHSC is None else self.keys_LBHSC.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, of rows in use or not."""
        return sum(stored.nbytes for stored in self._all or ()) if self._blocks is None else self._blocks.nbytes

    @property
    def _stored(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the rows in use; None before allocation."""
        if self.keys_LBHSC is None or self.values_LBHSC is None:
            return None
        return self.keys_LBHSC, self.values_LBHSC

    def _use(self, stored: Iterable[Tensor], rows: int) -> tuple[Tensor, Tensor]:
        """Make these tensors the storage, and use their first rows."""
        keys_LBHSC, values_LBHSC = stored
        self._all = keys_LBHSC, values_LBHSC
        self.keys_LBHSC, self.values_LBHSC = keys_LBHSC[:, :rows], values_LBHSC[:, :rows]
        return self.keys_LBHSC, self.values_LBHSC

    def _allocated(self, keys_BHTC: Tensor, values_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the storage, for keys and values like these."""
        if self.pool is not None:
            rows = max(len(keys_BHTC), self._most)
            self._blocks = open_blocks(self.pool, keys_BHTC, values_BHTC, self.num_layers, rows, self.capacity)
            return self._use(self._blocks.stored, len(keys_BHTC))
        return self._use(map(self._allocate, (keys_BHTC, values_BHTC)), len(keys_BHTC))

    def _allocate(self, states_BHTC: Tensor) -> Tensor:
        batch_size, heads, _, channels = states_BHTC.shape
        # Zeros, not garbage: masked slots are still multiplied by 0, and 0 * NaN is NaN.
        return states_BHTC.new_zeros(self.num_layers, max(batch_size, self._most), heads, self.capacity, channels)
