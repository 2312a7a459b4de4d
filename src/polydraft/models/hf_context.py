"""A batch's cache in a Hugging Face model: keys and values in slots, and the passes that fill them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polydraft.devices import brought, is_host
from polydraft.models.blocks import Pool
from polydraft.models.cache import SlotCache, SpreadCache
from polydraft.models.device_blocks import maps_memory
from polydraft.models.language_model import Context, Observer
from polydraft.trees import Block

if TYPE_CHECKING:
    from polydraft.models.hf import HFModel

READING_SIZES = (32, 64, 96, 128, 192, 256, 384, 512)
"""Sizes of captured passes that read prompts, in tokens; shorter chunks are padded, and `PREFILL_CHUNK` is the longest."""
READING_COUNTS = (1, 2, 4)
_MOST_TOGETHER = 256
"""Numbers of prompts that one such pass may read, and most tokens of several prompts together."""


def reading_size(tokens: int) -> int | None:
    """Return the size of the captured pass for this many tokens of a prompt; None if there is none."""
    return next((size for size in READING_SIZES if size >= tokens), None)


def reading_count(size: int, waiting: int) -> int:
    """Return how many of the `waiting` prompts one captured pass of this size reads."""
    most = max(_MOST_TOGETHER // size, 1)
    return max(count for count in READING_COUNTS if count <= min(waiting, most))


class HFContext(Context):
    """Keys and values of one batch."""

    cache: SlotCache

    def __init__(self, model: "HFModel", batch_size: int, capacity: int, cache: SlotCache | None = None) -> None:
        layers = model.stored_layers if model.spread is None else None
        owner = f"model type {model.config.model_type!r}"
        if cache is None:
            cache = SpreadCache(model.num_layers, capacity, owner) if layers is None else SlotCache(layers, capacity, owner)
        super().__init__(model, cache, batch_size, capacity, model.device, model.max_positions)
        self.model, self.num_tokens, self.window = model, model.vocab_size, model.window
        self.elastic = model.spread is None

    def lend(self, pool: Pool) -> None:
        """Let rows take memory from a pool; only on a host, or if kernels run all passes: they do not touch unmapped memory."""
        fast = self.model.fast
        if self.elastic and (is_host(self.device) or (fast is not None and fast.invariant and maps_memory(self.device))):
            self.cache.pool = pool

    def open(self) -> None:
        """Allocate the storage now, if a backend knows its shape."""
        if self.model.fast is not None:
            like_B = torch.empty(self.batch_size, dtype=self.model.dtype, device=self.device)
            self.cache.held(like_B, *self.model.fast.key_shape)

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Pass uncommitted tokens through the model and return their features `[B, T, F]`."""
        fast = self.model.fast
        features_BTF = None if fast is None else fast.extend(self, tokens_BT, block)
        return super().extend(tokens_BT, block) if features_BTF is None else features_BTF

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        size, used = tokens_BT.shape[1], visible_BTS.shape[2]
        aligned = self.aligned
        self.cache.aim(slots_BT, used - size if aligned else None, used)
        # A single token that sees everything needs no mask; attention is faster without one.
        plain = aligned and size == 1 and self.model.masks.all_visible
        mask = None if plain else self.model.masks(visible_BTS, positions_BT, self.positions_BS[:, :used])
        return self.model.forward(tokens_BT, positions_BT, mask, self.cache)

    def prefill(self, texts: Sequence[Sequence[int]], observer: Observer | None = None) -> None:
        """Append known tokens to each row's committed text, and show their features to the observer.

        Short prompts are read by captured passes if possible, a few at a time, because each pass reads all weights.
        """
        rest = list(texts)
        # All groups are made before the first is read, because reading changes which texts have begun.
        for rows in list(self._groups(texts)) if self.divisible and any(self.lengths) else ():
            features_BTF = self._replayed([list(texts[row]) for row in rows], rows)
            if features_BTF is None:
                break
            lengths = list(self.lengths)
            for place, row in enumerate(rows):
                count, rest[row] = len(texts[row]), ()
                if observer is not None:
                    observer(slice(row, row + 1), [lengths[row]], [count], features_BTF[place : place + 1, :count])
                lengths[row] += count
            self.rewind(lengths)
        super().prefill(rest, observer)

    def _groups(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield groups of rows that one captured pass may read; texts that begin are not grouped with texts that go on."""
        for begun in (False, True):
            rows = [row for row, text in enumerate(texts) if text and bool(self.lengths[row]) == begun]
            rows = sorted((row for row in rows if reading_size(len(texts[row]))), key=lambda row: -len(texts[row]))
            while rows:
                count = reading_count(reading_size(len(texts[rows[0]])) or 1, len(rows))
                yield rows[:count]
                rows = rows[count:]

    def _read(self, parts: Sequence[list[int]], rows: slice, size: int) -> Tensor:
        """Read by a captured pass if there is one: for short chunks, launching takes much of the time."""
        features_BTF = self._replayed(parts, [rows.start]) if len(parts) == 1 else None
        return super()._read(parts, rows, size) if features_BTF is None else features_BTF[:, :size]

    def _replayed(self, parts: Sequence[list[int]], rows: Sequence[int]) -> Tensor | None:
        """Pass the next tokens of some rows and return their features, padded; None if that cannot be captured.

        Either all of these rows have committed text, or none has.
        """
        fast, count, longest = self.model.fast, len(rows), max(self.lengths[row] for row in rows)
        size = reading_size(max(map(len, parts)))
        if self.graphs is None or size is None or not self.divisible or not self.has_room(rows, size):
            return None
        most = self.capacity - size if longest else 0  # for texts that begin, attention needs no splits
        function = None if fast is None else fast.reading(self, count, size, most)
        if function is None:
            return None
        padded = [[row, *part, *[0] * (size - len(part))] for row, part in zip(rows, parts, strict=True)]
        kind = "reading", count, size, most, self.capacity, self.address
        return self.graphs.run(kind, function, brought(torch.tensor(padded), self.device))[0]
