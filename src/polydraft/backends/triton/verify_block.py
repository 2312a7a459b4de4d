"""The block walk with `hybrid` on a GPU, in five kernels; equal numbers give the verdict that torch's operations give.

Above temperature 0, torch draws and verifies by hundreds of small operations, each of which takes a GPU as long as one of these
kernels, or longer. See `polydraft.backends.triton.block_kernels` for what they do and `polydraft.verify.block` for why that is
exact.
"""

from functools import lru_cache

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, side_by_side
from polydraft.operations import implements
from polydraft.trees import DraftTree
from polydraft.verify.block import verify_block
from polydraft.verify.hybrid import Race, threshold_of
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import TargetDistribution, TreeDistributions, Verdict, all_at_once

_BLOCK = 1024
"""Tokens that one program looks at; fewer where programs wait for each other, to add to the same cells."""
_LEAST_DEPTH = 8
"""Trees that are less deep share the kernel of these."""
_FACTS = 5


def _supports(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> bool:
    """Trees that `hybrid` or a bucketed race has drawn, whose distributions are all there."""
    if threshold_of(scheme) is None or not draft.distributions or not kernels_run(draft.tokens_BN):
        return False
    return all_at_once(target_distribution, draft, draft.distributions[0].shape[-1])


@implements(verify_block, "triton", supports=_supports)
def _verify_block(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> Verdict:
    assert isinstance(target_distribution, TreeDistributions)
    return FusedRound(scheme, draft, target_distribution.everywhere(draft), uniforms_BU, least_weight).verdict()


class FusedRound:
    """What the kernels of one verification read and hand on, of the distributions at all nodes.

    R are the *places*, B · N nodes of rows; C are cells, M blocks of tokens.
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
        """Weights of the target and of the draft in each cell; the target's of tokens that the draft does not know."""
        self.known_RK, self.facts_RX = self._room(places, self.count), self._room(places, _FACTS, dtype=torch.int32)
        self.picks_R = self._room(places)
        """Node of the picked child; -1 for none."""
        self.scales_R, self.ratios_R, self.masses_R = self._room(3, places, dtype=torch.float64)
        self.quotients_RC = self._room(places, self.cells, dtype=torch.float64)
        """Distribution of the picked child, over the draft's weight, by cell."""
        self.sums_BDM = self._room(self.batch, self.depth + 1, self.blocks)

    def _room(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.target_BNV.device)

    def pick(self) -> None:
        """Pick a child of every node, as if it were on the path."""
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
        """Pick, then decide how much of each path is kept."""
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
    """Return where each level's distributions begin among all of a row's; made once, before a round is captured."""
    return torch.tensor([sum(sizes[:level]) for level in range(len(sizes))], device=device)
