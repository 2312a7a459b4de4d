"""Growing dynamic trees of the likeliest tokens in a few kernels: two per level, and two for the tree.

Torch takes dozens of small kernels per level and a hundred for the tree, which together take longer than the passes of a small
draft.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, side_by_side
from polydraft.draft.builder import DraftDistributions
from polydraft.draft.candidates import STEP
from polydraft.draft.growth import Expand, Grown, Passes, grow_likeliest
from polydraft.operations import implements
from polydraft.trees import Block, DraftTree, DynamicShape

_LANES, _WARPS = 32, 8
"""Lanes of a warp, and warps of the programs that read logits."""
_STRIP, _LONGEST, _ENOUGH = 256, 1024, 16
"""Columns of the logits per warp: the usual number, and the largest, which is used if a node has more than enough programs."""
_MOST_SORTED = 16
"""Most children for which each strip finds its own largest; for more, there would be too many to compare."""
_MOST_KEYS, _MOST_ENTRIES = 2**14, 2**13
"""Most keys of a level, which one program merges, and of one node, for whose places keys have bits."""
_MOST_CHILDREN = 256
"""Most children of a level before the best are kept: each is compared with each."""
_MOST_CANDIDATES, _MOST_NODES = 4096, 1024
_TILE = 2**14
"""Most comparisons that a program makes at once."""
_NODES, _ENTRIES = 16, 1024
"""Nodes whose tables one program writes, and entries of the table of children cleared at once."""
_LEAST = 16
"""Smaller trees use the kernels compiled for this many nodes."""
_SHARE = 512
"""Candidates per warp; a single warp need not wait for others."""


@dataclass(frozen=True)
class Cut:
    """How a node's logits are split: `parts`, one per program, of `strips` each, which a warp's lanes go through in `steps`."""

    parts: int
    strips: int
    steps: int

    @classmethod
    def of(cls, columns: int, count: int) -> "Cut":
        """Return the split for a node that gets `count` children."""
        size = _WARPS * _STRIP
        while size < _WARPS * _LONGEST and columns > _ENOUGH * size:
            size *= 2
        strips = _WARPS if count <= _MOST_SORTED else 1
        return cls(parts=-(-columns // size), strips=strips, steps=size // (strips * _LANES))


class Layout:
    """Where the candidates of all levels are stored; tensors that captures read are created once.

    Parameters
    ----------
    shape : DynamicShape
    passes : Passes
        The draft's.
    count : int
        Children per node, before the best of a level are kept.
    device : torch.device
    """

    def __init__(self, shape: DynamicShape, passes: Passes, count: int, device: torch.device) -> None:
        self.shape, self.passes, self.count = shape, passes, count
        widths, rooms = [1], list[int]()
        for _ in range(shape.depth):
            rooms.append(min(shape.nodes - 1, widths[-1] * count))
            widths.append(min(shape.beam, rooms[-1]))
        self.widths, self.rooms = tuple(widths), tuple(rooms)
        """Number of nodes of each level that get children, beginning with the root's, and of candidates below them."""
        self.starts = tuple(accumulate(rooms, initial=0))
        """Where each level's candidates begin among all of them."""
        firsts = accumulate(widths[:-1], initial=passes.lead)
        self.starts_X, self.firsts_X = torch.tensor([self.starts, tuple(firsts)], device=device)
        """`starts` on the device, and the place where the pass over each depth begins."""
        depths_L1 = torch.arange(passes.lead, passes.lead + shape.depth, device=device)[:, None]
        self.depths_LW = depths_L1.repeat(1, max(widths))

    def fits(self, columns: int) -> bool:
        """Whether all tables fit into the kernels' programs."""
        widest = power_of_two(max(self.widths[:-1]))
        entries = power_of_two(Cut.of(columns, self.count).parts * self.count)
        small = entries <= _MOST_ENTRIES and widest * entries <= _MOST_KEYS
        small = small and widest * power_of_two(self.count, LEAST_CHILDREN) <= _MOST_CHILDREN
        small = small and max(self.widths) * self.passes.most <= _TILE
        return small and self.starts[-1] <= _MOST_CANDIDATES and self.shape.nodes <= _MOST_NODES


