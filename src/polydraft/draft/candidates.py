"""Candidates of a dynamic tree, level by level; `polydraft.draft.growth` makes the tree of those that are kept.

Where the target is greedy the likeliest children are chosen. Where it draws they are drawn: how many follows from the
distributions before they are drawn, which of them get children after.
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
"""Taken off the score at each level, in nats: among equals the shallower stands first, so that parents precede children."""

_WIDEST = 16
_FRONT, _DEEP = 2, 4
"""Nodes of a level below the first that draw, and children of each, at most. More nodes brought fewer tokens than they cost."""
_FIXED_POINT = 2.0**32


@dataclass(frozen=True, eq=False)
class Level:
    """Candidates of one depth; X of them a row."""

    tokens_BX: Tensor
    parents_BX: Tensor
    """Which of the nodes that drew is each one's parent."""
    scores_BX: Tensor
    """Logarithm of the path's chance by the draft; −∞ where a candidate is not worth children, or is none."""

    def masked(self, keep_B: Tensor) -> "Level":
        """Leave the candidates of some rows out."""
        keep_B1 = keep_B[:, None]
        return replace(
            self,
            tokens_BX=self.tokens_BX.where(keep_B1, NO_TOKEN),
            scores_BX=self.scores_BX.where(keep_B1, -torch.inf),
        )


@dataclass(frozen=True, eq=False)
class Front:
    """The best few candidates of a level, which go through the draft; W of them a row."""

    places_BW: Tensor
    """Which of the level's candidates."""
    tokens_BW: Tensor
    parents_BW: Tensor
    scores_BW: Tensor

    @classmethod
    def of(cls, level: Level, width: int) -> "Front":
        """Pick the likeliest."""
        scores_BW, places_BW = best(level.scores_BX, width)
        tokens_BW = level.tokens_BX.gather(1, places_BW).where(scores_BW > -torch.inf, NO_TOKEN)
        return cls(places_BW, tokens_BW, level.parents_BX.gather(1, places_BW), scores_BW)

    @property
    def mass_B(self) -> Tensor:
        """Chance that the accepted path comes through one of them, by the draft."""
        return total(self.scores_BW.exp())

    def inherit(self, values_BWX: Tensor) -> Tensor:
        """Return each node's parent's row of what the front above has."""
        return values_BWX.gather(1, self.parents_BW[..., None].expand(-1, -1, values_BWX.shape[-1]))

    def see(self, above_BWU: Tensor) -> Tensor:
        """Return what each node sees, given what the front above sees: as its parent, and itself."""
        parents_BWU = self.inherit(above_BWU)
        itself_WW = torch.eye(parents_BWU.shape[1], dtype=torch.bool, device=above_BWU.device)
        return torch.cat([parents_BWU, itself_WW.expand(len(parents_BWU), -1, -1)], -1)


