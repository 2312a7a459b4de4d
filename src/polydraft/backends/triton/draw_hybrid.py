"""Drawing `hybrid`'s children on a GPU in two kernels."""

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, side_by_side
from polydraft.operations import implements
from polydraft.verify.hybrid import draw_hybrid

_BLOCK, _TILES = 256, 8
_MOST_CHILDREN = 16
"""Of nodes with more, the tables of a program would become too large."""


def _supports(draft_probs_RV: Tensor, uniforms_RK: Tensor, threshold: float) -> bool:
    few = uniforms_RK.shape[1] <= _MOST_CHILDREN
    return few and draft_probs_RV.dtype == torch.float32 and kernels_run(draft_probs_RV)


@implements(draw_hybrid, "triton", supports=_supports)
def _draw(draft_probs_RV: Tensor, uniforms_RK: Tensor, threshold: float) -> Tensor:
    from polydraft.backends.triton import draw_kernels as kernels

    rows, columns = draft_probs_RV.shape
    count = uniforms_RK.shape[1]
    uniforms_RK, draft_probs_RV = uniforms_RK.double().contiguous(), side_by_side(draft_probs_RV)
    blocks = -(-columns // _BLOCK)
    parts = -(-blocks // _TILES)
    sums_RM = draft_probs_RV.new_empty(rows, blocks, dtype=torch.int64)
    keys_RX = sums_RM.new_empty(rows, parts * count)
    children_RK = sums_RM.new_empty(rows, count)
    kernels.rank_blocks[(rows, parts)](
        draft_probs_RV, sums_RM, keys_RX, columns, blocks, count, draft_probs_RV.stride(0), TILES=_TILES, BLOCK=_BLOCK
    )
    kernels.draw_children[(rows,)](
        draft_probs_RV, sums_RM, keys_RX, uniforms_RK, children_RK, columns, blocks, count, parts,
        draft_probs_RV.stride(0), uniforms_RK.stride(0),
        THRESHOLD=threshold, BLOCK=_BLOCK, BLOCK_K=power_of_two(count, LEAST_CHILDREN),
        BLOCK_M=power_of_two(blocks), BLOCK_X=power_of_two(parts * count),
    )  # fmt: skip
    return children_RK
