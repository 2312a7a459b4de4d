"""Growing a dynamic tree: candidates level by level, then a tree of the ones that are kept.

`grow_likeliest` does all of it for trees of a fixed size, of the likeliest candidates, as on a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from polydraft.draft.builder import DraftDistributions
from polydraft.draft.candidates import Front, Level, best, best_children
from polydraft.operations import operation
from polydraft.sampling import NO_TOKEN
from polydraft.trees import Block, DraftTree, DynamicShape

Expand = Callable[[Tensor, Tensor, Block], Tensor]
"""Returns the logits at some nodes, given their tokens, their parents in the last pass and their block; as `source.expand`."""


@dataclass(frozen=True)
class Passes:
    """Places that the passes of a draft take."""

    lead: int
    """Places before the root's."""
    most: int
    """Places in all, at most."""


@dataclass(frozen=True, eq=False)
class Grown:
    """A tree, and where its nodes are in the draft's passes."""

    draft: DraftTree
    places_BN: Tensor
    """Place of each node with children in the draft's passes; arbitrary for others."""


class Growing:
    """Candidates of the trees of one round.

    Parameters
    ----------
    root_B : Tensor
        Pending tokens.
    passes : Passes
        The draft's.
    dtype : torch.dtype
        Data type of scores.
    """

    def __init__(self, root_B: Tensor, passes: Passes, dtype: torch.dtype) -> None:
        self.root_B, self._passes = root_B, passes
        self.levels: list[Level] = []
        self.fronts: list[Front] = []
        """What each level but the last sent through the draft: the parents of the level below."""
        self.scores_BW = torch.zeros(len(root_B), 1, dtype=dtype, device=root_B.device)
        """Scores of the nodes that get children next, at first the root."""
        self.paths_BWP = root_B.new_empty(len(root_B), 1, 0)
        """Tokens from below the root to each of them."""
        self._visible_BWU = torch.ones(len(root_B), 1, passes.lead + 1, dtype=torch.bool, device=root_B.device)

    def pass_on(self, front: Front) -> Block:
        """Make a front the next nodes to get children; return what they see in their pass."""
        self.fronts.append(front)
        self.scores_BW = front.scores_BW
        self.paths_BWP = torch.cat([front.inherit(self.paths_BWP), front.tokens_BW[..., None]], -1)
        self._visible_BWU = front.see(self._visible_BWU)
        depths_BW = torch.full_like(front.tokens_BW, self._passes.lead + len(self.fronts))
        width, places = self._visible_BWU.shape[1:]
        return Block(places - width, depths_BW, self._visible_BWU, levels=(width,))

    @property
    def scores_BC(self) -> Tensor:
        """Scores of all candidates, level by level."""
        return torch.cat([level.scores_BX for level in self.levels], 1)

    @property
    def tokens_BC(self) -> Tensor:
        """Tokens of all candidates."""
        return torch.cat([level.tokens_BX for level in self.levels], 1)

    def tree(self, keep_BC: Tensor, most: int, branch: int, depth: int) -> Grown:
        """Make a tree of the kept candidates.

        Parameters
        ----------
        keep_BC : Tensor
            Which candidates are kept; with a candidate, its parent must be kept.
        most : int
            Most candidates that a row keeps.
        branch : int
            Most children a node can have.
        depth : int
            Depth that the tree reports, at least the number of levels.
        """
        total, lead = keep_BC.shape[1], self._passes.lead
        # Candidates are listed level by level, so nodes come out breadth first. Dropped candidates go to the end.
        number_C = torch.arange(total, device=keep_BC.device)
        index_BM = number_C.where(keep_BC, total).sort(dim=1).values[:, :most]
        node_of_BC = index_BM.new_zeros(len(keep_BC), total + 2)
        node_of_BC.scatter_(1, index_BM + 1, torch.arange(1, index_BM.shape[1] + 1, device=keep_BC.device).expand_as(index_BM))
        # One more candidate stands for missing ones.
        missing_T11 = _missing(lead, keep_BC.device)
        table_TBC = torch.cat([*self._tables(), missing_T11.expand(-1, len(keep_BC), -1)], 2)
        table_TBM = table_TBC.gather(2, index_BM.expand(len(missing_T11), -1, -1))
        kept_BN = torch.nn.functional.pad(index_BM < total, (1, 0))
        tokens_BN, above_BN, places_BN, depths_BN = torch.nn.functional.pad(table_TBM, (1, 0)).unbind()
        tokens_BN[:, 0].copy_(self.root_B)
        places_BN[:, 0].fill_(lead)
        parent_BN = node_of_BC.gather(1, above_BN)
        draft = DraftTree(
            tokens_BN,
            depths_BN,
            _ancestors(parent_BN, len(self.levels)),
            _children(parent_BN, kept_BN, min(branch, most)),
            depth,
        )
        return Grown(draft, places_BN)

    def _tables(self) -> Iterator[Tensor]:
        """Yield, for each level's candidates: token; parent's number, 0 for the root; place; depth."""
        start, first = 0, self._passes.lead + 1
        for number, level in enumerate(self.levels):
            above_BX, slot_BX = torch.zeros_like(level.parents_BX), torch.zeros_like(level.parents_BX)
            if number:
                above_BX = self.fronts[number - 1].places_BW.gather(1, level.parents_BX) + start + 1
                start += self.levels[number - 1].parents_BX.shape[1]
            if number < len(self.fronts):
                places_BW = self.fronts[number].places_BW
                slot_BX.scatter_(1, places_BW, torch.arange(places_BW.shape[1], device=slot_BX.device).expand_as(places_BW))
            # At the last level all get the first place, which may not exist.
            place_BX = slot_BX + min(first, self._passes.most - 1)
            first += self.fronts[number].places_BW.shape[1] if number < len(self.fronts) else 0
            yield torch.stack([level.tokens_BX, above_BX, place_BX, torch.full_like(slot_BX, number + 1)])


