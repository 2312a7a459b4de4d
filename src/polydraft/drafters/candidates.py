"""Candidates of a dynamic tree, level by level, and the tree of the best of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree

_STEP = 1e-3
"""Taken off the score at each level, in nats: among equals the shallower stands first, so that parents precede children."""


@dataclass(frozen=True, eq=False)
class Level:
    """Candidates of one depth, best first; X of them a row."""

    tokens_BX: Tensor
    parents_BX: Tensor
    """Place of each one's parent in the level above."""
    scores_BX: Tensor
    """Logarithm of the path's probability by the draft; −∞ where there is no candidate."""

    def head(self, count: int) -> "Level":
        """Return the best few."""
        return Level(self.tokens_BX[:, :count], self.parents_BX[:, :count], self.scores_BX[:, :count])

    def masked(self, keep_B: Tensor) -> "Level":
        """Leave the candidates of some rows out."""
        return Level(self.tokens_BX, self.parents_BX, self.scores_BX.masked_fill(~keep_B[:, None], -torch.inf))


def best_children(scores_BW: Tensor, probs_BWV: Tensor, branch: int, most: int) -> Level:
    """Return the best `most` children of W nodes a row, `branch` a node at most; tokens are columns of the laws."""
    top_BWK, columns_BWK = probs_BWV.topk(min(branch, probs_BWV.shape[-1]), dim=-1)
    children_BX = (scores_BW[..., None] + top_BWK.log() - _STEP).flatten(1)
    children_BX = children_BX.masked_fill(children_BX.isnan(), -torch.inf)
    scores_BX, index_BX = children_BX.topk(min(most, children_BX.shape[1]), dim=1)
    tokens_BX = columns_BWK.flatten(1).gather(1, index_BX)
    return Level(torch.where(scores_BX > -torch.inf, tokens_BX, NO_TOKEN), index_BX // columns_BWK.shape[-1], scores_BX)


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tree and where its nodes were among the candidates."""

    draft: DraftTree
    sources_BM: Tensor
    """Number of each node below the root among all candidates, level by level; any for nodes that were left out."""


def assemble(root_B: Tensor, levels: list[Level], counts_B: Tensor, most: int, branch: int, depth: int) -> "Assembled":
    """Make the tree of the `counts_B` best candidates of each row.

    A child's probability is at most its parent's, so the best hang together: the N largest path products are the tree with
    the most expected tokens (OPT-Tree, EAGLE-2).

    Parameters
    ----------
    root_B : Tensor
        Pending tokens.
    levels : list of Level
        Candidates below the root, by depth.
    counts_B : Tensor
        How many candidates each row wants.
    most : int
        Candidates that the widest row has room for.
    branch : int
        Most children a node can have.
    depth : int
        What the tree reports as its depth; at least the number of levels.
    """
    batch_size, device = len(root_B), root_B.device
    scores_BC = torch.cat([level.scores_BX for level in levels], dim=1)
    most = min(most, scores_BC.shape[1])
    best_BM, index_BM = scores_BC.topk(most, dim=1)
    kept_BM = (torch.arange(most, device=device) < counts_B[:, None]) & (best_BM > -torch.inf)
    # Candidates stand level by level: in their own order the nodes are breadth first. Those left out go to the end.
    total = scores_BC.shape[1]
    index_BM, order_BM = torch.where(kept_BM, index_BM, total).sort(dim=1)
    kept_BM = kept_BM.gather(1, order_BM)
    place_BM = index_BM.clamp(max=total - 1)
    tokens_BC = torch.cat([level.tokens_BX for level in levels], dim=1)
    tokens_BM = torch.where(kept_BM, tokens_BC.gather(1, place_BM), NO_TOKEN)
    starts = [0]
    for level in levels:
        starts.append(starts[-1] + level.scores_BX.shape[1])
    # Candidate c is number c + 1 once the root, number 0, stands before them.
    parents_BC = torch.cat(
        [level.parents_BX + (starts[number - 1] + 1 if number else 0) for number, level in enumerate(levels)], dim=1
    )
    depth_C = torch.cat(
        [torch.full((level.scores_BX.shape[1],), number + 1, device=device) for number, level in enumerate(levels)]
    )
    ids_BM = torch.arange(1, most + 1, device=device).expand(batch_size, -1)
    node_of_BC = torch.zeros(batch_size, total + 2, dtype=torch.long, device=device).scatter_(1, index_BM + 1, ids_BM)
    parent_BM = torch.where(kept_BM, node_of_BC.gather(1, parents_BC.gather(1, place_BM)), 0)
    depths_BM = torch.where(kept_BM, depth_C[place_BM], 0)
    parent_BN = torch.nn.functional.pad(parent_BM, (1, 0))
    kept_BN = torch.nn.functional.pad(kept_BM, (1, 0), value=False)
    draft = DraftTree(
        torch.cat([root_B[:, None], tokens_BM], dim=1),
        torch.nn.functional.pad(depths_BM, (1, 0)),
        _ancestors(parent_BN, len(levels)),
        _children(parent_BN, kept_BN, branch),
        depth,
    )
    return Assembled(draft, place_BM)


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
    """List every node's children; nodes that were left out are nobody's."""
    batch_size, nodes = parent_BN.shape
    siblings_BNN = (parent_BN[:, :, None] == parent_BN[:, None, :]) & kept_BN[:, None, :]
    rank_BN = siblings_BNN.tril(-1).sum(-1)
    slot_BN = torch.where(kept_BN, parent_BN * branch + rank_BN, nodes * branch)
    table_BX = torch.zeros(batch_size, nodes * branch + 1, dtype=torch.long, device=parent_BN.device)
    ids_BN = torch.arange(nodes, device=parent_BN.device).expand(batch_size, -1)
    return table_BX.scatter_(1, slot_BN, ids_BN)[:, :-1].view(batch_size, nodes, branch)
