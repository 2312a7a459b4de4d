"""Candidates of a dynamic tree, level by level; `polydraft.draft.assembly` makes the tree of those that are kept.

Where the target is greedy the likeliest children are chosen. Where it draws they are drawn: how many follows from the
distributions before they are drawn, which of them get children after. All this is many operations on few numbers, so it is
numpy's on a CPU (`polydraft.verify.arrays`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.trees import DynamicShape
from polydraft.verify import Scheme
from polydraft.verify.arrays import (
    Array,
    Ranked,
    arange,
    as_array,
    as_tensor,
    at_least,
    can_sync,
    largest,
    quietly,
    take,
    top,
    total,
    xp,
)

STEP = 1e-3
"""Taken off the score at each level, in nats: among equals the shallower stands first, so that parents precede children."""

_UNLISTED = (0.20, 0.29, 0.335, 0.365, 0.385, 0.395, 0.405)
"""Of the target's mass off the draft's n likeliest tokens, the share that is accepted all the same from n children, by n.

Drawing and coupling bring it. Measured for `hybrid` with the shipped pair: acceptance along 1,033 positions of the target's
own texts at temperature 1 (20 built-in prompts), the same within 0.03 at the first three depths; it stays at the last one.
"""
_WIDEST = 16
_FRONT, _DEEP = 2, 4
"""Nodes of a level below the first that draw, and children of each, at most. More nodes brought fewer tokens than they cost."""


@dataclass(frozen=True, eq=False)
class Level:
    """Candidates of one depth; X of them a row."""

    tokens_BX: Array
    parents_BX: Array
    """Which of the nodes that drew is each one's parent."""
    scores_BX: Array
    """Logarithm of the path's chance by the draft; −∞ where a candidate is not worth children, or is none."""

    def masked(self, keep_B: Array) -> "Level":
        """Leave the candidates of some rows out."""
        where, keep_B1 = xp(keep_B).where, keep_B[:, None]
        return replace(
            self, tokens_BX=where(keep_B1, self.tokens_BX, NO_TOKEN), scores_BX=where(keep_B1, self.scores_BX, -torch.inf)
        )


@dataclass(frozen=True, eq=False)
class Front:
    """The best few candidates of a level, which go through the draft; W of them a row."""

    places_BW: Array
    """Which of the level's candidates."""
    tokens_BW: Array
    parents_BW: Array
    scores_BW: Array

    @classmethod
    def of(cls, level: Level, width: int) -> "Front":
        """Pick the likeliest."""
        scores_BW, places_BW = top(level.scores_BX, min(width, level.scores_BX.shape[1]))
        where = xp(scores_BW).where
        tokens_BW = where(scores_BW > -torch.inf, take(level.tokens_BX, places_BW), NO_TOKEN)
        return cls(places_BW, tokens_BW, take(level.parents_BX, places_BW), scores_BW)

    @property
    def mass_B(self) -> Array:
        """Chance that the accepted path comes through one of them, by the draft."""
        return total(xp(self.scores_BW).exp(self.scores_BW))

    def inherit(self, values_BWX: Array) -> Array:
        """Return each node's parent's row of what the front above has."""
        if len(values_BWX) == 1:
            return values_BWX[:, self.parents_BW[0]]
        return values_BWX[arange(len(values_BWX), self.parents_BW)[:, None], self.parents_BW]

    def see(self, above_BWU: Array) -> Array:
        """Return what each node sees, given what the front above sees: as its parent, and itself."""
        parents_BWU = self.inherit(above_BWU)
        place_W = arange(parents_BWU.shape[1], parents_BWU)
        own_BWW = (place_W[:, None] == place_W) & (parents_BWU[:, :, :1] | True)
        return xp(parents_BWU).concatenate([parents_BWU, own_BWW], -1)


