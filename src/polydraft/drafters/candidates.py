"""Candidates of a dynamic tree, level by level, and the tree of those that are kept."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree

STEP = 1e-3
"""Taken off the score at each level, in nats: among equals the shallower stands first, so that parents precede children."""


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
        scores_BX = self.scores_BX.masked_fill(~keep_B[:, None], -torch.inf)
        return replace(self, tokens_BX=torch.where(keep_B[:, None], self.tokens_BX, NO_TOKEN), scores_BX=scores_BX)


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
        scores_BW, places_BW = level.scores_BX.topk(min(width, level.scores_BX.shape[1]), dim=1)
        tokens_BW = torch.where(scores_BW > -torch.inf, level.tokens_BX.gather(1, places_BW), NO_TOKEN)
        return cls(places_BW, tokens_BW, level.parents_BX.gather(1, places_BW), scores_BW)

    @property
    def mass_B(self) -> Tensor:
        """Chance that the accepted path comes through one of them, by the draft."""
        return self.scores_BW.exp().sum(-1)


def best_children(scores_BW: Tensor, probs_BWV: Tensor, branch: int, most: int) -> Level:
    """Return the best `most` children of W nodes a row, `branch` a node at most; tokens are columns of the laws."""
    top_BWK, columns_BWK = probs_BWV.topk(min(branch, probs_BWV.shape[-1]), dim=-1)
    children_BX = (scores_BW[..., None] + top_BWK.log() - STEP).flatten(1)
    children_BX = children_BX.masked_fill(children_BX.isnan(), -torch.inf)
    scores_BX, index_BX = children_BX.topk(min(most, children_BX.shape[1]), dim=1)
    tokens_BX = columns_BWK.flatten(1).gather(1, index_BX)
    return Level(torch.where(scores_BX > -torch.inf, tokens_BX, NO_TOKEN), index_BX // columns_BWK.shape[-1], scores_BX)


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tree, and which front nodes its nodes were."""

    draft: DraftTree
    slots_BN: Tensor
    """Place of each node that has children among those of its level that went through the draft; 0 for others."""


def assemble(
    root_B: Tensor, levels: list[Level], fronts: list[Front], keep_BC: Tensor, most: int, branch: int, depth: int
) -> Assembled:
    """Make the tree of the candidates that are kept.

    Parameters
    ----------
    root_B : Tensor
        Pending tokens.
    levels : list of Level
        Candidates below the root, by depth.
    fronts : list of Front
        What each level but the last sent through the draft; parents of the level below.
    keep_BC : Tensor
        Which candidates are kept, all levels side by side; parents of kept ones must be.
    most : int
        Candidates that the fullest row keeps.
    branch : int
        Most children a node can have.
    depth : int
        What the tree reports as its depth; at least the number of levels.
    """
    batch_size, device, total = len(root_B), root_B.device, keep_BC.shape[1]
    # Candidates stand level by level: in their own order the nodes are breadth first. Those left out go to the end.
    numbers_C = torch.arange(total, device=device)
    index_BM = torch.where(keep_BC, numbers_C, total).sort(dim=1).values[:, :most]
    kept_BM = index_BM < total
    place_BM = index_BM.clamp(max=total - 1)
    tokens_BC = torch.cat([level.tokens_BX for level in levels], dim=1)
    tokens_BM = torch.where(kept_BM, tokens_BC.gather(1, place_BM), NO_TOKEN)
    parents, slots, depths, start = [], [], [], 0
    for number, level in enumerate(levels):
        size = level.scores_BX.shape[1]
        # Numbers among all candidates once the root, number 0, stands before them.
        above_BX = torch.zeros_like(level.parents_BX)
        if number:
            above_BX = fronts[number - 1].places_BW.gather(1, level.parents_BX) + start + 1
            start += levels[number - 1].scores_BX.shape[1]
        parents.append(above_BX)
        slot_BX = torch.zeros(batch_size, size, dtype=torch.long, device=device)
        if number < len(fronts):
            places_BW = fronts[number].places_BW
            slot_BX.scatter_(1, places_BW, torch.arange(places_BW.shape[1], device=device).expand_as(places_BW))
        slots.append(slot_BX)
        depths.append(torch.full((size,), number + 1, device=device))
    ids_BM = torch.arange(1, index_BM.shape[1] + 1, device=device).expand(batch_size, -1)
    node_of_BC = torch.zeros(batch_size, total + 2, dtype=torch.long, device=device).scatter_(1, index_BM + 1, ids_BM)
    parent_BM = torch.where(kept_BM, node_of_BC.gather(1, torch.cat(parents, dim=1).gather(1, place_BM)), 0)
    depths_BM = torch.where(kept_BM, torch.cat(depths)[place_BM], 0)
    parent_BN, kept_BN = pad(parent_BM, (1, 0)), pad(kept_BM, (1, 0), value=False)
    draft = DraftTree(
        torch.cat([root_B[:, None], tokens_BM], dim=1),
        pad(depths_BM, (1, 0)),
        _ancestors(parent_BN, len(levels)),
        _children(parent_BN, kept_BN, min(branch, most)),
        depth,
    )
    return Assembled(draft, pad(torch.cat(slots, dim=1).gather(1, place_BM), (1, 0)))


def _ancestors(parent_BN: Tensor, levels: int) -> Tensor:
    """Follow the parents upwards from every node."""
    batch_size, nodes = parent_BN.shape
    ancestors_BNN = torch.eye(nodes, dtype=torch.bool, device=parent_BN.device).repeat(batch_size, 1, 1)
    above_BN = parent_BN
    for _ in range(levels):
        ancestors_BNN.scatter_(2, above_BN[:, :, None], True)
        above_BN = parent_BN.gather(1, above_BN)
    return ancestors_BNN


def _children(parent_BN: Tensor, kept_BN: Tensor, branch: int) -> Tensor:
    """List every node's children in their order; nodes that were left out are nobody's."""
    batch_size, nodes = parent_BN.shape
    siblings_BNN = (parent_BN[:, :, None] == parent_BN[:, None, :]) & kept_BN[:, None, :]
    rank_BN = siblings_BNN.tril(-1).sum(-1)
    slot_BN = torch.where(kept_BN, parent_BN * branch + rank_BN, nodes * branch)
    table_BX = torch.zeros(batch_size, nodes * branch + 1, dtype=torch.long, device=parent_BN.device)
    ids_BN = torch.arange(nodes, device=parent_BN.device).expand(batch_size, -1)
    return table_BX.scatter_(1, slot_BN, ids_BN)[:, :-1].view(batch_size, nodes, branch)
