"""Drawing `hybrid`'s children on a GPU in two kernels."""

import torch
from torch import Tensor

from polydraft.backends.triton import power_of_two, side_by_side

_BLOCK, _TILES = 256, 8
LEAST_CHILDREN, MOST_CHILDREN = 4, 16
"""Nodes of fewer children share the kernel of these; of more, the tables of a program would become too large."""


def draw(draft_probs_RV: Tensor, uniforms_RK: Tensor, threshold: float) -> Tensor:
    """Take the top tokens and draw the others from the rest, as `Hybrid.draw` does."""
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