@quietly
def best_children(scores_BW: Array, probs_BWV: Tensor, branch: int, most: int) -> Level:
    """Return the best `most` children of W nodes per row, `branch` per node at most; tokens are columns."""
    (batch_size, width), functions = scores_BW.shape, xp(scores_BW)
    value_RK, column_RK = largest(probs_BWV.flatten(0, 1), branch)
    count = value_RK.shape[1]
    children_BX = (scores_BW.reshape(-1, 1) + functions.log(value_RK) - STEP).reshape(batch_size, width * count)
    children_BX = functions.where(functions.isnan(children_BX), -torch.inf, children_BX)
    scores_BX, index_BX = top(children_BX, min(most, width * count))
    tokens_BX = take(column_RK.reshape(batch_size, width * count), index_BX)
    return Level(functions.where(scores_BX > -torch.inf, tokens_BX, NO_TOKEN), index_BX // count, scores_BX)


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


def even_levels(shape: DynamicShape, widest: int) -> tuple[Widths, ...]:
    """Return how much each level draws where all nodes of a level draw equally many: with all of them a tree fits its limit."""
    room = room_of_levels(shape, widest)
    levels = list[Widths]()
    for level, share in zip(room, fixed_shares(shape, room), strict=True):
        nodes = min(level.nodes, share, levels[-1].total if levels else 1)
        levels.append(Widths(nodes, min(level.children, share // nodes)))
    return tuple(levels)


@quietly
def gains(value_RK: Array, chances_BW: Array) -> Array:
    """Return the expected accepted tokens that one more child of each node brings, `[B, W, K]`, falling in K.

    `value_RK` holds the K largest probabilities of each node's distribution, R = B · W. With S the draft's mass on its n
    likeliest tokens, u as in `_UNLISTED`, n children are accepted with chance S + u (1 − S).
    """
    (batch_size, width), functions = chances_BW.shape, xp(chances_BW)
    count = value_RK.shape[1]
    mass_RK = value_RK.cumsum(-1)
    accepted_RK = mass_RK + _unlisted(chances_BW)[1 : count + 1] * (1 - mass_RK)
    more_RK = functions.concatenate([accepted_RK[:, :1], accepted_RK[:, 1:] - accepted_RK[:, :-1]], 1)
    # Falling, so that whoever takes the best takes the first ones of every node. What is not a number is left to the walk.
    more_RK = at_least(_running_min(functions.where(more_RK == more_RK, more_RK, 0.0)), 0.0)
    return more_RK.reshape(batch_size, width, count) * chances_BW[..., None]


def drawn_children(
    scheme: Scheme,
    scores_BW: Array,
    probs_BWV: Tensor,
    ranked: Ranked,
    counts_BW: Array,
    uniforms_BU: Tensor,
    greedy_B: Array | None = None,
) -> Level:
    """Draw the children of W nodes per row, up to K of each; tokens are columns of the distributions.

    Candidates stand parent by parent, in draw order. How many a node draws may depend on its distribution and on all that was
    drawn above it, but not on what is drawn here. Of rows in `greedy_B` the candidates are the likeliest tokens.
    """
    batch_size, nodes, _ = probs_BWV.shape
    uniforms_RK = uniforms_BU.reshape(batch_size * nodes, -1)
    children_RK = scheme.draw_some(
        probs_BWV.flatten(0, 1), uniforms_RK, as_tensor(counts_BW.reshape(-1, 1)), (as_tensor(ranked[0]), as_tensor(ranked[1]))
    )
    children_RK = as_array(children_RK)
    if greedy_B is not None:
        value_RK, token_RK = (part[:, : children_RK.shape[1]] for part in ranked)
        chosen_RK = (arange(token_RK.shape[1], token_RK) < counts_BW.reshape(-1, 1)) & (value_RK > 0)
        greedy_R1 = (
            greedy_B.repeat(nodes)[:, None] if isinstance(greedy_B, np.ndarray) else greedy_B.repeat_interleave(nodes)[:, None]
        )
        where = xp(children_RK).where
        children_RK = where(greedy_R1, where(chosen_RK, token_RK, NO_TOKEN), children_RK)
    return _level(scores_BW, probs_BWV, children_RK)


def even_children(
    scheme: Scheme, scores_BW: Array, probs_BWV: Tensor, uniforms_BU: Tensor, greedy_B: Array | None = None
) -> Level:
    """Draw as many children of each of W nodes per row as there are random numbers for them; none of nodes of no account."""
    batch_size, nodes, _ = probs_BWV.shape
    probs_RV, uniforms_RK = probs_BWV.flatten(0, 1), uniforms_BU.reshape(batch_size * nodes, -1)
    children_RK, where = as_array(scheme.draw(probs_RV, uniforms_RK)), xp(scores_BW).where
    if greedy_B is not None:
        value_RK, token_RK = largest(probs_RV, uniforms_RK.shape[1])
        greedy_R1 = (greedy_B[:, None] & (scores_BW == scores_BW)).reshape(-1, 1)
        children_RK = where(greedy_R1, where(value_RK > 0, token_RK, NO_TOKEN), children_RK)
    children_RK = where(scores_BW.reshape(-1, 1) > -torch.inf, children_RK, NO_TOKEN)
    return _level(scores_BW, probs_BWV, children_RK)


@quietly
def _level(scores_BW: Array, probs_BWV: Tensor, children_RK: Array) -> Level:
    """Say what drawn children are worth."""
    (batch_size, nodes), functions = scores_BW.shape, xp(scores_BW)
    rows, count = children_RK.shape
    real_RK = children_RK != NO_TOKEN
    # A token drawn twice is walked to by its first copy, so only that one can be worth something.
    number_K = arange(count, children_RK)
    again_RKK = (children_RK[:, :, None] == children_RK[:, None, :]) & (number_K[:, None] > number_K)
    counted_RK = real_RK & ~again_RKK.any(-1)
    mass_RK = _distribution_of(probs_BWV, at_least(children_RK, 0)) * counted_RK
    spare_R1 = at_least(1 - mass_RK.sum(-1, keepdims=True), 0.0) * _unlisted(scores_BW)[real_RK.sum(-1)][:, None]
    spare_R1 = spare_R1 / at_least(counted_RK.sum(-1, keepdims=True), 1)
    chance_RK = functions.where(counted_RK, mass_RK + spare_R1, 0.0)
    scores_BX = (scores_BW.reshape(-1, 1) + functions.log(chance_RK) - STEP).reshape(batch_size, nodes * count)
    scores_BX = functions.where(scores_BX == scores_BX, scores_BX, -torch.inf)
    parents_BX = (0 * children_RK + arange(rows, children_RK)[:, None] % nodes).reshape(batch_size, nodes * count)
    return Level(children_RK.reshape(batch_size, nodes * count), parents_BX, scores_BX)


def _distribution_of(probs_BWV: Tensor, columns_RK: Array) -> Array:
    """Return the distribution's mass on some columns of each node."""
    probs_RV = probs_BWV.flatten(0, 1)
    return take(as_array(probs_RV), columns_RK) if can_sync(probs_RV) else probs_RV.gather(1, columns_RK)


def _unlisted(like: Array) -> Array:
    """Return the shares by number of children, from none on, in the library of `like`."""
    return _shares(None if isinstance(like, np.ndarray) else like.device)


@lru_cache(maxsize=8)
def _shares(device: torch.device | None) -> Array:
    """Make them once a device; numpy's for None."""
    shares = [0.0, *_UNLISTED, *[_UNLISTED[-1]] * (_WIDEST - len(_UNLISTED))]
    return np.array(shares) if device is None else torch.tensor(shares, device=device, dtype=torch.float64)


def _running_min(table_RC: Array) -> Array:
    return np.minimum.accumulate(table_RC, -1) if isinstance(table_RC, np.ndarray) else table_RC.cummin(-1).values