_layout = cache(Layout)


def _layout_of(shape: DynamicShape, passes: Passes, distributions: DraftDistributions, device: torch.device) -> Layout:
    return _layout(shape, passes, min(shape.branch, distributions.num_columns), device)


def _columns(distributions: DraftDistributions, logits_BWV: Tensor) -> int:
    """Return how many columns of the logits are real; columns beyond the target's vocabulary are padding."""
    return min(logits_BWV.shape[-1], distributions.num_columns)


def _supports(
    shape: DynamicShape, passes: Passes, distributions: DraftDistributions, root_B: Tensor, logits_B1V: Tensor, expand: Expand
) -> bool:
    if distributions.temperature_B is None or distributions.needs_paths:
        return False
    if logits_B1V.dtype == torch.float64 or not kernels_run(logits_B1V):
        return False
    return _layout_of(shape, passes, distributions, root_B.device).fits(_columns(distributions, logits_B1V))


@implements(grow_likeliest, "triton", supports=_supports)
def grow(
    shape: DynamicShape,
    passes: Passes,
    distributions: DraftDistributions,
    root_B: Tensor,
    logits_B1V: Tensor,
    expand: Expand,
) -> Grown:
    """Grow the trees of a round; equal scores stay in order."""
    growing = _Growing(_layout_of(shape, passes, distributions, root_B.device), distributions, len(root_B))
    growing.grow(logits_B1V)
    for _ in range(1, shape.depth):
        growing.grow(expand(*growing.front()))
    return growing.tree(root_B)


