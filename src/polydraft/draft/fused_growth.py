"""Growing dynamic trees at temperature 0 on a GPU: two kernels per level, and two that make the tree.

Torch's operations take dozens of small kernels per level and a hundred for the tree (`polydraft.draft.candidates` and
`assembly`): together they take longer than the passes of a small draft. What is grown is the same; of equal scores the first
stands first, where torch's `topk` leaves that open.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, side_by_side
from polydraft.draft.assembly import Assembled, Passes
from polydraft.draft.candidates import STEP
from polydraft.draft.policy import Plan
from polydraft.sampling import PartialVocabulary
from polydraft.trees import Block, DraftTree, DynamicShape

_LANES, _WARPS = 32, 8
"""Of a warp; of the programs that look at logits."""
_STRIP, _LONGEST, _ENOUGH = 256, 1024, 16
"""Columns of the logits that one warp looks at, more where a node would have more programs than enough, up to the longest."""
_MOST_SORTED = 16
"""Children up to which each strip has its own largest; of more those of all strips would be too many to compare."""
_MOST_KEYS, _MOST_ENTRIES = 2**14, 2**13
"""Of all nodes of a level, which one program merges; of one of them, for whose places keys have room."""
_MOST_CHILDREN = 256
"""Of a level, before the best are kept: each is compared with each."""
_MOST_CANDIDATES, _MOST_NODES = 4096, 1024
_TILE = 2**14
"""Comparisons that a program makes in one go."""
_NODES, _ENTRIES = 16, 1024
"""Of a tree, whose tables one program writes; of the table of children, which it empties in one go."""
_LEAST = 16
"""Smaller trees share the kernels of these."""
_SHARE = 512
"""Candidates of a warp: one that is alone waits for nobody."""


@dataclass(frozen=True)
class Front:
    """What goes through the draft next."""

    tokens_BW: Tensor
    parents_BW: Tensor
    block: Block


@dataclass(frozen=True)
class Cut:
    """The logits of a node: `parts`, one a program, of some `strips` each, which the lanes of a warp go through in `steps`."""

    parts: int
    strips: int
    steps: int


class FusedGrowth:
    """What the trees of one batch are grown in, level by level.

    Parameters
    ----------
    shape : DynamicShape
    passes : Passes
        The draft's.
    vocabulary : PartialVocabulary, optional
        What the logits' columns mean, where they are not all tokens.
    vocab_size : int
        The target's: columns beyond it are padding.
    device : torch.device
    """

    def __init__(
        self, shape: DynamicShape, passes: Passes, vocabulary: PartialVocabulary | None, vocab_size: int, device: torch.device
    ) -> None:
        self.shape, self.passes = shape, passes
        self.vocabulary, self.vocab_size = vocabulary, vocab_size
        self.count = min(shape.branch, vocab_size if vocabulary is None else len(vocabulary.tokens_D))
        """Children of a node before the best of all are kept."""
        widths, rooms = [1], list[int]()
        for _ in range(shape.depth):
            rooms.append(min(shape.nodes - 1, widths[-1] * self.count))
            widths.append(min(shape.beam, rooms[-1]))
        self.widths, self.rooms = tuple(widths), tuple(rooms)
        """Nodes of each level that get children, the root's first, and candidates below them."""
        self.starts = tuple(accumulate(rooms, initial=0))
        """Where the candidates of each level begin among all of them."""
        # All that captures read is made once.
        firsts = accumulate(widths[:-1], initial=passes.lead)
        self.starts_X, self.firsts_X = torch.tensor([self.starts, tuple(firsts)], device=device)
        """These places on the device, and where the passes over each depth begin."""
        depths_L1 = torch.arange(passes.lead, passes.lead + shape.depth, device=device)[:, None]
        self.depths_LW = depths_L1.repeat(1, max(widths))

    def fits(self, logits_BWV: Tensor) -> bool:
        """Whether kernels grow these trees."""
        widest, entries = power_of_two(max(self.widths[:-1])), power_of_two(self.cut(logits_BWV).parts * self.count)
        small = entries <= _MOST_ENTRIES and widest * entries <= _MOST_KEYS
        small = small and widest * power_of_two(self.count, LEAST_CHILDREN) <= _MOST_CHILDREN
        small = small and max(self.widths) * self.passes.most <= _TILE
        small = small and self.starts[-1] <= _MOST_CANDIDATES and self.shape.nodes <= _MOST_NODES
        return small and logits_BWV.dtype != torch.float64 and kernels_run(logits_BWV)

    def columns(self, logits_BWV: Tensor) -> int:
        """Return how many columns of the logits count."""
        width = logits_BWV.shape[-1]
        return width if self.vocabulary is not None else min(width, self.vocab_size)

    def cut(self, logits_BWV: Tensor) -> "Cut":
        """Return how programs share the logits of a node."""
        columns, size = self.columns(logits_BWV), _WARPS * _STRIP
        while size < _WARPS * _LONGEST and columns > _ENOUGH * size:
            size *= 2
        strips = _WARPS if self.count <= _MOST_SORTED else 1
        return Cut(parts=-(-columns // size), strips=strips, steps=size // (strips * _LANES))

    def begin(self, temperature_B: Tensor, allowed_B: Tensor, levels: int, first: int = 0) -> "Growing":
        """Begin the trees of a round; parameters as for `Growing`."""
        return Growing(self, temperature_B, allowed_B, levels, first)

    def made_up(self, rows: int, dtype: torch.dtype) -> DraftTree | None:
        """Grow trees of even logits, for whoever compiles the kernels; None where they do not fit."""
        columns = self.vocab_size if self.vocabulary is None else len(self.vocabulary.tokens_D)
        logits_BWV = torch.zeros(rows, max(self.widths), columns, dtype=dtype, device=self.starts_X.device)
        if not self.fits(logits_BWV):
            return None
        root_B = logits_BWV.new_zeros(rows, dtype=torch.long)
        whole_B = root_B + self.shape.nodes
        growing = self.begin(1.0 + root_B, whole_B, self.shape.depth)
        for width in self.widths[:-1]:
            growing.grow(logits_BWV[:, :width])
        return growing.tree(root_B, whole_B, self.shape.nodes)[0].draft


class Growing:
    """Trees of one round.

    Parameters
    ----------
    growth : FusedGrowth
    temperature_B : Tensor
        Of the distributions that rank candidates.
    allowed_B : Tensor
        Levels of each row; 0 in those that rest.
    levels : int
        How many there will be, at least one.
    first : int
        Which of them comes first: for whoever times one below others, which are anything then.
    """

    def __init__(self, growth: FusedGrowth, temperature_B: Tensor, allowed_B: Tensor, levels: int, first: int = 0) -> None:
        self._growth, self._temperature_B, self._allowed_B = growth, temperature_B, allowed_B
        self._level, self._levels = first, levels
        size = len(allowed_B), growth.starts[levels]
        self._facts_3BC, self._scores_BC = allowed_B.new_empty(3, *size), temperature_B.new_empty(size)
        above = len(allowed_B), growth.widths[first], self._seen if first else 0
        self._visible_BWU = allowed_B.new_empty(above, dtype=torch.uint8)
        """What the last front sees; the root sees all before it."""

    def grow(self, logits_BWV: Tensor) -> None:
        """Take the likeliest children of the last front's nodes, the root at first."""
        from polydraft.backends.triton import growth_kernels as kernels

        growth, level, (batch, width) = self._growth, self._level, logits_BWV.shape[:2]
        assert width == growth.widths[level] and level < self._levels
        logits_RV, count, cut = side_by_side(logits_BWV.flatten(0, 1)), growth.count, growth.cut(logits_BWV)
        facts_3BC, scores_BC, narrow = self._facts_3BC, self._scores_BC, logits_BWV.element_size() == 2
        entries, strips, block_children = cut.parts * count, cut.parts * cut.strips, power_of_two(count, LEAST_CHILDREN)
        keys_RX, tops_2RX = facts_3BC.new_empty(batch * width, entries), scores_BC.new_empty(2, batch * width, strips)
        kernels.rank_and_sum[(batch * width, cut.parts)](
            logits_RV, self._temperature_B, keys_RX, tops_2RX,
            growth.columns(logits_BWV), count, width, logits_RV.stride(0), tops_2RX.stride(0),
            NARROW=narrow, BLOCK_E=cut.steps, BLOCK_S=cut.strips, BLOCK_K=block_children, num_warps=_WARPS,
        )  # fmt: skip
        seen, front = self._seen, growth.widths[level + 1] if level + 1 < self._levels else 0
        visible_BWU, vocabulary = self._visible_BWU.new_empty(batch, front, seen + front), growth.vocabulary
        block_nodes, block_front, block_seen = (power_of_two(size) for size in (width, max(growth.widths), growth.passes.most))
        # A warp for each node, and no more, unless tables become too large for the threads.
        share = max((block_nodes * block_children) ** 2 // 2048, block_front * block_seen // 1024)
        kernels.grow_level[(batch,)](
            keys_RX, *tops_2RX, self._temperature_B, self._allowed_B,
            facts_3BC if vocabulary is None else vocabulary.tokens_D.contiguous(), facts_3BC, scores_BC,
            self._visible_BWU, visible_BWU, level, width, entries, strips, count, scores_BC.shape[1],
            growth.starts[max(level - 1, 0)], growth.starts[level], growth.rooms[level], front, seen, facts_3BC.stride(0),
            STEP=STEP, PARTIAL=vocabulary is not None, NARROW=narrow, BLOCK_W=block_nodes, BLOCK_K=block_children,
            BLOCK_E=power_of_two(-(-entries // _LANES)), BLOCK_S=power_of_two(-(-strips // _LANES)),
            BLOCK_F=block_front, BLOCK_U=block_seen, num_warps=min(max(block_nodes, share), _WARPS),
        )  # fmt: skip
        self._visible_BWU, self._level = visible_BWU, level + 1

    @property
    def _seen(self) -> int:
        """Places down to the nodes that get children now."""
        return self._growth.passes.lead + sum(self._growth.widths[: self._level + 1])

    def front(self) -> Front:
        """Return the best of the last level's candidates."""
        growth, level, batch = self._growth, self._level, len(self._allowed_B)
        width, start = growth.widths[level], growth.starts[level - 1]
        tokens_BW, parents_BW, _ = self._facts_3BC[:, :, start : start + width].unbind()
        depths_BW = growth.depths_LW[level, :width].expand(batch, -1)
        block = Block(self._seen - width, depths_BW, self._visible_BWU.view(torch.bool), levels=(width,))
        return Front(tokens_BW, parents_BW, block)

    def tree(self, root_B: Tensor, wanted_B: Tensor, nodes: int) -> tuple[Assembled, Plan]:
        """Make the tree of the best candidates: `wanted_B` nodes of each row, no more than `nodes`, the root included."""
        from polydraft.backends.triton import growth_kernels as kernels

        assert self._level == self._levels, "levels are missing"
        growth, levels, (batch, total), depth = self._growth, self._levels, self._scores_BC.shape, self._growth.shape.depth
        nodes = min(nodes, total + 1)
        width = min(growth.shape.branch, nodes - 1)
        new = self._facts_3BC.new_empty
        numbers_BC, table_BNK, (counts_B, levels_B) = new(batch, total), new(batch, nodes, width), new(2, batch)
        chosen_BN, tokens_BN, depths_BN, places_BN = new(4, batch, nodes)
        expected_B, found_BD = new(batch, dtype=torch.float64), new(batch, depth, dtype=torch.float64)
        block_levels, block_places = power_of_two(depth), power_of_two(max(growth.rooms[:levels]), _LANES)
        block_nodes = power_of_two(nodes, _LEAST)
        kernels.choose_candidates[(batch,)](
            self._scores_BC, growth.starts_X, self._allowed_B, wanted_B,
            numbers_BC, chosen_BN, table_BNK, expected_B, counts_B, levels_B, found_BD,
            levels, total, nodes, nodes * width, depth,
            BLOCK_L=block_levels, BLOCK_P=block_places, BLOCK_N=block_nodes, BLOCK_X=_ENTRIES,
            num_warps=min(max(block_levels * block_places // _SHARE, 1), 8),
        )  # fmt: skip
        ancestors_BNN = new(batch, nodes, nodes, dtype=torch.uint8)
        kernels.plant_chosen[(batch, -(-nodes // _NODES))](
            self._facts_3BC, numbers_BC, chosen_BN, growth.starts_X, growth.firsts_X, root_B,
            tokens_BN, depths_BN, places_BN, ancestors_BNN, table_BNK,
            levels, total, nodes, width, growth.passes.most - 1, self._facts_3BC.stride(0), root_B.stride(0),
            BLOCK_T=_NODES, BLOCK_N=block_nodes,
        )  # fmt: skip
        draft = DraftTree(tokens_BN, depths_BN, ancestors_BNN.view(torch.bool), table_BNK, depth, reach=levels)
        return Assembled(draft, places_BN), Plan(expected_B, counts_B, levels_B, found_BD)
