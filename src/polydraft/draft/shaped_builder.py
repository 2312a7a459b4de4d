"""What builders of dynamic trees have in common: the limits of a shape, and how candidates are ranked."""

import dataclasses

from torch import Tensor

from polydraft.draft.builder import DistributionBuilder, DraftDistributions
from polydraft.draft.growth import Grown, Passes
from polydraft.draft.policy import FAIR, Belief
from polydraft.draft.source import DistributionSource
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import DynamicShape


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
        self._distributions = DraftDistributions(source, self._draft_params(params), vocab_size)
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
