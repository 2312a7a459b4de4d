"""An int8 copy of the target as a draft, working in the target's own cache."""

import copy
from functools import lru_cache

import torch
from torch import Tensor

from polydraft.draft.source import DistributionSource
from polydraft.models import Context
from polydraft.models.hf_context import HFContext
from polydraft.models.int8_copy import Int8Copy
from polydraft.trees import Block, causal_block


class CopySource(DistributionSource):
    """A copy that reads the target's keys and values, and writes its own where the target's next pass will overwrite them.

    It has nothing to read, commit or catch up on: the copy continues from whatever the target's cache holds.
    """

    follows_any_path = movable = True
    keeps_text = False

    def __init__(self, model: Int8Copy) -> None:
        super().__init__(model.device, model.vocabulary)
        self._model = model
        self._context: HFContext | None = None
        self._checked = False

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Ask for room in the target's cache."""
        self.borrowed_places = places

    def borrow(self, context: Context) -> None:
        """Work in this cache from now on."""
        assert isinstance(context, HFContext), context
        self._context = context

    def root(self, tail_B2: Tensor) -> Tensor:
        """Pass the pending token."""
        return self._extend(tail_B2[:, 1:], _root(len(tail_B2), self.device))

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        """Pass a level."""
        return self._extend(tokens_BW, block)

    def _extend(self, tokens_BT: Tensor, block: Block) -> Tensor:
        assert self._context is not None, "borrow() comes first"
        # A shallow copy: it shares the slots, in whatever state they are now.
        own = copy.copy(self._context)
        own.model, own.checked = self._model, self._checked
        features_BTF = own.extend(tokens_BT, block)
        self._checked = own.checked
        return features_BTF

    def logits(self, features_BWF: Tensor) -> Tensor:
        """Apply the output head."""
        return self._model.head(features_BWF)


@lru_cache(maxsize=64)
def _root(rows: int, device: torch.device) -> Block:
    """Return the pass over the pending token of some rows."""
    return causal_block(rows, 1, device)
