"""Builders of trees within the limits of a shape: their base, and the one whose trees always reach the limits."""

import dataclasses

import torch
from torch import Tensor

from polydraft.draft.builder import DistributionBuilder, DraftDistributions
from polydraft.draft.growth import Expand, Grown, Passes, grow_likeliest
from polydraft.draft.policy import FAIR, Belief
from polydraft.draft.source import DistributionSource
from polydraft.operations import Form
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import Block, DraftTree, DynamicShape
from polydraft.verify import SCHEMES


def ranking_params(params: RowParams, draft_temperature: float | None, belief: Belief = FAIR) -> RowParams:
    """Return the rows' parameters for ranking candidates; at target temperature 0, `belief` sets the temperature."""

    def ranking(row: SamplingParams) -> SamplingParams:
        temperature = draft_temperature or row.temperature or belief.greedy_temperature
        if row.temperature > 0:
            return dataclasses.replace(row, temperature=temperature)
        return dataclasses.replace(row, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)

    return params.map(ranking)


class ShapedBuilder(DistributionBuilder):
    """A builder of trees within the limits of a shape.

    Parameters
    ----------
    source : DistributionSource
    shape : DynamicShape
    params : RowParams
        The target's.
    vocab_size : int
        The target's.
    draft_temperature : float, optional
        Temperature of the distributions that rank candidates; by default the target's, or the belief's if that is 0.
    belief : Belief
        What to assume of the draft.
    """

    asked_scheme = "auto"

    def __init__(
        self,
        source: DistributionSource,
        shape: DynamicShape,
        params: RowParams,
        vocab_size: int,
        *,
        draft_temperature: float | None = None,
        belief: Belief = FAIR,
    ) -> None:
        self.source: DistributionSource = source
        self.shape, self.num_nodes, self.depth = shape, shape.nodes, shape.depth
        self._draft_temperature, self._belief = draft_temperature, belief
        self._distributions = DraftDistributions(source, self._draft_params(params), vocab_size, belief.greedy_temperature)
        self._grown: Grown | None = None
        """The last tree; None if it is a lone root."""

    def _draft_params(self, params: RowParams) -> RowParams:
        return ranking_params(params, self._draft_temperature, self._belief)

    @property
    def places(self) -> int:
        """A full front on every level, after the lead."""
        return self.source.lead + 1 + self.shape.beam * (self.depth - 1)

    @property
    def passes(self) -> Passes:
        """The places of the draft's passes."""
        return Passes(self.source.lead, self.places)

    def places_of(self, path_BD: Tensor) -> Tensor:
        """Return the places that the nodes' levels gave them; any place for nodes without children."""
        return path_BD + self.source.lead if self._grown is None else self._grown.places_BN.gather(1, path_BD)


class FixedBuilder(ShapedBuilder):
    """Grow trees of a fixed size, for one greedy or coupled text on a GPU: rounds are captured, and kernels grow the trees.

    Candidates are chosen by rank, not drawn, so naive sampling is an exact verification at any temperature. Of a greedy or
    coupled text, no exact verifier accepts more.

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
