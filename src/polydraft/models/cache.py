"""Keys and values of a batch, in slots of our own choosing."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache

from polydraft.backends.triton import kernels_run, power_of_two, side_by_side
from polydraft.errors import FailureError, UsageError
from polydraft.models.families import text_config
from polydraft.models.placement import home_device
from polydraft.row_storage import swap_rows

_LEAST_PLACES, _MOST_PLACES = 8, 64
"""Paths that are shorter share the kernel of these; longer ones would fill the registers of a program that moves them."""
_SWAPPED_NUMBERS = 2**24
"""Keys or values that a swap of two rows holds aside at a time."""


def stored_layers(model: Any) -> int | None:
    """Return how many layers of a model keep keys and values, all of one shape; None where shapes differ or there is more.

    A model that keeps them elsewhere than in a cache of `transformers` is refused.
    """
    tokens_BT = torch.tensor([[0, 1]], device=home_device(model))
    cache: Any = getattr(model(input_ids=tokens_BT, use_cache=True), "past_key_values", None)
    if type(cache) is EncoderDecoderCache and not any(layer.keys is not None for layer in cache.cross_attention_cache.layers):
        cache = cache.self_attention_cache  # of a decoder alone; it takes one without the other
    if type(cache) is not DynamicCache:
        if cache is None and getattr(text_config(model), "is_decoder", True) is False:
            kind = text_config(model).model_type
            raise UsageError(
                f"model type {kind!r} with is_decoder=False is not causal: tokens see later ones; load a causal language model"
            )
        kept = "returns no keys and values to go on from" if cache is None else f"keeps its keys in a {type(cache).__name__}"
        raise UsageError(
            f"model type {text_config(model).model_type!r} {kept}, and trees need them in a DynamicCache of transformers; "
            "use another model"
        )
    filled = [layer for layer in cache.layers if layer.keys is not None]
    shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in filled}
    more = any(getattr(layer, "indexer_keys", None) is not None for layer in filled)
    return None if more or len(shapes) != 1 or len(filled) < len(cache.layers) else len(filled)


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A `transformers` cache that writes where it is told and can move slots about.

    All layers live in one tensor, so that committing a path is one gather and one write, not one per layer. Storage is
    allocated when the first layer shows its shape. Attention gets a view of the used slots: no copy, and no work on
    slots never written.
    """

    def __init__(self, num_layers: int, capacity: int, owner: str = "this model") -> None:
        super().__init__(layers=[])
        self._owner = owner
        self.num_layers, self.capacity = num_layers, capacity
        self.keys_LBHSC: Tensor | None = None
        self.values_LBHSC: Tensor | None = None
        self._all: tuple[Tensor, Tensor] | None = None
        """The storage, which may have more rows than are in use."""
        self._most = 0
        """Rows that there may come to be."""
        self._slots_BT = torch.empty(0, 0, dtype=torch.long)
        self._first_slot: int | None = None
        self._used = 0

    def aim(self, slots_BT: Tensor, first_slot: int | None, used: int) -> None:
        """Say where the next pass writes: `slots_BT`, or the contiguous slots from `first_slot` in all rows."""
        self._slots_BT, self._first_slot, self._used = slots_BT, first_slot, used

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return all that are in use."""
        keys_LBHSC, values_LBHSC = self._stored or self._allocated(key_states, value_states)
        return self._write(keys_LBHSC[layer_idx], key_states), self._write(values_LBHSC[layer_idx], value_states)

    def storage(self, layer: int, like: Tensor, heads: int, channels: int) -> tuple[Tensor, Tensor]:
        """Return the slots of one layer's keys and values, in the number format of `like`."""
        stored = self._stored
        if stored is None:
            like_BHTC = like.new_empty(len(like), heads, 0, channels)
            stored = self._allocated(like_BHTC, like_BHTC)
        return stored[0][layer], stored[1][layer]

    def whole(self, batch_size: int, dtype: torch.dtype, heads: int, channels: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all layers, as compiled code takes them: on the host, allocated if they are not yet."""
        like_BHTC = torch.empty(batch_size, heads, 0, channels, dtype=dtype)
        return self._stored or self._allocated(like_BHTC, like_BHTC)

    def part(self, rows: slice) -> "SlotCache":
        """Return a cache of some adjacent rows, which shares their storage; there must be some."""
        part = copy.copy(self)
        assert self.keys_LBHSC is not None and self.values_LBHSC is not None, "storage comes first"
        part.keys_LBHSC, part.values_LBHSC = self.keys_LBHSC[:, rows], self.values_LBHSC[:, rows]
        return part

    def resize(self, rows: int, most: int) -> None:
        """Use so many rows; where there is no storage for them yet, make some for `most`, so that it stays where it is."""
        self._most = most
        if self._all is None:
            return
        missing = most - self._all[0].shape[1] if rows > self._all[0].shape[1] else 0
        more = (0, 0, 0, 0, 0, 0, 0, missing)
        self._use((torch.nn.functional.pad(stored, more) for stored in self._all) if missing else self._all, rows)

    def swap_rows(self, first: int, second: int, used: int) -> None:
        """Swap the first slots of two rows, the second of which may be out of use."""
        for stored in self._all or ():
            layers = max(_SWAPPED_NUMBERS // max(stored[0, 0, :, :used].numel(), 1), 1)  # so that long texts need little room
            for start in range(0, len(stored), layers):
                some = slice(start, start + layers)
                swap_rows(stored[some, first, :, :used], stored[some, second, :, :used])

    def clear(self, row: int) -> None:
        """Forget what a row holds: numbers that are none would reach whoever has the row next, even from masked slots."""
        for stored in (self.keys_LBHSC, self.values_LBHSC):
            if stored is not None:
                stored[:, row].zero_()

    def wipe(self) -> None:
        """Forget what all rows hold, in use or not."""
        for stored in self._all or ():
            stored.zero_()

    def adopt(self, other: "SlotCache", rows: int) -> bool:
        """Take over the storage of another cache of the same model, with so many rows; return whether it fits."""
        if other._all is None or other._all[0].shape[1] != rows or other.capacity != self.capacity:
            return False
        self._use(other._all, rows)
        return True

    @property
    def _stored(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values in use, once there are some."""
        if self.keys_LBHSC is None or self.values_LBHSC is None:
            return None
        return self.keys_LBHSC, self.values_LBHSC

    def _use(self, stored: Iterable[Tensor], rows: int) -> tuple[Tensor, Tensor]:
        """Let these keys and values be the storage, and use its first rows."""
        keys_LBHSC, values_LBHSC = stored
        self._all = keys_LBHSC, values_LBHSC
        self.keys_LBHSC, self.values_LBHSC = keys_LBHSC[:, :rows], values_LBHSC[:, :rows]
        return self.keys_LBHSC, self.values_LBHSC

    def _allocated(self, keys_BHTC: Tensor, values_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return new storage for keys and values like these."""
        return self._use(map(self._allocate, (keys_BHTC, values_BHTC)), len(keys_BHTC))

    def _allocate(self, states_BHTC: Tensor) -> Tensor:
        batch_size, heads, _, channels = states_BHTC.shape
        # Zeros, not garbage: a masked slot still meets 0 * value, and NaN would come through.
        return states_BHTC.new_zeros(self.num_layers, max(batch_size, self._most), heads, self.capacity, channels)

    def _write(self, stored_BHSC: Tensor, states_BHTC: Tensor) -> Tensor:
        if stored_BHSC.shape[1] != states_BHTC.shape[1] or stored_BHSC.shape[3] != states_BHTC.shape[3]:
            raise FailureError(f"{self._owner} has layers with keys of different shapes, which polydraft cannot store")
        size = states_BHTC.shape[2]
        if self._first_slot is not None:
            stored_BHSC[:, :, self._first_slot : self._first_slot + size] = states_BHTC
        else:
            index_BHTC = self._slots_BT[:, None, :, None].expand_as(states_BHTC)
            stored_BHSC.scatter_(2, index_BHTC, states_BHTC)
        return stored_BHSC[:, :, : self._used]

    def move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy slots within each row, in all layers at once."""
        rows_B1 = torch.arange(len(source_BD), device=source_BD.device)[:, None]
        self.take(self, rows_B1, source_BD, rows_B1, target_BD)

    def move_up(self, lengths_B: Tensor, places_BD: Tensor, slot_positions_BS: Tensor) -> bool:
        """Move uncommitted tokens to the first uncommitted places, by one kernel; return False where there is none for it."""
        count, keys_LBHSC, values_LBHSC = places_BD.shape[1], self.keys_LBHSC, self.values_LBHSC
        if type(self) is not SlotCache or keys_LBHSC is None or values_LBHSC is None:
            return False
        if count > _MOST_PLACES or not kernels_run(places_BD):
            return False
        from polydraft.backends.triton import slot_kernels as kernels

        places_BD = side_by_side(places_BD)
        layers, rows, heads, _, channels = keys_LBHSC.shape
        kernels.move_slots[layers, rows, heads](
            keys_LBHSC, values_LBHSC, slot_positions_BS, lengths_B, places_BD, count, channels,
            places_BD.stride(0), slot_positions_BS.stride(0), *keys_LBHSC.stride()[:4], *values_LBHSC.stride()[:4],
            BLOCK_D=power_of_two(count, _LEAST_PLACES), BLOCK_C=power_of_two(channels), num_warps=4,
        )  # fmt: skip
        return True

    def take(self, other: "SlotCache", rows: Tensor, source_BD: Tensor, own_rows: Tensor, target_BD: Tensor) -> None:
        """Copy slots from the rows of another cache, in all layers at once."""
        for mine, theirs in ((self.keys_LBHSC, other.keys_LBHSC), (self.values_LBHSC, other.values_LBHSC)):
            if mine is not None and theirs is not None:
                mine[:, own_rows, :, target_BD] = theirs[:, rows, :, source_BD]

    def fill(self, other: "SlotCache", copies: int, used: int) -> None:
        """Take over the first slots of another cache, each of its rows `copies` times."""
        if other.keys_LBHSC is not None and other.values_LBHSC is not None:
            room = (0, 0, 0, self.capacity - used)
            pad = torch.nn.functional.pad
            held = (other.keys_LBHSC, other.values_LBHSC)
            copied = [pad(stored[:, :, :, :used].repeat_interleave(copies, dim=1), room) for stored in held]
            self._use(copied, copied[0].shape[1])

    def grow(self, capacity: int) -> None:
        """Enlarge the storage, keeping its content."""
        more = capacity - self.capacity
        self.capacity = capacity
        if self._all is not None and self.keys_LBHSC is not None:
            grown = [torch.nn.functional.pad(stored, (0, 0, 0, more)) for stored in self._all]
            self._use(grown, self.keys_LBHSC.shape[1])

    @property
    def address(self) -> int:
        """Where the storage begins, 0 while there is none."""
        return 0 if self.keys_LBHSC is None else self.keys_LBHSC.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held, of rows in use or not."""
        return sum(stored.nbytes for stored in self._all or ())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use before the tokens of this pass."""
        return self._used - self._slots_BT.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Slot of this pass's first token."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Slots that attention sees, and the first of them."""
        return self._used, 0

    def __len__(self) -> int:
        return self.num_layers


class SpreadCache(SlotCache):
    """Keys and values that stay with their layers, wherever these are and whatever shapes they have: one cache per layer.

    The keys of sparse layers' indexers lie in slots too, beside those of the layers.
    """

    def __init__(self, num_layers: int, capacity: int, owner: str = "this model") -> None:
        super().__init__(num_layers, capacity, owner)
        self._parts: dict[tuple[str, int], SlotCache] = {}

    def _part(self, kind: str, layer: int) -> SlotCache:
        if (kind, layer) not in self._parts:
            self._parts[kind, layer] = SlotCache(1, self.capacity, self._owner)
        return self._parts[kind, layer]

    def _store(self, kind: str, layer: int, keys_BHTC: Tensor, values_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        part = self._part(kind, layer)
        part.aim(self._slots_BT.to(keys_BHTC.device), self._first_slot, self._used)
        return part.update(keys_BHTC, values_BHTC, 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return all that are in use."""
        return self._store("layer", layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store new keys `[B, T, C]` of the indexer in a sparse layer; return all that are in use."""
        keys_B1TC = indexer_key_states[:, None]
        return self._store("indexer", layer_idx, keys_B1TC, keys_B1TC[..., :0])[0][:, 0]

    def take(self, other: SlotCache, rows: Tensor, source_BD: Tensor, own_rows: Tensor, target_BD: Tensor) -> None:
        """Copy slots from the rows of another such cache."""
        assert isinstance(other, SpreadCache)
        for name, mine in self._parts.items():
            if mine.keys_LBHSC is not None and name in other._parts:
                indices = (index.to(mine.keys_LBHSC.device) for index in (rows, source_BD, own_rows, target_BD))
                mine.take(other._parts[name], *indices)

    def part(self, rows: slice) -> "SpreadCache":
        """Return a cache of some adjacent rows, which shares their storage; there must be some."""
        part = copy.copy(self)
        part._parts = {name: one.part(rows) for name, one in self._parts.items()}
        return part

    def resize(self, rows: int, most: int) -> None:
        """Use so many rows; where there is no storage for them yet, make some for `most`."""
        for one in self._parts.values():
            one.resize(rows, most)

    def swap_rows(self, first: int, second: int, used: int) -> None:
        """Swap the first slots of two rows."""
        for one in self._parts.values():
            one.swap_rows(first, second, used)

    def clear(self, row: int) -> None:
        """Forget what a row holds."""
        for one in self._parts.values():
            one.clear(row)

    def wipe(self) -> None:
        """Forget what all rows hold."""
        for one in self._parts.values():
            one.wipe()

    def adopt(self, other: SlotCache, rows: int) -> bool:
        """Take over the storage of another cache of the same model."""
        assert isinstance(other, SpreadCache)
        return all(self._part(*name).adopt(part, rows) for name, part in other._parts.items())

    def fill(self, other: SlotCache, copies: int, used: int) -> None:
        """Take over the first slots of another such cache, each of its rows `copies` times."""
        assert isinstance(other, SpreadCache)
        for name, theirs in other._parts.items():
            self._part(*name).fill(theirs, copies, used)

    def grow(self, capacity: int) -> None:
        """Enlarge the storage, keeping its content."""
        self.capacity = capacity
        for one in self._parts.values():
            one.grow(capacity)

    @property
    def address(self) -> int:
        """Where the storage begins, 0 while there is none."""
        return next((one.address for one in self._parts.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held, on all devices."""
        return sum(one.nbytes for one in self._parts.values())
