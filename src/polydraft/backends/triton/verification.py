"""Verification and a round's outcome on a GPU, in a few kernels, with the same verdicts as torch's operations.

Torch takes hundreds of small operations above temperature 0, about forty at temperature 0, and thirty for the outcome, each of
which takes a GPU at least as long as one of these kernels. `block_kernels` and `follow_kernels` describe what the kernels do,
`polydraft.verify.block` and `polydraft.verify.node` why it is exact.
"""

from functools import lru_cache

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, runs_on_tensors, side_by_side
from polydraft.engine.outcome import Outcome, RowOutcome, conclude
from polydraft.operations import implements
from polydraft.trees import DraftTree
from polydraft.verify.block import verify_block
from polydraft.verify.hybrid import Race, threshold_of
from polydraft.verify.node import follow_largest, follow_tokens
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import TargetDistribution, TreeDistributions, Verdict, all_at_once

_LEAST_DEPTH = 8
"""Shallower trees use the kernel compiled for this depth."""
_BLOCK = 1024
"""Tokens per program; half as many if programs wait for each other to add to the same cells."""
_FACTS = 5
"""`block_kernels.FACTS`."""
_PART = 4096
"""Tokens per program at temperature 0."""
_LEAST_NODES, _MOST_NODES = 16, 1024
"""Smaller trees use the kernel compiled for the first; for trees larger than the second, a program would hold too much."""
_TILE = 4096
"""Most children of all nodes, or parts of their logits, that a program takes at a time."""
_COUNTED = 512
"""Children that the outcome's kernel takes at a time."""


