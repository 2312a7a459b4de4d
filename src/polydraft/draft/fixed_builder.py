"""Dynamic trees of a fixed size, for one text at temperature 0 on a GPU: rounds are captured, and kernels grow the trees."""

import dataclasses

import torch
from torch import Tensor

from polydraft.draft.builder import DistributionBuilder, DraftDistributions
from polydraft.draft.growth import Expand, Grown, Passes, grow_likeliest
from polydraft.draft.policy import FAIR
from polydraft.draft.source import DistributionSource
from polydraft.operations import Form
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import Block, DraftTree, DynamicShape
from polydraft.verify import SCHEMES


def ranking_params(params: RowParams, draft_temperature: float | None, greedy: float = FAIR.greedy_temperature) -> RowParams:
    """Return the rows' parameters for ranking candidates; `greedy` replaces a target temperature of 0."""

    def ranking(row: SamplingParams) -> SamplingParams:
        temperature = draft_temperature or row.temperature or greedy
        if row.temperature > 0:
            return dataclasses.replace(row, temperature=temperature)
        return dataclasses.replace(row, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)

    return params.map(ranking)


class FixedBuilder(DistributionBuilder):
    """Grow trees of the likeliest candidates, with as many levels and nodes as the shape allows.

    Candidates are chosen by rank, not drawn, so naive sampling is an exact verification at any temperature. At temperature 0
    no exact verifier accepts more.

    Parameters
    ----------
    source : DistributionSource
    shape : DynamicShape
    params : RowParams
        The target's.
    vocab_size : int
        The target's.
    draft_temperature : float, optional
        Temperature of the distributions that rank candidates; by default the target's, or 1 if that is 0.
    """

    asked_scheme = "auto"
    scheme = SCHEMES.get("top")()
    num_uniforms = 0

    def __init__(
        self,
        source: DistributionSource,
        shape: DynamicShape,
        params: RowParams,
        vocab_size: int,
        *,
        draft_temperature: float | None = None,
    ) -> None:
        self.source: DistributionSource = source
        self.shape, self.num_nodes, self.depth = shape, shape.nodes, shape.depth
        self._draft_temperature = draft_temperature
        self._distributions = DraftDistributions(source, self._draft_params(params), vocab_size)
        self._passes = Passes(source.lead, self.places)
        self._grown: Grown | None = None

    @property
    def places(self) -> int:
        """A full front on every level, after the lead."""
        return self.source.lead + 1 + self.shape.beam * (self.shape.depth - 1)

    def _draft_params(self, params: RowParams) -> RowParams:
        return ranking_params(params, self._draft_temperature)

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Pass the likeliest paths through the source, level by level."""
        logits_B1V, source = self.source.logits(self.source.root(tail_B2)), self.source

        def expand(tokens_BW: Tensor, parents_BW: Tensor, block: Block) -> Tensor:
            return source.logits(source.expand(tokens_BW, parents_BW, block))

        self._grown = grow_likeliest(self.shape, self._passes, self._distributions, tail_B2[:, 1], logits_B1V, expand)
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

        return self.shape, self._passes, distributions, root_B, logits_BWV[:, :1], expand

    def places_of(self, path_BD: Tensor) -> Tensor:
        """Return the places that the nodes' levels gave them; any place for nodes without children."""
        assert self._grown is not None, "build() comes first"
        return self._grown.places_BN.gather(1, path_BD)