class _Growing:
    """The trees of one round, like `polydraft.draft.growth.Growing`."""

    def __init__(self, layout: Layout, distributions: DraftDistributions, rows: int) -> None:
        temperature_B = distributions.temperature_B
        assert temperature_B is not None
        self._layout, self._distributions, self._temperature_B, self._level = layout, distributions, temperature_B, 0
        size = rows, layout.starts[-1]
        self._facts_3BC = torch.empty(3, *size, dtype=torch.long, device=temperature_B.device)
        self._scores_BC = temperature_B.new_empty(size)
        self._visible_BWU = temperature_B.new_empty(rows, 1, 0, dtype=torch.uint8)
        """What the last front sees; empty at first, because the root sees all before it."""

    def grow(self, logits_BWV: Tensor) -> None:
        """Take the likeliest children of the last front's nodes, or of the root at first."""
        from polydraft.backends.triton import growth_kernels as kernels

        layout, level, (batch, width) = self._layout, self._level, logits_BWV.shape[:2]
        logits_BWV = self._distributions.prepared(logits_BWV, self._facts_3BC[0, :, None, :0], level)
        assert width == layout.widths[level]
        columns, count = _columns(self._distributions, logits_BWV), layout.count
        logits_RV, cut = side_by_side(logits_BWV.flatten(0, 1)), Cut.of(columns, count)
        facts_3BC, scores_BC, narrow = self._facts_3BC, self._scores_BC, logits_BWV.element_size() == 2
        entries, strips, block_children = cut.parts * count, cut.parts * cut.strips, power_of_two(count, LEAST_CHILDREN)
        keys_RX, tops_2RX = facts_3BC.new_empty(batch * width, entries), scores_BC.new_empty(2, batch * width, strips)
        kernels.rank_and_sum[(batch * width, cut.parts)](
            logits_RV, self._temperature_B, keys_RX, tops_2RX,
            columns, count, width, logits_RV.stride(0), tops_2RX.stride(0),
            NARROW=narrow, BLOCK_E=cut.steps, BLOCK_S=cut.strips, BLOCK_K=block_children, num_warps=_WARPS,
        )  # fmt: skip
        seen, front = self._seen, layout.widths[level + 1] if level + 1 < layout.shape.depth else 0
        visible_BWU, vocabulary = self._visible_BWU.new_empty(batch, front, seen + front), self._distributions.vocabulary
        block_nodes, block_front, block_seen = (power_of_two(size) for size in (width, max(layout.widths), layout.passes.most))
        # One warp per node, unless the tables are too large for so few threads.
        share = max((block_nodes * block_children) ** 2 // 2048, block_front * block_seen // 1024)
        kernels.grow_level[(batch,)](
            keys_RX, *tops_2RX, self._temperature_B,
            facts_3BC if vocabulary is None else vocabulary.tokens_D.contiguous(), facts_3BC, scores_BC,
            self._visible_BWU, visible_BWU, level, width, entries, strips, count, scores_BC.shape[1],
            layout.starts[max(level - 1, 0)], layout.starts[level], layout.rooms[level], front, seen, facts_3BC.stride(0),
            STEP=STEP, PARTIAL=vocabulary is not None, NARROW=narrow, BLOCK_W=block_nodes, BLOCK_K=block_children,
            BLOCK_E=power_of_two(-(-entries // _LANES)), BLOCK_S=power_of_two(-(-strips // _LANES)),
            BLOCK_F=block_front, BLOCK_U=block_seen, num_warps=min(max(block_nodes, share), _WARPS),
        )  # fmt: skip
        self._visible_BWU, self._level = visible_BWU, level + 1

    @property
    def _seen(self) -> int:
        """Number of places down to the nodes that get children now."""
        return self._layout.passes.lead + sum(self._layout.widths[: self._level + 1])

    def front(self) -> tuple[Tensor, Tensor, Block]:
        """Return tokens and parents of the last level's best candidates, and their block."""
        layout, level = self._layout, self._level
        width, start = layout.widths[level], layout.starts[level - 1]
        tokens_BW, parents_BW, _ = self._facts_3BC[:, :, start : start + width].unbind()
        depths_BW = layout.depths_LW[level, :width].expand(len(tokens_BW), -1)
        return tokens_BW, parents_BW, Block(self._seen - width, depths_BW, self._visible_BWU.view(torch.bool), levels=(width,))

    def tree(self, root_B: Tensor) -> Grown:
        """Make a tree of the best candidates."""
        from polydraft.backends.triton import growth_kernels as kernels

        layout, (batch, total), depth = self._layout, self._scores_BC.shape, self._layout.shape.depth
        assert self._level == depth, "levels are missing"
        nodes = min(layout.shape.nodes, total + 1)
        width = min(layout.shape.branch, nodes - 1)
        new = self._facts_3BC.new_empty
        numbers_BC, table_BNK = new(batch, total), new(batch, nodes, width)
        chosen_BN, tokens_BN, depths_BN, places_BN = new(4, batch, nodes)
        block_levels, block_places = power_of_two(depth), power_of_two(max(layout.rooms), _LANES)
        block_nodes = power_of_two(nodes, _LEAST)
        kernels.choose_candidates[(batch,)](
            self._scores_BC, layout.starts_X, numbers_BC, chosen_BN, table_BNK, depth, total, nodes, nodes * width,
            BLOCK_L=block_levels, BLOCK_P=block_places, BLOCK_N=block_nodes, BLOCK_X=_ENTRIES,
            num_warps=min(max(block_levels * block_places // _SHARE, 1), 8),
        )  # fmt: skip
        ancestors_BNN = new(batch, nodes, nodes, dtype=torch.uint8)
        kernels.plant_chosen[(batch, -(-nodes // _NODES))](
            self._facts_3BC, numbers_BC, chosen_BN, layout.starts_X, layout.firsts_X, root_B,
            tokens_BN, depths_BN, places_BN, ancestors_BNN, table_BNK,
            depth, total, nodes, width, layout.passes.most - 1, self._facts_3BC.stride(0), root_B.stride(0),
            BLOCK_T=_NODES, BLOCK_N=block_nodes,
        )  # fmt: skip
        return Grown(DraftTree(tokens_BN, depths_BN, ancestors_BNN.view(torch.bool), table_BNK, depth), places_BN)
