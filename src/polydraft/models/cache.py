"""Caches for `transformers` models that write keys and values into slots of our choosing."""

import copy
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache

from polydraft.errors import FailureError, UsageError
from polydraft.models.families import text_config
from polydraft.models.placement import home_device
from polydraft.models.storage import Copies, KeyValues, Pieces
from polydraft.rows import ByRow


def stored_layers(model: Any) -> int | None:
    """Return how many layers of a model keep keys and values, if they have one shape and nothing else is kept; otherwise None.

    Refuse a model that keeps them anywhere but in a `DynamicCache` of `transformers`.
    """
    tokens_BT = torch.tensor([[0, 1]], device=home_device(model))
    cache: Any = getattr(model(input_ids=tokens_BT, use_cache=True), "past_key_values", None)
    if type(cache) is EncoderDecoderCache and not any(layer.keys is not None for layer in cache.cross_attention_cache.layers):
        cache = cache.self_attention_cache  # a decoder by itself, which accepts this part alone
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


class SlotCache(KeyValues, Cache):  # type: ignore[misc]  # transformers is untyped here
    """A `transformers` cache that writes into given slots and can move slots.

    Attention gets a view of the used slots: nothing is copied, and slots never written cost nothing.
    """

    def __init__(self, num_layers: int, capacity: int, owner: str = "this model") -> None:
        KeyValues.__init__(self, num_layers, capacity)
        Cache.__init__(self, layers=[])
        self._owner = owner
        self._slots_BT = torch.empty(0, 0, dtype=torch.long)
        self._first_slot: int | None = None
        self._used = 0

    def aim(self, slots_BT: Tensor, first_slot: int | None, used: int) -> None:
        """Set where the next pass writes: `slots_BT`, or if given the slots from `first_slot` on in all rows."""
        self._slots_BT, self._first_slot, self._used = slots_BT, first_slot, used

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values; return those of all used slots."""
        keys_LBHSC, values_LBHSC = self._stored or self._allocated(key_states, value_states)
        return self._write(keys_LBHSC[layer_idx], key_states), self._write(values_LBHSC[layer_idx], value_states)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor] | None:
        """Return one layer's keys and values in all slots; None before storage is allocated."""
        stored = self._stored
        return None if stored is None else (stored[0][layer_idx], stored[1][layer_idx])

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many slots were used before this pass."""
        return self._used - self._slots_BT.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the slot of this pass's first token."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many slots attention sees, and the first of them."""
        return self._used, 0

    def __len__(self) -> int:
        return self.num_layers


class SpreadCache(SlotCache):
    """One cache per layer, for layers on several devices or with keys of different shapes.

    Sparse layers also have indexers, whose keys have slots of their own.
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
        """Store one layer's new keys and values; return those of all used slots."""
        return self._store("layer", layer_idx, key_states, value_states)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor] | None:
        """Return one layer's keys and values in all slots; None before storage is allocated."""
        return self._part("layer", layer_idx).layer(0)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store new keys `[B, T, C]` of a sparse layer's indexer; return those of all used slots."""
        keys_B1TC = indexer_key_states[:, None]
        return self._store("indexer", layer_idx, keys_B1TC, keys_B1TC[..., :0])[0][:, 0]

    def move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy slots within each row, in all layers."""
        for one in self._parts.values():
            if one.keys_LBHSC is not None:
                one.move(source_BD.to(one.keys_LBHSC.device), target_BD.to(one.keys_LBHSC.device))

    def part(self, rows: slice) -> Self:
        """Return a cache of some adjacent rows that shares the storage, which must exist."""
        part = copy.copy(self)
        part._parts = {name: one.part(rows) for name, one in self._parts.items()}
        return part

    def row_parts(self) -> Iterable[ByRow]:
        """Return the layers' caches."""
        return self._parts.values()

    def copied(self, row: int, start: int, stop: int) -> Copies:
        """Return copies of some adjacent slots of a row."""
        parts = ((name, one.copied(row, start, stop)) for name, one in self._parts.items())
        return {(*name, kind): copy for name, copies in parts for kind, copy in copies.items()}

    def paste(self, row: int, pieces: Pieces, rows: int) -> None:
        """Write copied slots into the first slots of one of `rows` rows."""
        for name in {(kind, layer): None for kind, layer, _ in pieces[0][0]}:
            own = [({kind: copies[*name, kind] for kind in ("keys", "values")}, count) for copies, count in pieces]
            self._part(*name).paste(row, own, rows)

    def clear(self, row: int) -> None:
        """Overwrite a row with zeros."""
        for one in self._parts.values():
            one.clear(row)

    def adopt(self, other: KeyValues, rows: int) -> bool:
        """Take over the storage of another cache of the same model; return whether it fits."""
        assert isinstance(other, SpreadCache)
        return all(self._part(*name).adopt(part, rows) for name, part in other._parts.items())

    def grow(self, capacity: int) -> None:
        """Enlarge the storage, keeping its content."""
        self.capacity = capacity
        for one in self._parts.values():
            one.grow(capacity)

    @property
    def address(self) -> int:
        """Where the storage begins; 0 before it is allocated."""
        return next((one.address for one in self._parts.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held, on all devices."""
        return sum(one.nbytes for one in self._parts.values())
