"""Candidates of a dynamic tree, level by level; `polydraft.draft.growth` makes a tree of the ones that are kept.

If the target is greedy, the likeliest children are chosen. If it samples, children are drawn: how many is decided from the
distributions before drawing, and which of them get children is decided afterwards.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import inf, log

import torch
from torch import Tensor

from polydraft.draft.policy import FAIR, Belief
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DynamicShape
from polydraft.verify import Scheme
from polydraft.verify.weights import largest

STEP = 1e-3
"""Subtracted from the score at each level, in nats: of equal nodes the shallower sorts first, so parents precede children."""

_WIDEST = 16
_FRONT, _DEEP = 2, 4
"""Most nodes that draw on levels below the first, and most children of each. More nodes brought fewer tokens than they cost."""
_FIXED_POINT = 2.0**32


@dataclass(frozen=True, eq=False)
class Level:
    """Candidates at one depth, X per row."""

    tokens_BX: Tensor
    parents_BX: Tensor
    """Each candidate's parent, as an index into the nodes that drew."""
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


@dataclass(frozen=True)
class Widths:
    """Limits of one level: how many nodes draw, and how many children each."""

    nodes: int
    children: int

    @property
    def total(self) -> int:
        """Most candidates of the level."""
        return self.nodes * self.children


def room_of_levels(shape: DynamicShape, widest: int) -> tuple[Widths, ...]:
    """Return how much each level may draw at most; how much it does is decided in each round."""
    room = shape.nodes - 1
    levels = [Widths(1, min(_WIDEST, widest, room))]
    while len(levels) < shape.depth:
        levels.append(Widths(min(_FRONT, shape.beam, levels[-1].total), min(_DEEP, widest, room)))
    return tuple(levels)


def fixed_shares(shape: DynamicShape, levels: tuple[Widths, ...]) -> tuple[int, ...]:
    """Return how many candidates each level has in a tree that uses up its limits: most near the root, some on every level."""
    shares, left = list[int](), shape.nodes - 1
    for number, level in enumerate(levels):
        below = len(levels) - 1 - number
        share = left if below == 0 else min(max(round(0.4 * left), 1), left - below)
        shares.append(min(share, level.total))
        left -= shares[-1]
    return tuple(shares)


def gains(value_RK: Tensor, chances_BW: Tensor, belief: Belief = FAIR) -> Tensor:
    """Return how many accepted tokens one more child of each node is expected to bring, `[B, W, K]`, falling in K.

    `value_RK` holds the K largest probabilities of each node's distribution, R = B · W. With S the draft's mass on its n
    likeliest tokens and u = `belief.share(n)`, one of n children is accepted with probability S + u (1 − S).
    """
    mass_RK = value_RK.cumsum(-1)
    accepted_RK = mass_RK + _shares(belief, value_RK.shape[1], value_RK.device) * (1 - mass_RK)
    more_RK = accepted_RK.diff(dim=1, prepend=accepted_RK.new_zeros(len(accepted_RK), 1))
    # Falling, so that a node's first children are its best. The walk deals with NaNs.
    more_RK = more_RK.nan_to_num(0.0).cummin(-1).values.clamp(min=0.0)
    return more_RK.view(*chances_BW.shape, -1) * chances_BW[..., None]


@cache
def _shares(belief: Belief, children: int, device: torch.device) -> Tensor:
    """Return `belief.share` for 1, 2, ... children; cached, because a capture may not contain a copy from the host."""
    return torch.tensor([belief.share(count + 1) for count in range(children)], dtype=torch.float64, device=device)


def drawn_children(
    scheme: Scheme,
    scores_BW: Tensor,
    probs_BWV: Tensor,
    ranked: tuple[Tensor, Tensor],
    counts_BW: Tensor,
    uniforms_BU: Tensor,
    greedy_B: Tensor | None = None,
    belief: Belief = FAIR,
) -> Level:
    """Draw the children of W nodes per row, up to K of each; tokens are columns of the distributions.

    Candidates are listed parent by parent, in draw order. How many children a node draws may depend on its distribution and on
    all that was drawn above it, but not on what is drawn here. Rows in `greedy_B` get the likeliest tokens instead.
    """
    rows, nodes, _ = probs_BWV.shape
    probs_RV, counts_R1 = probs_BWV.flatten(0, 1), counts_BW.reshape(-1, 1)
    children_RK = scheme.draw_some(probs_RV, uniforms_BU.reshape(rows * nodes, -1), counts_R1, ranked)
    if greedy_B is not None:
        value_RK, token_RK = (part_RK[:, : children_RK.shape[1]] for part_RK in ranked)
        chosen_RK = (torch.arange(token_RK.shape[1], device=token_RK.device) < counts_R1) & (value_RK > 0)
        children_RK = token_RK.where(chosen_RK, NO_TOKEN).where(greedy_B.repeat_interleave(nodes)[:, None], children_RK)
    return _level(scores_BW, probs_RV, children_RK, belief)


def _level(scores_BW: Tensor, probs_RV: Tensor, children_RK: Tensor, belief: Belief) -> Level:
    """Return drawn children with their scores.

    There are only a few of them, on the host: Python floats take a tenth of the time of small tensors.
    """
    rows, nodes = scores_BW.shape
    count, worth = children_RK.shape[1], list[float]()
    probs_RK = probs_RV.gather(1, children_RK.clamp(min=0))
    for score, tokens, probs in zip(scores_BW.flatten().tolist(), children_RK.tolist(), probs_RK.tolist(), strict=True):
        # If a token was drawn twice, the walk takes the first copy, so only that one is worth anything.
        own = {token: prob for token, prob in zip(reversed(tokens), reversed(probs), strict=True) if token != NO_TOKEN}
        spare = max(1 - sum(own.values()), 0.0) * belief.share(count - tokens.count(NO_TOKEN)) / max(len(own), 1)
        for token in tokens:
            chance = own.pop(token, 0.0) + spare if token in own else 0.0
            worth.append(score + log(chance) - STEP if chance > 0 else -inf)
    parents_BX = torch.arange(nodes).repeat_interleave(count).expand(rows, -1)
    return Level(children_RK.reshape(rows, -1), parents_BX, torch.tensor(worth, dtype=torch.float64).view(rows, -1))
