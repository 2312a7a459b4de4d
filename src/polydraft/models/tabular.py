"""A model whose next-token distributions are a table: known exactly, for tests and teaching."""

import copy
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.models.language_model import Context, LanguageModel
from polydraft.models.storage import Copies, Pieces, Storage


class TabularModel(LanguageModel):
    """An n-gram model defined by its table of logits.

    Parameters
    ----------
    logits : Tensor
        Shape `[V] * order + [V]`: logits of the next token, indexed by the last `order` tokens, oldest first. Texts are
        preceded by tokens 0.
    """

    def __init__(self, logits: Tensor, name: str = "tabular", max_positions: int | None = None) -> None:
        self.name, self.device, self.max_positions = name, logits.device, max_positions
        self.vocab_size = logits.shape[-1]
        self.order = logits.dim() - 1
        self.logits_XV = logits.reshape(-1, self.vocab_size)
        """The table, with one row per sequence of `order` tokens."""

    @classmethod
    def random(cls, vocab_size: int, order: int, seed: int, sharpness: float = 1.6) -> "TabularModel":
        """Make a random table. With 32 tokens, sharpness 1.6 gives an entropy of about 2.7 nats, and 2.5 about 2 nats."""
        generator = torch.Generator().manual_seed(seed)
        shape = [vocab_size] * (order + 1)
        return cls(sharpness * torch.randn(shape, generator=generator, dtype=torch.float64))

    def mixed_with(self, other: "TabularModel", share: float) -> "TabularModel":
        """Blend the logits with those of another table of the same shape, for a draft that partly agrees with this model."""
        logits_XV = share * self.logits_XV + (1 - share) * other.logits_XV
        return TabularModel(logits_XV.reshape([self.vocab_size] * (self.order + 1)), name="tabular-draft")

    def start(self, batch_size: int, capacity: int) -> "TabularContext":
        """Return an empty context."""
        return TabularContext(self, batch_size, capacity)

    def head(self, features_RF: Tensor) -> Tensor:
        """Return the features, which are logits already."""
        return features_RF

    def logits_after(self, text: list[int]) -> Tensor:
        """Return the next token's logits after `text`, for tests: no context, mask or tree is involved."""
        recent = ([0] * self.order + text)[-self.order :]
        index = 0
        for token in recent:
            index = index * self.vocab_size + token
        return self.logits_XV[index]

    def look_up(self, recent_BTO: Tensor) -> Tensor:
        """Return the logits that follow the last `order` tokens, which come oldest first."""
        index_BT = torch.zeros_like(recent_BTO[..., 0])
        for position in range(self.order):
            index_BT = index_BT * self.vocab_size + recent_BTO[..., position]
        return self.logits_XV[index_BT]


class TabularContext(Context):
    """Stores the tokens themselves and finds them by mask and positions only, so that errors in either show."""

    elastic = True
    cache: "TokenSlots"

    def __init__(self, model: TabularModel, batch_size: int, capacity: int) -> None:
        cache = TokenSlots(torch.zeros(batch_size, capacity, dtype=torch.long, device=model.device))
        super().__init__(model, cache, batch_size, capacity, model.device, model.max_positions)
        self._model = model

    def _forward(self, tokens_BT: Tensor, positions_BT: Tensor, slots_BT: Tensor, visible_BTS: Tensor) -> Tensor:
        self.cache.tokens_BS[self._rows_B1, slots_BT] = tokens_BT
        used = visible_BTS.shape[2]
        slot_tokens_BTS = self.cache.tokens_BS[:, None, :used].expand_as(visible_BTS)
        recent = []
        for back in range(self._model.order):
            wanted_BT1 = (positions_BT - back)[:, :, None]
            there_BTS = visible_BTS & (self.positions_BS[:, None, :used] == wanted_BT1)
            slot_BT1 = there_BTS.to(torch.uint8).argmax(-1, keepdim=True)
            token_BT = slot_tokens_BTS.gather(2, slot_BT1)[..., 0]
            recent.append(torch.where(there_BTS.any(-1), token_BT, 0))
        return self._model.look_up(torch.stack(recent[::-1], dim=-1))


class TokenSlots(Storage):
    """Slots that hold tokens."""

    ROW_STATE = ("tokens_BS",)

    def __init__(self, tokens_BS: Tensor) -> None:
        self.tokens_BS = tokens_BS

    @property
    def address(self) -> int:
        """Where the tokens begin."""
        return self.tokens_BS.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return int(self.every_row("tokens_BS").nbytes)

    def move(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Copy slots within each row."""
        self.tokens_BS.scatter_(1, target_BD, self.tokens_BS.gather(1, source_BD))

    def grow(self, capacity: int) -> None:
        """Enlarge the storage, keeping its content."""
        whole_BS = self.every_row("tokens_BS")
        grown_BS = functional.pad(whole_BS, (0, capacity - whole_BS.shape[1]))
        self.tokens_BS = self.keep_rows("tokens_BS", grown_BS, len(self.tokens_BS))

    def part(self, rows: slice) -> Self:
        """Return some adjacent rows, sharing the storage."""
        part = copy.copy(self)
        part.tokens_BS = self.tokens_BS[rows]
        return part

    def copied(self, row: int, start: int, stop: int) -> Copies:
        """Return a copy of some adjacent slots of a row."""
        return {"tokens": self.tokens_BS[row, start:stop].clone()}

    def paste(self, row: int, pieces: Pieces, rows: int) -> None:
        """Write copied slots into the first slots of a row."""
        done = 0
        for copies, count in pieces:
            self.tokens_BS[row, done : done + count] = copies["tokens"][:count]
            done += count
