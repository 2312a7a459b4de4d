"""The interface of drafts that read the target's hidden states."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polydraft.sampling import PartialVocabulary

if TYPE_CHECKING:
    from polydraft.models.heads.head_context import Entries


class Head(nn.Module, ABC):
    """Predict the target's next hidden state, and by its output head the token after the next.

    Entry i of a text is the pair of the target's features f at position i and of the token at i + 1. Where the features
    are not known yet, inside a tree, the head's own output of the parent takes their place.
    """

    name: str
    hidden_size: int
    """Of its outputs, and of the target's features once they are fused."""
    taps: tuple[int, ...]
    """Layers of the target, counted from 1, whose outputs it reads besides the last hidden states."""
    depths: int | None = None
    """Levels that one pass gives; None where each level takes a pass of its own."""
    lacks: str | None = None
    """What it does not do that beams and `analyze` need; None if it works there too."""
    vocabulary: PartialVocabulary | None
    """Tokens that the columns of `head` stand for, where it does not know all of them."""

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
        """Open an empty memory for `batch_size` texts with room for `capacity` entries each."""
