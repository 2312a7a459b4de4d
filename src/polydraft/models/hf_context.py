"""The memory of a batch in a Hugging Face model: keys and values in slots, and the passes that fill them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polydraft.backends.native import Rows
from polydraft.models._fused import MOST_TOKENS, TreeView
from polydraft.models._slots import Placed
from polydraft.models.cache import SlotCache, SpreadCache
from polydraft.models.language_model import Context, Observer
from polydraft.transfers import brought
from polydraft.trees import Block, causal_block

if TYPE_CHECKING:
    from polydraft.models.hf import HFModel

READING_SIZES = (32, 64, 96, 128, 192, 256)
"""Tokens of captured passes that read a prompt: shorter parts are padded. Longer ones keep a GPU busy without a capture."""
READING_COUNTS = (1, 2, 4)
"""Prompts that such a pass may read, as long as they have no more tokens together than the longest one alone."""


def reading_size(tokens: int) -> int | None:
    """Return the size of a captured pass that reads so many tokens of a prompt; None where there is none."""
    return next((size for size in READING_SIZES if size >= tokens), None)


def reading_count(size: int, waiting: int) -> int:
    """Return how many prompts of so many tokens a captured pass reads, of those that wait."""
    most = max(READING_SIZES[-1] // size, 1)
    return max(count for count in READING_COUNTS if count <= min(waiting, most))


class HFContext(Context):
    """Keys and values of one batch."""

    def __init__(self, model: "HFModel", batch_size: int, capacity: int) -> None:
        super().__init__(batch_size, capacity, model.device, model.max_positions)
        self._model, self.num_tokens, self.window = model, model.vocab_size, model.window
        layers = model.stored_layers if model.spread is None else None
        owner = f"model type {model.config.model_type!r}"
        self.cache = SpreadCache(model.num_layers, capacity, owner) if layers is None else SlotCache(layers, capacity, owner)
        self.elastic = model.spread is None
        self._checked = False
        """Whether the native body was found in order since the last text began."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut rows to the given numbers of committed tokens."""
        super().rewind(lengths)
        self._checked = False

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Pass uncommitted tokens through the model and return their features `[B, T, F]`."""
        model = self._model
        native = model.native
        if native is None or torch.is_grad_enabled() or not native.ready(sure=self._checked):
            return super().extend(tokens_BT, block)
        self._checked = True
        assert max(self.lengths) + block.stop <= self.capacity, (self.lengths, block.stop, self.capacity)
        keys_LBHSC, values_LBHSC = self.cache.whole(self.batch_size, model.dtype, *native.key_shape)
        rows = Rows(
            lengths_B=self.lengths_B,
            slot_positions_BS=self._positions_BS,
            keys_LBHSC=keys_LBHSC,
            values_LBHSC=values_LBHSC,
            window=model.window,
            max_positions=self.max_positions,
        )
        return native(tokens_BT, block, rows, model.taps)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        size, used = tokens_BT.shape[1], visible_BTS.shape[2]
        aligned = self.aligned
        self.cache.aim(slots_BT, used - size if aligned else None, used)
        # One token that sees everything needs no mask, which spares attention a slower path.
        plain = aligned and size == 1 and self._model.sees_everything
        mask = None if plain else self._model.mask(visible_BTS, positions_BT, self._positions_BS[:, :used])
        return self._model.forward(tokens_BT, positions_BT, mask, self.cache)

    def _pass(self, placed: Placed, block: Block, used: int) -> Tensor:
        fused, window = self._model.fused, self._model.window
        # Most kernels cut off committed text only, so a window must reach over all that is not committed.
        unfit = block.size > MOST_TOKENS or (window is not None and window < block.stop)
        if fused is None or (unfit and not fused.invariant) or (fused.invariant and torch.is_grad_enabled()):
            return super()._pass(placed, block, used)
        view = TreeView(
            placed.slots_BT,
            self.lengths_B,
            block.visible_BTU,
            used - block.stop,
            placed.starts_BT,
            self._positions_BS,
            causal=block.plain or (block.stop == 1 and block.places_BT is None),
        )
        return fused(placed.tokens_BT, placed.positions_BT, view, self.cache, self._model.taps)

    def prefill(self, texts: Sequence[Sequence[int]], observer: Observer | None = None) -> None:
        """Append tokens known beforehand to each row's committed text, showing their features to the observer.

        Short ones are read by captured passes where there are some, a few at a time: each pass reads all weights.
        """
        rest = list(texts)
        # All groups before the first is read: one that was has text, and would be among those that go on.
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
        """Yield rows whose texts one captured pass may read, those that begin and those that go on apart."""
        for begun in (False, True):
            rows = [row for row, text in enumerate(texts) if text and bool(self.lengths[row]) == begun]
            rows = sorted((row for row in rows if reading_size(len(texts[row]))), key=lambda row: -len(texts[row]))
            while rows:
                count = reading_count(reading_size(len(texts[rows[0]])) or 1, len(rows))
                yield rows[:count]
                rows = rows[count:]

    def _read(self, parts: Sequence[list[int]], rows: slice, size: int) -> Tensor:
        """Read by a captured pass where there is one: launching one of this length takes much of its time."""
        features_BTF = self._replayed(parts, [rows.start]) if len(parts) == 1 else None
        return super()._read(parts, rows, size) if features_BTF is None else features_BTF[:, :size]

    def _replayed(self, parts: Sequence[list[int]], rows: Sequence[int]) -> Tensor | None:
        """Pass the next tokens of some rows and return their features, padded; None where that cannot be captured.

        Of these rows all have committed text, or none.
        """
        model, count, longest = self._model, len(rows), max(self.lengths[row] for row in rows)
        fused, window = model.fused, model.window
        size = reading_size(max(map(len, parts)))
        if self.graphs is None or size is None or not self.divisible or longest + size > self.capacity:
            return None
        if fused is None or not fused.invariant or torch.is_grad_enabled():
            return None
        padded = [[row, *part, *[0] * (size - len(part))] for row, part in zip(rows, parts, strict=True)]
        most = self.capacity - size if longest else 0  # a text that begins is attended to without splits
        # All rows, at work or not, so that one capture serves whatever their number is.
        all_lengths_B = self._storage.whole("lengths", self.lengths_B)
        all_positions_BS = self._storage.whole("positions", self._positions_BS)

        def function(values_BX: Tensor) -> Tensor:
            """Which rows and which tokens they are are values, so that one capture serves for all."""
            rows_B, tokens_BT = values_BX[:, 0].contiguous(), values_BX[:, 1:].clamp(max=model.vocab_size - 1)
            lengths_B = all_lengths_B[rows_B]
            slots_BT = lengths_B[:, None] + torch.arange(size, device=self.device)
            positions_BT = slots_BT if self.max_positions is None else slots_BT.clamp(max=self.max_positions - 1)
            all_positions_BS[rows_B[:, None], slots_BT] = positions_BT
            starts_BT = None if window is None else (positions_BT - window + 1).clamp(min=0)
            visible_BTU = causal_block(count, size, self.device).visible_BTU
            view = TreeView(slots_BT, lengths_B, visible_BTU, most, starts_BT, causal=True, rows_B=rows_B)
            return fused(tokens_BT, positions_BT, view, self.cache, model.taps)

        kind = "reading", count, size, most, self.capacity, self.address
        return self.graphs.run(kind, function, brought(torch.tensor(padded), self.device))[0]

    @property
    def address(self) -> int:
        """Where keys and values begin."""
        return self.cache.address

    def _move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        self.cache.move(source_BD, target_BD)

    def _move_up(self, places_BD: Tensor) -> None:
        if not self.cache.move_up(self.lengths_B, places_BD, self._positions_BS):
            super()._move_up(places_BD)

    def _grow(self, capacity: int) -> None:
        self.cache.grow(capacity)

    def _share(self, whole: Context, rows: slice) -> None:
        assert isinstance(whole, HFContext)
        self.cache = whole.cache.part(rows)

    def _resize(self, rows: int, most: int) -> None:
        self.cache.resize(rows, most)

    def _swap_rows(self, first: int, second: int, used: int) -> None:
        self.cache.swap_rows(first, second, used)

    def clear(self, row: int) -> None:
        """Forget what a row holds."""
        self.cache.clear(row)

    def wipe(self) -> None:
        """Forget what all rows hold."""
        self.cache.wipe()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.cache.nbytes

    def adopt(self, other: Context) -> bool:
        """Take over the keys' and values' storage of another context of the same model."""
        if not isinstance(other, HFContext) or other._model is not self._model or other.capacity < self.capacity:
            return False
        self.reserve(other.capacity)
        return self.cache.adopt(other.cache, self.batch_size)

    def copy_rows(self, other: "HFContext", copies: int) -> None:
        """Become `copies` copies of each of another context's rows."""
        self.rewind([length for length in other.lengths for _ in range(copies)])
        self.cache.fill(other.cache, copies, max(other.lengths))

    def copy_slots(self, other: "HFContext", rows_BD: Tensor, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy what is stored in slots of another context's rows into slots of this one's."""
        self.cache.take(other.cache, rows_BD, source_BD, self._rows_B1, target_BD)