def best(values_BX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row in order, and where they are; of equal ones the first comes first."""
    value_BX, place_BX = values_BX.sort(dim=1, descending=True, stable=True)
    return value_BX[:, :count], place_BX[:, :count]


def total(table_RC: Tensor) -> Tensor:
    """Sum each row of float64 numbers below a million; order, padding and other rows change no bit of the result.

    The numbers are rounded to a fixed number of binary places first, so that the sum itself needs no rounding.
    """
    return (table_RC * _FIXED_POINT).round().sum(-1) / _FIXED_POINT


def best_children(scores_BW: Tensor, probs_BWV: Tensor, branch: int, most: int) -> Level:
    """Return the best `most` children of W nodes per row, `branch` per node at most; tokens are columns."""
    rows = len(scores_BW)
    value_RK, column_RK = largest(probs_BWV.flatten(0, 1), branch)
    children_BX = (scores_BW.reshape(-1, 1) + value_RK.log() - STEP).reshape(rows, -1)
    scores_BX, index_BX = best(children_BX.where(~children_BX.isnan(), -torch.inf), most)
    tokens_BX = column_RK.reshape(rows, -1).gather(1, index_BX)
    return Level(tokens_BX.where(scores_BX > -torch.inf, NO_TOKEN), index_BX // value_RK.shape[1], scores_BX)


@dataclass(frozen=True)
class Widths:
    """One level: at most so many nodes draw at most so many children each."""

    nodes: int
    children: int

    @property
    def total(self) -> int:
        """Candidates of the level, at most."""
        return self.nodes * self.children


def room_of_levels(shape: DynamicShape, widest: int) -> tuple[Widths, ...]:
    """Return how much each level may draw; what it does draw is decided round by round."""
    room = shape.nodes - 1
    levels = [Widths(1, min(_WIDEST, widest, room))]
    while len(levels) < shape.depth:
        levels.append(Widths(min(_FRONT, shape.beam, levels[-1].total), min(_DEEP, widest, room)))
    return tuple(levels)


def fixed_shares(shape: DynamicShape, levels: tuple[Widths, ...]) -> tuple[int, ...]:
    """Return how many candidates each level has in trees that use their limits up: thick near the root, all levels there."""
    shares, left = list[int](), shape.nodes - 1
    for number, level in enumerate(levels):
        below = len(levels) - 1 - number
        share = left if below == 0 else min(max(round(0.4 * left), 1), left - below)
        shares.append(min(share, level.total))
        left -= shares[-1]
    return tuple(shares)


def gains(value_RK: Tensor, chances_BW: Tensor, belief: Belief = FAIR) -> Tensor:
    """Return the expected accepted tokens that one more child of each node brings, `[B, W, K]`, falling in K.

    `value_RK` holds the K largest probabilities of each node's distribution, R = B · W. With S the draft's mass on its n
    likeliest tokens, u = `belief.share(n)`, n children are accepted with chance S + u (1 − S).
    """
    mass_RK = value_RK.cumsum(-1)
    accepted_RK = mass_RK + _shares(belief, value_RK.shape[1], value_RK.device) * (1 - mass_RK)
    more_RK = accepted_RK.diff(dim=1, prepend=accepted_RK.new_zeros(len(accepted_RK), 1))
    # Falling, so that the best candidates are the first children of their nodes. NaNs are left to the walk.
    more_RK = more_RK.nan_to_num(0.0).cummin(-1).values.clamp(min=0.0)
    return more_RK.view(*chances_BW.shape, -1) * chances_BW[..., None]


@cache
def _shares(belief: Belief, children: int, device: torch.device) -> Tensor:
    """Return `belief.share` of 1, 2, ... children; made once, because no capture may contain a copy from the host."""
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

    Candidates stand parent by parent, in draw order. How many a node draws may depend on its distribution and on all that was
    drawn above it, but not on what is drawn here. Of rows in `greedy_B` the candidates are the likeliest tokens.
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
    """Say what drawn children are worth.

    They are a handful, on the host: Python's numbers take a tenth of the time of as many small tensors.
    """
    rows, nodes = scores_BW.shape
    count, worth = children_RK.shape[1], list[float]()
    probs_RK = probs_RV.gather(1, children_RK.clamp(min=0))
    for score, tokens, probs in zip(scores_BW.flatten().tolist(), children_RK.tolist(), probs_RK.tolist(), strict=True):
        # A token drawn twice is walked to by its first copy, so only that one can be worth something.
        own = {token: prob for token, prob in zip(reversed(tokens), reversed(probs), strict=True) if token != NO_TOKEN}
        spare = max(1 - sum(own.values()), 0.0) * belief.share(count - tokens.count(NO_TOKEN)) / max(len(own), 1)
        for token in tokens:
            chance = own.pop(token, 0.0) + spare if token in own else 0.0
            worth.append(score + log(chance) - STEP if chance > 0 else -inf)
    parents_BX = torch.arange(nodes).repeat_interleave(count).expand(rows, -1)
    return Level(children_RK.reshape(rows, -1), parents_BX, torch.tensor(worth, dtype=torch.float64).view(rows, -1))
