"""The block walk with `hybrid` on a GPU, in five kernels: the same numbers give the same verdict as the many operations of torch.

Everything that is needed of a round's laws is computed at all nodes at once, in few passes: the walk's own kernels replace some
two hundred small operations, each of which takes as long as one of them. See `polydraft.walks._kernels`.
"""

from functools import lru_cache

import torch
from torch import Tensor

from polydraft.schemes import Hybrid, Race, RaceBucketed, Scheme
from polydraft.schemes.fused import kernels_run, power_of_two
from polydraft.trees import DraftTree
from polydraft.walks.walk import Verdict

_BLOCK = 1024
"""Tokens that one program looks at."""
_LEAST_CHILDREN, _LEAST_DEPTH = 4, 8
"""Smaller trees share the kernels of these."""
_FACTS = 5


def block_fits(scheme: Scheme, draft: DraftTree) -> bool:
    """Whether `verify_block` can verify these trees: drawn by `hybrid` or a bucketed race, as they are registered."""
    return _threshold(scheme) is not None and draft.tokens_BN.shape[1] > 1 and bool(draft.laws) and kernels_run(draft.tokens_BN)


def _threshold(scheme: Scheme) -> float | None:
    """Return from how many expected draws on a child is certain, as a number; None for schemes that the kernels do not know."""
    kind = type(scheme)
    if not isinstance(scheme, Race) or scheme.buckets is None or kind.select is not Race.select:
        return None
    if isinstance(scheme, Hybrid):
        known = kind.contest is Hybrid.contest and kind._certain_children is Hybrid._certain_children
        return scheme.threshold if known and not isinstance(scheme.threshold, Tensor) else None
    return torch.inf if kind is RaceBucketed else None


def verify_block(
    scheme: Scheme, draft: DraftTree, target_BNV: Tensor, uniforms_BU: Tensor, least_weight: float
) -> Verdict:
    """Pick the paths of all rows, then draw once where each stops and once what follows.

    Parameters
    ----------
    scheme : Scheme
    draft : DraftTree
        What `block_fits` has said yes to.
    target_BNV : Tensor
        The target's laws at all nodes, float32.
    uniforms_BU : Tensor
        As many as `BlockWalk.uniforms` says.
    least_weight : float
        See `BlockWalk`.
    """
    from polydraft.walks import _kernels as kernels

    threshold = _threshold(scheme)
    assert isinstance(scheme, Race) and scheme.buckets is not None and scheme.select_uniforms is not None
    assert threshold is not None and draft.law_rows_BN is not None
    batch, nodes, size = target_BNV.shape
    count, depth, numbers = draft.child_table_BNK.shape[2], draft.depth, scheme.select_uniforms
    target_BNV, laws_BGD = target_BNV.contiguous().float(), torch.cat(draft.laws, dim=1).float()
    uniforms_BU, tokens_BN = uniforms_BU.double().contiguous(), draft.tokens_BN
    if tokens_BN.stride(1) != 1:
        tokens_BN = tokens_BN.contiguous()
    table_BNK, rows_BN, depths_BN = draft.child_table_BNK, draft.law_rows_BN, draft.depths_BN
    assert table_BNK.stride(2) == rows_BN.stride(1) == depths_BN.stride(1) == 1
    starts_L = _starts(tuple(law.shape[1] for law in draft.laws), target_BNV.device)
    columns_X = tokens_BN if draft.vocabulary is None else draft.vocabulary._column_X
    places, blocks, cells = batch * nodes, -(-size // _BLOCK), power_of_two(scheme.buckets)

    def room(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=target_BNV.device)

    cells_R2C, outside_R, known_RK = room(places, 2, cells), room(places), room(places, count)
    facts_RX, picks_R, sums_BDM = room(places, _FACTS, dtype=torch.int32), room(places), room(batch, depth + 1, blocks)
    scales_R, ratios_R, masses_R = room(3, places, dtype=torch.float64)
    quotients_RC = room(places, cells, dtype=torch.float64)
    path_BD, tokens_BD, accepted_B, offered_B, fault_B = (
        *room(2, batch, depth + 1),
        *room(3, batch),
    )
    of_trees = (depths_BN.stride(0), tokens_BN.stride(0), table_BNK.stride(0), table_BNK.stride(1))
    partial, block_k = draft.vocabulary is not None, power_of_two(count, _LEAST_CHILDREN)
    width = laws_BGD.shape[2]
    kernels.prepare[(places,)](
        target_BNV, laws_BGD, rows_BN, depths_BN, starts_L, tokens_BN, table_BNK, columns_X,
        cells_R2C, outside_R, known_RK, facts_RX, scales_R,
        nodes, count, len(draft.laws), size, width, laws_BGD.shape[1], rows_BN.stride(0), *of_trees,
        THRESHOLD=threshold, PARTIAL=partial, CELLS=cells, BLOCK=2 * _BLOCK, BLOCK_K=block_k, num_warps=8,
    )  # fmt: skip
    kernels.fill_cells[(places, blocks)](
        target_BNV, laws_BGD, columns_X, cells_R2C, outside_R, known_RK, facts_RX, scales_R, count, size, width,
        PARTIAL=partial, CELLS=cells, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    kernels.race[(places,)](
        target_BNV, laws_BGD, columns_X, cells_R2C, outside_R, known_RK, facts_RX, scales_R, table_BNK, tokens_BN, depths_BN,
        uniforms_BU, quotients_RC, picks_R, ratios_R, masses_R,
        nodes, count, depth, numbers, size, width, *of_trees, uniforms_BU.stride(0),
        CELLS=cells, BLOCK_K=block_k, num_warps=16,
    )  # fmt: skip
    found = (target_BNV, laws_BGD, columns_X, known_RK, facts_RX, scales_R, quotients_RC, masses_R, picks_R, ratios_R, sums_BDM)
    kernels.measure[(batch * (depth + 1), blocks)](
        *found, nodes, count, depth, size, width,
        LEAST_WEIGHT=least_weight, PARTIAL=partial, CELLS=cells, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    kernels.finish[(batch,)](
        *found, tokens_BN, uniforms_BU, path_BD, accepted_B, tokens_BD, offered_B, fault_B,
        nodes, count, depth, blocks, numbers * depth, size, width, tokens_BN.stride(0), uniforms_BU.stride(0),
        LEAST_WEIGHT=least_weight, PARTIAL=partial, CELLS=cells, BLOCK=_BLOCK,
        BLOCK_D=power_of_two(depth + 1, _LEAST_DEPTH), BLOCK_M=power_of_two(blocks), num_warps=4,
    )  # fmt: skip
    return Verdict(path_BD, accepted_B, tokens_BD, offered_B, fault_B)


@lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each level's laws begin among all of a row's; made once, before a round is recorded."""
    return torch.tensor([sum(sizes[:level]) for level in range(len(sizes))], device=device)
