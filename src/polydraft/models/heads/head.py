"""The interface of drafts that read the target's hidden states."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polydraft.sampling import PartialVocabulary

if TYPE_CHECKING:
    from polydraft.models.heads.head_context import Entries


class Head(nn.Module, ABC):
    """Predict the target's next hidden state and, through an output head, the token after the next.

    Entry i of a text is the pair of the target's features at position i and the token at i + 1. Inside a tree the target's
    features are not known yet; the head's own output for the parent replaces them.
    """

    name: str
    hidden_size: int
    """Size of its outputs, and of the target's features once they are fused."""
    taps: tuple[int, ...]
    """Layers of the target, counted from 1, whose outputs it reads besides the last hidden states."""
    depths: int | None = None
    """Levels drafted by one pass; None if every level takes a pass of its own."""
    lacks: str | None = None
    """Why it does not work with beams and `analyze`, to follow its name in messages; None if it does."""
    vocabulary: PartialVocabulary | None
    """Tokens that the columns of `head` stand for, if it knows only some."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the head computes."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Number format of its weights."""

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """Tokens it can draft."""

    @abstractmethod
    def fused(self, features_RF: Tensor) -> Tensor:
        """Bring the target's features, taps included, into the space of the head's own outputs."""

    @abstractmethod
    def head(self, outputs_RH: Tensor) -> Tensor:
        """Turn outputs into logits."""

    @abstractmethod
    def start(self, batch_size: int, capacity: int) -> "Entries":
        """Return an empty context for `batch_size` texts with room for `capacity` entries each."""
