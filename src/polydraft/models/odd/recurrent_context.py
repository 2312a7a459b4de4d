"""The memory of a batch in a model with recurrent layers: keys and values in slots, and a state for each node of a tree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.models.language_model import PREFILL_CHUNK, Context, Observer
from polydraft.models.odd.levels import HybridCache, Mixers, NodeStates, Step, level_steps, text_steps
from polydraft.trees import Block, causal_block


class RecurrentContext(HFContext):
    """Keys and values, and states: one of the committed text per row, and one for each uncommitted place.

    Layers with attention see a tree by its mask, as ever. Recurrent ones read it level by level, each node from its parent's
    state; to commit a path is to keep the state of its last node. A prompt is read in a row, which leaves one state only; where
    the model's scan takes no state to begin with (`HFModel.resumes`), only its first part is, and the rest token by token.
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
        """How many tokens each state of committed text has read, -1 where nobody knows: only such a text can go on."""
        self._counts: Sequence[int] | None = None
        """Tokens per row of a text that is being read."""
        self._singly: Sequence[bool] = ()
        """Whether recurrent layers must read them one by one."""

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
        """Let passes see so many slots; what rounds leave behind stays where it is from now on."""
        self._make_places(self.places)
        return super().fix_span(span)

    def _make_places(self, places: int) -> None:
        if (more := places - self._depths_BU.shape[1]) > 0:
            self._depths_BU = torch.nn.functional.pad(self._depths_BU, (0, more))
            self.cache.states.reserve(places)

    def commit(self, places_BD: Tensor, counts_B: Tensor, *, in_place: bool = False) -> None:
        """Keep the tokens in the first `counts_B` of `places_BD` as committed text, in that order; drop the rest."""
        last_B1 = places_BD.gather(1, (counts_B[:, None] - 1).clamp(min=0))
        self.cache.states.gather(torch.where(counts_B[:, None] > 0, last_B1 + 1, 0))
        self._read_B += counts_B
        super().commit(places_BD, counts_B, in_place=in_place)

    def rearrange(self, places_BD: Tensor) -> None:
        """Move uncommitted tokens to the first uncommitted places, in that order; they stay uncommitted where they stand."""
        self.cache.states.gather(torch.nn.functional.pad(places_BD + 1, (1, 0)))
        self._depths_BU[:, : places_BD.shape[1]] = self._depths_BU.gather(1, places_BD)
        super().rearrange(places_BD)

    def advance(self, counts_B: Tensor) -> None:
        """Keep the first `counts_B` uncommitted tokens of each row where they are."""
        self._shift(counts_B)
        super().advance(counts_B)

    def _shift(self, counts_B: Tensor) -> None:
        """Let the states of the first places be those of committed text; what is behind them comes nearer."""
        places = self._depths_BU.shape[1]
        index_BX = (torch.arange(places + 1, device=self.device) + counts_B[:, None]).clamp(max=places)
        self.cache.states.gather(index_BX)
        self._read_B += counts_B
        if places:
            self._depths_BU.copy_(self._depths_BU.gather(1, index_BX[:, :-1].clamp(max=places - 1)) - counts_B[:, None])

    def keepable(self, lengths: Sequence[int]) -> list[int]:
        """Return how many of so many committed tokens can be kept: all, or none where there is no state to go on from."""
        # Only the device knows: a round that ran ahead of a text's end has moved its state on.
        return [length if length == read else 0 for length, read in zip(lengths, self._read_B.tolist(), strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cut rows to the given numbers of committed tokens, or keep what was read behind them."""
        more = [max(length - held, 0) for length, held in zip(lengths, self.lengths, strict=True)]
        if any(more):
            self._shift(torch.tensor(more, device=self.device))
        for row, length in enumerate(lengths):
            if length == 0:
                self.cache.states.forget(row)
                self._read_B[row] = 0
        super().rewind(lengths)

    def adopt(self, other: Context) -> bool:
        """Take over the storage of another context of the same model."""
        if not isinstance(other, RecurrentContext) or not super().adopt(other):
            return False
        self._depths_BU = other._depths_BU
        return True

    @property
    def divisible(self) -> bool:
        """Rows read together: states have no parts."""
        return False

    def prefill(self, texts: Sequence[Sequence[int]], observer: Observer | None = None) -> None:
        """Append tokens known beforehand to each row's committed text, showing their features to the observer."""
        self.span = None
        longest = max(map(len, texts))
        # As much as possible from the beginning, as `generate` does: it costs a multiple later on.
        chunk = PREFILL_CHUNK if self.model.resumes else max(longest, 1)
        for done in range(0, longest, chunk):
            parts = [list(text[done : done + chunk]) for text in texts]
            counts = [len(part) for part in parts]
            size = max(counts)
            tokens_BT = torch.tensor([part + [0] * (size - len(part)) for part in parts], device=self.device)
            self.reserve(max(self.lengths) + size)
            read_B, counts_B = self._read_B.clone(), torch.tensor(counts, device=self.device)
            # After an interrupted pass it is unknown how many tokens the states have read.
            self._read_B.masked_fill_(counts_B > 0, -1)
            self._counts = counts
            # Only the device knows which rows have a state to read on from.
            self._singly = [False] * self.batch_size if self.model.resumes else [read != 0 for read in read_B.tolist()]
            try:
                features_BTF = self.extend(tokens_BT, causal_block(self.batch_size, size, self.device))
            finally:
                self._counts = None
            self._read_B.copy_(read_B + counts_B)
            if observer is not None:
                observer(slice(0, self.batch_size), self.lengths, counts, features_BTF)
            super().rewind([length + count for length, count in zip(self.lengths, counts, strict=True)])