def _can_verify(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> bool:
    """Whether `hybrid` or a bucketed race has drawn the trees, and the target's distributions can be computed at once."""
    if threshold_of(scheme) is None or not draft.distributions or not kernels_run(draft.tokens_BN):
        return False
    return all_at_once(target_distribution, draft, draft.distributions[0].shape[-1])


@implements(verify_block, "triton", supports=_can_verify)
def _verify_block(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> Verdict:
    assert isinstance(target_distribution, TreeDistributions)
    return FusedRound(scheme, draft, target_distribution.everywhere(draft), uniforms_BU, least_weight).verdict()


class FusedRound:
    """The inputs and intermediate results of the kernels of one verification.

    R are the *places*, the B · N nodes; C are cells, M blocks of tokens.
    """

    def __init__(self, scheme: Scheme, draft: DraftTree, target_BNV: Tensor, uniforms_BU: Tensor, least_weight: float) -> None:
        assert isinstance(scheme, Race) and scheme.buckets is not None and scheme.select_uniforms is not None
        assert draft.distribution_rows_BN is not None
        self.batch, self.nodes, self.size = target_BNV.shape
        self.count, self.depth, self.numbers = draft.child_table_BNK.shape[2], draft.depth, scheme.select_uniforms
        self.threshold, self.least_weight, self.vocabulary = threshold_of(scheme), least_weight, draft.vocabulary
        self.target_BNV, self.distributions_BGD = target_BNV.float().contiguous(), torch.cat(draft.distributions, dim=1).float()
        self.uniforms_BU, self.width = uniforms_BU.double().contiguous(), self.distributions_BGD.shape[2]
        tables = draft.tokens_BN, draft.child_table_BNK, draft.distribution_rows_BN, draft.depths_BN
        self.tokens_BN, self.table_BNK, self.rows_BN, self.depths_BN = map(side_by_side, tables)
        self.starts_L = _starts(tuple(distribution.shape[1] for distribution in draft.distributions), target_BNV.device)
        self.columns_X = self.tokens_BN if draft.vocabulary is None else draft.vocabulary.column_X
        self.cells, self.blocks = power_of_two(scheme.buckets), -(-self.size // _BLOCK)
        places = self.batch * self.nodes
        self.cells_R2C, self.outside_R = self._room(places, 2, self.cells), self._room(places)
        """Target and draft weights in each cell; the target's weight of tokens that the draft does not know."""
        self.known_RK, self.facts_RX = self._room(places, self.count), self._room(places, _FACTS, dtype=torch.int32)
        self.picks_R = self._room(places)
        """Node of the picked child; -1 for none."""
        self.scales_R, self.ratios_R, self.masses_R = self._room(3, places, dtype=torch.float64)
        self.quotients_RC = self._room(places, self.cells, dtype=torch.float64)
        """The picked child's distribution divided by the draft's weight, by cell."""
        self.sums_BDM = self._room(self.batch, self.depth + 1, self.blocks)

    def _room(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.target_BNV.device)

    def pick(self) -> None:
        """Pick a child of every node, as if the node were on the path."""
        from polydraft.backends.triton import block_kernels as kernels

        places, children = self.batch * self.nodes, power_of_two(self.count, LEAST_CHILDREN)
        partial, distributions = self.vocabulary is not None, (self.target_BNV, self.distributions_BGD)
        found = (self.cells_R2C, self.outside_R, self.known_RK, self.facts_RX, self.scales_R)
        strides = (*(table.stride(0) for table in (self.depths_BN, self.tokens_BN)), *self.table_BNK.stride()[:2])
        kernels.prepare[(places,)](
            *distributions, self.rows_BN, self.depths_BN, self.starts_L, self.tokens_BN, self.table_BNK, self.columns_X, *found,
            self.nodes, self.count, len(self.starts_L), self.size, self.width, self.distributions_BGD.shape[1],
            self.rows_BN.stride(0), *strides,
            THRESHOLD=self.threshold, PARTIAL=partial, CELLS=self.cells, BLOCK=2 * _BLOCK, BLOCK_K=children, num_warps=8,
        )  # fmt: skip
        kernels.fill_cells[(places, 2 * self.blocks)](
            *distributions, self.columns_X, *found, self.count, self.size, self.width,
            PARTIAL=partial, CELLS=self.cells, BLOCK=_BLOCK // 2, num_warps=4,
        )  # fmt: skip
        kernels.race[(places,)](
            *distributions, *found, self.table_BNK, self.tokens_BN, self.depths_BN, self.uniforms_BU,
            self.quotients_RC, self.picks_R, self.ratios_R, self.masses_R,
            self.nodes, self.count, self.depth, self.numbers, self.size, self.width, *strides, self.uniforms_BU.stride(0),
            CELLS=self.cells, BLOCK_K=children, num_warps=16,
        )  # fmt: skip

    def verdict(self) -> Verdict:
        """Pick children, then decide how much of each path is kept."""
        from polydraft.backends.triton import block_kernels as kernels

        self.pick()
        path_BD, tokens_BD = self._room(2, self.batch, self.depth + 1)
        accepted_B, offered_B, fault_B = self._room(3, self.batch)
        found = (self.known_RK, self.facts_RX, self.scales_R, self.quotients_RC, self.masses_R, self.picks_R, self.ratios_R)
        given = (self.target_BNV, self.distributions_BGD, self.columns_X, *found, self.sums_BDM)
        constants = {"LEAST_WEIGHT": self.least_weight, "PARTIAL": self.vocabulary is not None, "CELLS": self.cells}
        kernels.measure[(self.batch * (self.depth + 1), self.blocks)](
            *given, self.nodes, self.count, self.depth, self.size, self.width, **constants, BLOCK=_BLOCK, num_warps=8
        )
        kernels.finish[(self.batch,)](
            *given, self.tokens_BN, self.uniforms_BU, path_BD, accepted_B, tokens_BD, offered_B, fault_B,
            self.nodes, self.count, self.depth, self.blocks, self.numbers * self.depth, self.size, self.width,
            self.tokens_BN.stride(0), self.uniforms_BU.stride(0), **constants, BLOCK=_BLOCK,
            BLOCK_D=power_of_two(self.depth + 1, _LEAST_DEPTH), BLOCK_M=power_of_two(self.blocks), num_warps=8,
        )  # fmt: skip
        return Verdict(path_BD, accepted_B, tokens_BD, offered_B, fault_B)


@lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each level's distributions begin among all of a row's; cached before a round is captured."""
    return torch.tensor([sum(sizes[:level]) for level in range(len(sizes))], device=device)


def _can_follow(draft: DraftTree, tokens_BN: Tensor) -> bool:
    return draft.tokens_BN.shape[1] <= _MOST_NODES and kernels_run(draft.tokens_BN)


def _can_follow_logits(draft: DraftTree, logits_BNV: Tensor) -> bool:
    return logits_BNV.dtype.itemsize <= 4 and _can_follow(draft, draft.tokens_BN)


@implements(follow_largest, "triton", supports=_can_follow_logits)
def _follow_largest(draft: DraftTree, logits_BNV: Tensor) -> Verdict:
    from polydraft.backends.triton import follow_kernels as kernels

    batch, nodes, size = logits_BNV.shape
    logits_BNV = side_by_side(logits_BNV)
    parts = -(-size // _PART)
    keys_BNM = torch.empty((batch, nodes, parts), dtype=torch.int64, device=logits_BNV.device)
    kernels.largest_of_parts[(batch * nodes, parts)](
        logits_BNV, keys_BNM, nodes, size, *logits_BNV.stride()[:2], BLOCK=_PART, num_warps=8
    )
    return _followed(draft, keys_BNM, parts)


@implements(follow_tokens, "triton", supports=_can_follow)
def _follow_tokens(draft: DraftTree, tokens_BN: Tensor) -> Verdict:
    return _followed(draft, tokens_BN, 0)


def _followed(draft: DraftTree, given: Tensor, parts: int) -> Verdict:
    """Follow tokens, or keys if there are `parts`."""
    from polydraft.backends.triton import follow_kernels as kernels

    batch, nodes = draft.tokens_BN.shape
    assert given.shape[:2] == (batch, nodes)
    given, tokens_BN, table_BNK = map(side_by_side, (given, draft.tokens_BN, draft.child_table_BNK))
    extra_BNK = table_BNK if draft.extra_table_BNK is None else side_by_side(draft.extra_table_BNK)
    count, extra_count = table_BNK.shape[2], extra_BNK.shape[2]
    path_BD, emitted_BD = given.new_empty(2, batch, draft.depth + 1)
    accepted_B, offered_B, fault_B = given.new_empty(3, batch)
    block_nodes = power_of_two(nodes, _LEAST_NODES)
    most_children, widest = max(count, extra_count), _TILE // block_nodes
    kernels.follow[(batch,)](
        given, tokens_BN, table_BNK, extra_BNK, path_BD, accepted_B, emitted_BD, offered_B, fault_B,
        nodes, count, extra_count, draft.depth, parts, given.stride(0), tokens_BN.stride(0),
        *table_BNK.stride()[:2], *extra_BNK.stride()[:2],
        KEYED=parts > 0, EXTRA=draft.extra_table_BNK is not None, BLOCK_N=block_nodes,
        BLOCK_K=min(power_of_two(most_children, LEAST_CHILDREN), widest), BLOCK_M=min(power_of_two(parts or 1), widest),
        BLOCK_D=power_of_two(draft.depth + 1, _LEAST_DEPTH), num_warps=4,
    )  # fmt: skip
    return Verdict(path_BD, accepted_B, emitted_BD, offered_B, fault_B)


@implements(conclude, "triton", supports=runs_on_tensors)
def _conclude(draft: DraftTree, verdict: Verdict, tail_B2: Tensor, active_B: Tensor) -> tuple[Outcome, Tensor]:
    from polydraft.backends.triton import follow_kernels as kernels

    assert tail_B2.is_contiguous()
    (batch, nodes, count), columns = draft.child_table_BNK.shape, draft.depth + len(RowOutcome._fields)
    tables = verdict.path_BD, verdict.tokens_BD, draft.tokens_BN, draft.depths_BN, draft.child_table_BNK
    path_BD, emitted_BD, tokens_BN, depths_BN, table_BNK = map(side_by_side, tables)
    numbers = (number_B.contiguous() for number_B in (verdict.accepted_B, verdict.offered_B, verdict.fault_B))
    packed_BX, keep_B = tail_B2.new_empty(batch, columns), tail_B2.new_empty(batch)
    kernels.conclude[(batch,)](
        path_BD, emitted_BD, *numbers, tokens_BN, depths_BN, table_BNK, active_B.view(torch.uint8), tail_B2, packed_BX, keep_B,
        nodes, nodes - draft.riders, count, draft.depth, path_BD.stride(0), emitted_BD.stride(0), tokens_BN.stride(0),
        depths_BN.stride(0), *table_BNK.stride()[:2],
        BLOCK_D=power_of_two(draft.depth + 1, _LEAST_DEPTH), BLOCK=_COUNTED, num_warps=4,
    )  # fmt: skip
    return Outcome(packed_BX, draft.depth), keep_B