@cache
def _missing(lead: int, device: torch.device) -> Tensor:
    """Return the column of a missing candidate in the tables of `Growing`."""
    return torch.tensor([NO_TOKEN, 0, lead, 0], device=device)[:, None, None]


def _ancestors(parent_BN: Tensor, levels: int) -> Tensor:
    """Return every node's ancestors, itself included, by following parents upwards."""
    rows, nodes = parent_BN.shape
    ancestors_BNN = torch.eye(nodes, dtype=torch.bool, device=parent_BN.device).repeat(rows, 1, 1)
    above_BN = parent_BN
    for _ in range(levels):
        ancestors_BNN.scatter_(2, above_BN[..., None], value=True)
        above_BN = parent_BN.gather(1, above_BN)
    return ancestors_BNN


def _children(parent_BN: Tensor, kept_BN: Tensor, branch: int) -> Tensor:
    """Return the table of every node's children, in order; dropped nodes are not listed."""
    rows, nodes = parent_BN.shape
    rank_BN = ((parent_BN[:, :, None] == parent_BN[:, None, :]) & kept_BN[:, None, :]).tril(-1).sum(-1)
    slot_BN = (parent_BN * branch + rank_BN).where(kept_BN, nodes * branch)
    table_BX = parent_BN.new_zeros(rows, nodes * branch + 1)
    table_BX.scatter_(1, slot_BN, torch.arange(nodes, device=parent_BN.device).expand(rows, -1))
    return table_BX[:, :-1].view(rows, nodes, branch)


def likeliest_level(shape: DynamicShape, distributions: DraftDistributions, growing: Growing, logits_BWV: Tensor) -> Level:
    """Return the likeliest candidates below the nodes that get children next, given the draft's logits there."""
    paths_BWP = growing.paths_BWP
    probs_BWV = distributions.probs(distributions.prepared(logits_BWV, paths_BWP, len(growing.levels)), paths_BWP)
    level = best_children(growing.scores_BW, probs_BWV, shape.branch, shape.nodes - 1)
    return replace(level, tokens_BX=distributions.tokens(level.tokens_BX))


@operation
def grow_likeliest(
    shape: DynamicShape,
    passes: Passes,
    distributions: DraftDistributions,
    root_B: Tensor,
    logits_B1V: Tensor,
    expand: Expand,
) -> Grown:
    """Grow trees of the likeliest candidates, with as many levels and nodes as the shape allows (OPT-Tree, EAGLE-2).

    Each level extends the `beam` likeliest paths; the likeliest candidates of all levels make the tree.

    Parameters
    ----------
    shape : DynamicShape
    passes : Passes
        The draft's.
    distributions : DraftDistributions
        Rank the candidates.
    root_B : Tensor
        Pending tokens.
    logits_B1V : Tensor
        The draft's logits after them.
    expand : callable
        Passes a level through the draft.
    """
    growing, logits_BWV = Growing(root_B, passes, torch.float32), logits_B1V
    for depth in range(shape.depth):
        if depth:
            front = Front.of(growing.levels[-1], shape.beam)
            logits_BWV = expand(front.tokens_BW, front.parents_BW, growing.pass_on(front))
        growing.levels.append(likeliest_level(shape, distributions, growing, logits_BWV))
    value_BM, index_BM = best(growing.scores_BC, shape.nodes - 1)
    keep_BC = torch.zeros_like(growing.scores_BC, dtype=torch.bool).scatter_(1, index_BM, value_BM > -torch.inf)
    return growing.tree(keep_BC, index_BM.shape[1], shape.branch, shape.depth)
