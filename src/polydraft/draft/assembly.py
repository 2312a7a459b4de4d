"""The tree of those candidates that are kept, of all levels of a dynamic tree."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polydraft.draft.candidates import Front, Level
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify.arrays import Array, arange, as_tensor, at_most, put, take, xp


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tree, and where its nodes went through the draft."""

    draft: DraftTree
    places_BN: Tensor
    """Place of each node that has children in the draft's passes; any for others."""
    slots_BN: Array = None
    """The same among the nodes of its level, 0 for others; where somebody asks."""


@dataclass(frozen=True)
class Passes:
    """Places that the passes of a draft take."""

    lead: int
    """Before the root's."""
    most: int


def assemble(
    root_B: Array, levels: list[Level], fronts: list[Front], keep_BC: Array, most: int, branch: int, depth: int, passes: Passes
) -> Assembled:
    """Make the tree of the candidates that are kept.

    Parameters
    ----------
    root_B : Array
        Pending tokens.
    levels : list of Level
        Candidates below the root, by depth.
    fronts : list of Front
        What each level but the last sent through the draft; parents of the level below.
    keep_BC : Array
        Which candidates are kept, all levels side by side; parents of kept ones must be.
    most : int
        Candidates that the fullest row keeps.
    branch : int
        Most children a node can have.
    depth : int
        What the tree reports as its depth; at least the number of levels.
    passes : Passes
        The draft's.
    """
    batch_size, total = keep_BC.shape
    concatenate, where = xp(keep_BC).concatenate, xp(keep_BC).where
    # Candidates stand level by level: in their own order the nodes are breadth first. Those left out go to the end.
    index_BM = _sorted(where(keep_BC, arange(total, keep_BC), total))[:, :most]
    kept_BM = index_BM < total
    place_BM = at_most(index_BM, total - 1)
    tokens_BM = where(kept_BM, take(concatenate([level.tokens_BX for level in levels], 1), place_BM), NO_TOKEN)
    parents, slots, places, depths, start, first = [], [], [], [], 0, passes.lead + 1
    for number, level in enumerate(levels):
        # Numbers among all candidates once the root, number 0, stands before them.
        above_BX = 0 * level.parents_BX
        if number:
            above_BX = take(fronts[number - 1].places_BW, level.parents_BX) + start + 1
            start += levels[number - 1].parents_BX.shape[1]
        parents.append(above_BX)
        slot_BX = 0 * level.parents_BX
        if number < len(fronts):
            places_BW = fronts[number].places_BW
            put(slot_BX, places_BW, 0 * places_BW + arange(places_BW.shape[1], places_BW))
        slots.append(slot_BX)
        places.append(slot_BX + min(first, passes.most - 1))  # at the last level all are the first, which may not be there
        first += fronts[number].places_BW.shape[1] if number < len(fronts) else 0
        depths.append(0 * level.parents_BX + number + 1)
    node_of_BC = _zeros((batch_size, total + 2), keep_BC)
    put(node_of_BC, index_BM + 1, 0 * index_BM + arange(index_BM.shape[1], index_BM) + 1)
    parent_BM = where(kept_BM, take(node_of_BC, take(concatenate(parents, 1), place_BM)), 0)
    depths_BM = where(kept_BM, take(concatenate(depths, 1), place_BM), 0)
    zero_B1 = 0 * root_B[:, None]
    parent_BN, kept_BN = concatenate([zero_B1, parent_BM], 1), concatenate([zero_B1 > 0, kept_BM], 1)
    draft = DraftTree(
        as_tensor(concatenate([root_B[:, None], tokens_BM], 1)),
        as_tensor(concatenate([zero_B1, depths_BM], 1)),
        as_tensor(_ancestors(parent_BN, len(levels))),
        as_tensor(_children(parent_BN, kept_BN, min(branch, most))),
        depth,
    )
    places_BM = where(kept_BM, take(concatenate(places, 1), place_BM), passes.lead)
    places_BN = concatenate([zero_B1 + passes.lead, places_BM], 1)
    slots_BN = concatenate([zero_B1, take(concatenate(slots, 1), place_BM)], 1)
    return Assembled(draft, as_tensor(places_BN), slots_BN)


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Return whole numbers in the library of `like`."""
    return (
        np.zeros(shape, np.int64) if isinstance(like, np.ndarray) else torch.zeros(shape, dtype=torch.long, device=like.device)
    )


def _sorted(values_BX: Array) -> Array:
    return np.sort(values_BX, 1) if isinstance(values_BX, np.ndarray) else values_BX.sort(dim=1).values


def _ancestors(parent_BN: Array, levels: int) -> Array:
    """Follow the parents upwards from every node."""
    batch_size, nodes = parent_BN.shape
    # One row for each node of each tree, so that marking its ancestors is setting entries of a row.
    own_R1 = arange(batch_size * nodes, parent_BN)[:, None] % nodes
    ancestors_RN = own_R1 == arange(nodes, parent_BN)
    above_BN = parent_BN
    for _ in range(levels):
        put(ancestors_RN, above_BN.reshape(-1, 1), own_R1 >= 0)
        above_BN = take(parent_BN, above_BN)
    return ancestors_RN.reshape(batch_size, nodes, nodes)


def _children(parent_BN: Array, kept_BN: Array, branch: int) -> Array:
    """List every node's children in their order; nodes that were left out are nobody's."""
    (batch_size, nodes), where = parent_BN.shape, xp(parent_BN).where
    number_N = arange(nodes, parent_BN)
    elder_NN = number_N[:, None] > number_N
    rank_BN = ((parent_BN[:, :, None] == parent_BN[:, None, :]) & kept_BN[:, None, :] & elder_NN).sum(-1)
    slot_BN = where(kept_BN, parent_BN * branch + rank_BN, nodes * branch)
    table_BX = _zeros((batch_size, nodes * branch + 1), parent_BN)
    put(table_BX, slot_BN, 0 * parent_BN + number_N)
    return table_BX[:, :-1].reshape(batch_size, nodes, branch)
