"""Candidates of a dynamic tree, level by level; `polydraft.draft.growth` makes a tree of the ones that are kept."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.verify.weights import largest

STEP = 1e-3
"""Subtracted from the score at each level, in nats: of equal nodes the shallower sorts first, so parents precede children."""
_FIXED_POINT = 2.0**32


@dataclass(frozen=True, eq=False)
class Level:
    """Candidates at one depth, X per row."""

    tokens_BX: Tensor
    parents_BX: Tensor
    """Each candidate's parent, as an index into the front above."""
    scores_BX: Tensor
    """Log-probability of the path by the draft; −∞ for candidates that should get no children, and for missing ones."""

    def masked(self, keep_B: Tensor) -> "Level":
        """Return the level with candidates in these rows only."""
        keep_B1 = keep_B[:, None]
        return replace(
            self,
            tokens_BX=self.tokens_BX.where(keep_B1, NO_TOKEN),
            scores_BX=self.scores_BX.where(keep_B1, -torch.inf),
        )


@dataclass(frozen=True, eq=False)
class Front:
    """The best candidates of a level, which go through the draft, W per row."""

    places_BW: Tensor
    """Their indices among the level's candidates."""
    tokens_BW: Tensor
    parents_BW: Tensor
    scores_BW: Tensor

    @classmethod
    def of(cls, level: Level, width: int) -> "Front":
        """Pick the likeliest candidates."""
        scores_BW, places_BW = best(level.scores_BX, width)
        tokens_BW = level.tokens_BX.gather(1, places_BW).where(scores_BW > -torch.inf, NO_TOKEN)
        return cls(places_BW, tokens_BW, level.parents_BX.gather(1, places_BW), scores_BW)

    @property
    def mass_B(self) -> Tensor:
        """The draft's probability that the accepted path goes through one of them."""
        return total(self.scores_BW.exp())

    def inherit(self, values_BWX: Tensor) -> Tensor:
        """Return each node's parent's entry of a table over the front above."""
        return values_BWX.gather(1, self.parents_BW[..., None].expand(-1, -1, values_BWX.shape[-1]))

    def see(self, above_BWU: Tensor) -> Tensor:
        """Return what each node sees, given what the front above sees: all that its parent sees, and itself."""
        parents_BWU = self.inherit(above_BWU)
        itself_WW = torch.eye(parents_BWU.shape[1], dtype=torch.bool, device=above_BWU.device)
        return torch.cat([parents_BWU, itself_WW.expand(len(parents_BWU), -1, -1)], -1)


def best(values_BX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row in order, and their indices; equal values stay in their order."""
    value_BX, place_BX = values_BX.sort(dim=1, descending=True, stable=True)
    return value_BX[:, :count], place_BX[:, :count]


def total(table_RC: Tensor) -> Tensor:
    """Sum each row of float64 numbers below a million, to the same bits whatever the order, padding and other rows.

    The numbers are first rounded to fixed point, so that the sum itself is exact.
    """
    return (table_RC * _FIXED_POINT).round().sum(-1) / _FIXED_POINT


def best_children(scores_BW: Tensor, probs_BWV: Tensor, branch: int, most: int) -> Level:
    """Return the best `most` children of W nodes per row, at most `branch` per node; tokens are columns."""
    rows = len(scores_BW)
    value_RK, column_RK = largest(probs_BWV.flatten(0, 1), branch)
    children_BX = (scores_BW.reshape(-1, 1) + value_RK.log() - STEP).reshape(rows, -1)
    scores_BX, index_BX = best(children_BX.where(~children_BX.isnan(), -torch.inf), most)
    tokens_BX = column_RK.reshape(rows, -1).gather(1, index_BX)
    return Level(tokens_BX.where(scores_BX > -torch.inf, NO_TOKEN), index_BX // value_RK.shape[1], scores_BX)
