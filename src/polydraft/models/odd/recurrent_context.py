"""The context of a model with recurrent layers: keys and values in slots, and a state for each node of a tree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.models.language_model import PREFILL_CHUNK, Context, Observer
from polydraft.models.odd.levels import HybridCache, Mixers, NodeStates, Step, level_steps, text_steps
from polydraft.trees import Block, causal_block


class RecurrentContext(HFContext):
    """Keys and values, plus states: per row, one of the committed text and one for each uncommitted place.

    Layers with attention read a tree through its mask, as usual. Recurrent layers read it level by level, each node starting
    from its parent's state; committing a path keeps the state of its last node. A prompt is scanned at once, which yields only
    the last state. If the model's scan cannot start from a state (see `HFModel.resumes`), only the first part of a text is
    scanned and the rest is read token by token.
    """

    cache: HybridCache

    def __init__(self, model: HFModel, batch_size: int, capacity: int) -> None:
        assert model.recurrence is not None
        states = NodeStates(model.recurrence.states, batch_size, model.device)
        cache = HybridCache(model.num_layers, capacity, f"model type {model.config.model_type!r}", states)
        super().__init__(model, batch_size, capacity, cache)
        self.elastic = False
        self._mixers = Mixers(model.recurrence.mixers)
        self._depths_BU = torch.zeros(batch_size, 0, dtype=torch.long, device=self.device)
        self._read_B = torch.zeros(batch_size, dtype=torch.long, device=self.device)
        """How many tokens the state of each committed text has read; -1 if unknown. Texts of that length can continue."""
        self._counts: Sequence[int] | None = None
        """Tokens per row while prompts are being read; None in rounds."""
        self._singly: Sequence[bool] = ()
        """Which rows must read them one by one."""

    def extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        """Pass uncommitted tokens through the model and return their features `[B, T, F]`."""
        with self._mixers.reading(self._steps(block), self.cache, (self.batch_size, block.size)):
            return super().extend(tokens_BT, block)

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        self.cache.positions_BS = self.positions_BS[:, : visible_BTS.shape[2]]
        return super()._forward(tokens_BT, positions_BT, slots_BT, visible_BTS)

    def _steps(self, block: Block) -> list[Step]:
        if self._counts is not None:
            return list(text_steps(self._counts, self._singly, self.device))
        self._make_places(block.stop)
        places_BT = block.places_BT
        if places_BT is None:
            places_BT = torch.arange(block.start, block.stop, device=self.device).expand_as(block.depths_BT)
        self._depths_BU.scatter_(1, places_BT, block.depths_BT)
        return list(level_steps(block, places_BT, self._depths_BU))

    def fix_span(self, span: int | None = None) -> int:
        """Fix how many slots passes see, and allocate the states of all places so that they stay where they are."""
        self._make_places(self.places)
        return super().fix_span(span)

    def _make_places(self, places: int) -> None:
        if (more := places - self._depths_BU.shape[1]) > 0:
            self._depths_BU = torch.nn.functional.pad(self._depths_BU, (0, more))
            self.cache.states.reserve(places)

    def commit(self, places_BD: Tensor, counts_B: Tensor, *, in_place: bool = False) -> None:
        """Commit the tokens in the first `counts_B` of `places_BD`, in that order, and drop the rest."""
        last_B1 = places_BD.gather(1, (counts_B[:, None] - 1).clamp(min=0))
        self.cache.states.gather(torch.where(counts_B[:, None] > 0, last_B1 + 1, 0))
        self._read_B += counts_B
        super().commit(places_BD, counts_B, in_place=in_place)

    def rearrange(self, places_BD: Tensor) -> None:
        """Move uncommitted tokens to the first uncommitted places, in that order; they stay uncommitted."""
        self.cache.states.gather(torch.nn.functional.pad(places_BD + 1, (1, 0)))
        self._depths_BU[:, : places_BD.shape[1]] = self._depths_BU.gather(1, places_BD)
        super().rearrange(places_BD)

    def advance(self, counts_B: Tensor) -> None:
        """Commit the first `counts_B` uncommitted tokens of each row in place."""
        self._shift(counts_B)
        super().advance(counts_B)

    def _shift(self, counts_B: Tensor) -> None:
        """Commit the states of the first `counts_B` places, and shift those behind them."""
        places = self._depths_BU.shape[1]
        index_BX = (torch.arange(places + 1, device=self.device) + counts_B[:, None]).clamp(max=places)
        self.cache.states.gather(index_BX)
        self._read_B += counts_B
        if places:
            self._depths_BU.copy_(self._depths_BU.gather(1, index_BX[:, :-1].clamp(max=places - 1)) - counts_B[:, None])

    def keepable(self, lengths: Sequence[int]) -> list[int]:
        """Return the lengths, with 0 for rows whose state does not belong to that length: they must be read again."""
        # Only the device knows: a round launched ahead, after the text's end, has advanced the state.
        return [length if length == read else 0 for length, read in zip(lengths, self._read_B.tolist(), strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set the number of committed tokens per row: cut rows, or commit tokens that were read after them."""
        more = [max(length - held, 0) for length, held in zip(lengths, self.lengths, strict=True)]
        if any(more):
            self._shift(torch.tensor(more, device=self.device))
        for row, length in enumerate(lengths):
            if length == 0:
                self.cache.states.forget(row)
                self._read_B[row] = 0
        super().rewind(lengths)

    def adopt(self, other: Context) -> bool:
        """Take over the storage of another context of the same model; return whether it fits."""
        if not isinstance(other, RecurrentContext) or not super().adopt(other):
            return False
        self._depths_BU = other._depths_BU
        return True

    @property
    def divisible(self) -> bool:
        """Never: states cannot be shared by part, so all rows read together."""
        return False

    def prefill(self, texts: Sequence[Sequence[int]], observer: Observer | None = None) -> None:
        """Read known tokens at the end of each row's committed text, and pass their features to the observer."""
        self.span = None
        longest = max(map(len, texts))
        # Without resuming, read as much as possible at once, as `generate` does: token by token is many times slower.
        chunk = PREFILL_CHUNK if self.model.resumes else max(longest, 1)
        for done in range(0, longest, chunk):
            parts = [list(text[done : done + chunk]) for text in texts]
            counts = [len(part) for part in parts]
            size = max(counts)
            tokens_BT = torch.tensor([part + [0] * (size - len(part)) for part in parts], device=self.device)
            self.reserve(max(self.lengths) + size)
            read_B, counts_B = self._read_B.clone(), torch.tensor(counts, device=self.device)
            # If the pass is interrupted, it is unknown how many tokens the states have read.
            self._read_B.masked_fill_(counts_B > 0, -1)
            self._counts = counts
            # Only the device knows which rows have a state to continue from.
            self._singly = [False] * self.batch_size if self.model.resumes else [read != 0 for read in read_B.tolist()]
            try:
                features_BTF = self.extend(tokens_BT, causal_block(self.batch_size, size, self.device))
            finally:
                self._counts = None
            self._read_B.copy_(read_B + counts_B)
            if observer is not None:
                observer(slice(0, self.batch_size), self.lengths, counts, features_BTF)
            super().rewind([length + count for length, count in zip(self.lengths, counts, strict=True)])
