"""Dynamic trees of a fixed size, for one text at temperature 0 on a GPU: rounds are captured, and kernels grow the trees."""

import torch
from torch import Tensor

from polydraft.draft.builder import DraftDistributions
from polydraft.draft.growth import Expand, Grown, Passes, grow_likeliest
from polydraft.draft.shaped_builder import ShapedBuilder
from polydraft.operations import Form
from polydraft.trees import Block, DraftTree, DynamicShape
from polydraft.verify import SCHEMES


class FixedBuilder(ShapedBuilder):
    """Grow trees of the likeliest candidates, with as many levels and nodes as the shape allows.

    Candidates are chosen by rank, not drawn, so naive sampling is an exact verification at any temperature. At temperature 0
    no exact verifier accepts more.

    Parameters
    ----------
    source, shape, params, vocab_size, draft_temperature
        As for `ShapedBuilder`.
    """

    scheme = SCHEMES.get("top")()
    num_uniforms = 0

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Pass the likeliest paths through the source, level by level."""
        logits_B1V, source = self.source.logits(self.source.root(tail_B2)), self.source

        def expand(tokens_BW: Tensor, parents_BW: Tensor, block: Block) -> Tensor:
            return source.logits(source.expand(tokens_BW, parents_BW, block))

        self._grown = grow_likeliest(self.shape, self.passes, self._distributions, tail_B2[:, 1], logits_B1V, expand)
        return self._grown.draft

    def form(self, dtype: torch.dtype) -> Form[..., Grown] | None:
        """Return the backend's form of growth for these rows and logits of this dtype; None for the reference."""
        return grow_likeliest.chosen(*self._made_up(dtype))

    def made_up(self, dtype: torch.dtype) -> DraftTree:
        """Grow a tree from uniform logits."""
        return grow_likeliest(*self._made_up(dtype)).draft

    def _made_up(self, dtype: torch.dtype) -> tuple[DynamicShape, Passes, DraftDistributions, Tensor, Tensor, Expand]:
        distributions, rows = self._distributions, len(self._distributions.params)
        size = rows, self.shape.beam, distributions.num_columns
        logits_BWV = torch.zeros(size, dtype=dtype, device=self.source.device)
        root_B = torch.zeros(rows, dtype=torch.long, device=self.source.device)

        def expand(tokens_BW: Tensor, parents_BW: Tensor, block: Block) -> Tensor:
            return logits_BWV[:, : tokens_BW.shape[1]]

        return self.shape, self.passes, distributions, root_B, logits_BWV[:, :1], expand
