"""A head that drafts several levels by one pass, as a source of distributions."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polydraft.draft.head_source import HeadSource
from polydraft.models.heads.parallel_head import ParallelHead
from polydraft.trees import Block

if TYPE_CHECKING:
    from polydraft.models.heads.parallel_context import ParallelContext


class ParallelSource(HeadSource):
    """A parallel head's memory of one batch: the pass at the root gives the distributions of all levels.

    The distribution of a level is one token's, given the text alone: all nodes of the level draw from it, whatever lies above
    them. So it is what children are drawn from, as every verifier assumes.
    """

    _head: ParallelHead
    _context: "ParallelContext"

    def __init__(self, head: ParallelHead, batch_size: int) -> None:
        super().__init__(head, batch_size)
        self._outputs_BDH = self._logits_BDV = torch.empty(0)
        """Outputs and logits of all levels; within a round."""
        self._level = 0

    def make_room(self, *, places: int, depth: int, captured: bool) -> None:
        """Make room for the one pass instead of one per level."""
        super().make_room(places=self._head.shape.depths + 1, depth=depth, captured=captured)

    def _read_fresh(self) -> Tensor:
        """Read the fresh entries and the levels below; all logits come from one product with the output table."""
        self._outputs_BDH = self._context.draft(self._tokens_BW, self._fused_fresh(), self._fresh_B)
        self._logits_BDV, self._level = self._head.head(self._outputs_BDH), 0
        self._context.advance((self._fresh_B - 1).clamp(min=0))
        return self._outputs_BDH[:, :1]

    def expand(self, tokens_BW: Tensor, parents: Tensor, block: Block) -> Tensor:
        """Return the next level's output, for each of its nodes."""
        self._level += 1
        return self._outputs_BDH[:, self._level : self._level + 1].expand(-1, tokens_BW.shape[1], -1)

    def logits(self, features_BWF: Tensor) -> Tensor:
        """Return the logits of the level at hand, for each of its nodes."""
        return self._logits_BDV[:, self._level : self._level + 1].expand(-1, features_BWF.shape[1], -1)
