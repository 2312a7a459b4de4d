"""Dynamic trees of drawn children: how many follows from the laws before they are drawn, which of them get children after."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from polydraft.drafters.candidates import STEP, Level
from polydraft.sampling import NO_TOKEN
from polydraft.schemes import Scheme
from polydraft.schemes.arithmetic import Ranked
from polydraft.schemes.arrays import Array, arange, as_array, as_tensor, at_least, can_sync, quietly, take, xp
from polydraft.trees import DynamicShape

_UNLISTED = (0.20, 0.29, 0.335, 0.365, 0.385, 0.395, 0.405)
"""Of the target's mass off the draft's n likeliest tokens, the share that is accepted all the same from n children, by n.

Drawing and coupling bring it. Measured for `hybrid` with the shipped pair: acceptance along 1,033 positions of the target's
own texts at temperature 1 (20 built-in prompts), the same within 0.03 at the first three depths; it stays at the last one.
"""
_WIDEST = 16
_FRONT, _DEEP = 2, 4
"""Nodes of a level below the first that draw, and children of each, at most. More nodes brought fewer tokens than they cost."""


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


@quietly
def gains(value_RK: Array, chances_BW: Array) -> Array:
    """Return the expected accepted tokens that one more child of each node brings, `[B, W, K]`, falling in K.

    `value_RK` holds the K largest probabilities of each node's law, R = B · W. With S the draft's mass on its n likeliest
    tokens, u as in `_UNLISTED`, n children are accepted with chance S + u (1 − S).
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
    """Draw the children of W nodes a row, up to K of each; tokens are columns of the laws.

    Candidates stand parent by parent, in draw order. How many a node draws may depend on its law and on all that was drawn
    above it, but not on what is drawn here. Of rows in `greedy_B` the candidates are the likeliest tokens.
    """
    batch_size, nodes, _ = probs_BWV.shape
    uniforms_RK = uniforms_BU.reshape(batch_size * nodes, -1)
    children_RK = scheme.draw_some(probs_BWV.flatten(0, 1), uniforms_RK, as_tensor(counts_BW.reshape(-1, 1)), ranked)
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
    mass_RK = _law_of(probs_BWV, at_least(children_RK, 0)) * counted_RK
    spare_R1 = at_least(1 - mass_RK.sum(-1, keepdims=True), 0.0) * _unlisted(scores_BW)[real_RK.sum(-1)][:, None]
    spare_R1 = spare_R1 / at_least(counted_RK.sum(-1, keepdims=True), 1)
    chance_RK = functions.where(counted_RK, mass_RK + spare_R1, 0.0)
    scores_BX = (scores_BW.reshape(-1, 1) + functions.log(chance_RK) - STEP).reshape(batch_size, nodes * count)
    scores_BX = functions.where(scores_BX == scores_BX, scores_BX, -torch.inf)
    parents_BX = (0 * children_RK + arange(rows, children_RK)[:, None] % nodes).reshape(batch_size, nodes * count)
    return Level(children_RK.reshape(batch_size, nodes * count), parents_BX, scores_BX)


def _law_of(probs_BWV: Tensor, columns_RK: Array) -> Array:
    """Return the law's mass on some columns of each node."""
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
