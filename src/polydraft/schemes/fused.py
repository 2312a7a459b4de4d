"""Drawing `hybrid`'s children on a GPU in two kernels, and where kernels run at all."""

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polydraft.schemes.arrays import can_sync

if TYPE_CHECKING:
    from polydraft.schemes.hybrid import Hybrid

_BLOCK, _TILES = 256, 8
_LEAST_CHILDREN = 4
"""Nodes of fewer children share the kernel of these."""


def kernels_run(tensor: Tensor) -> bool:
    """Whether kernels of our own can work on a tensor: on a GPU, and in Triton's interpreter where the host may not look."""
    if tensor.device.type == "cuda":
        return _compiles(tensor.device) and not torch.compiler.is_compiling()
    return os.environ.get("TRITON_INTERPRET") == "1" and _has_triton() and not can_sync(tensor)


@cache
def _compiles(device: torch.device) -> bool:
    return _has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is not below either."""
    return max(1 << (number - 1).bit_length(), least)


def draw_fits(scheme: "Hybrid", draft_probs_RV: Tensor) -> bool:
    """Whether `draw` can draw the scheme's children from these laws."""
    known = not isinstance(scheme.threshold, Tensor)  # a compiled kernel has it as a constant
    return known and draft_probs_RV.dtype == torch.float32 and kernels_run(draft_probs_RV)


def draw(scheme: "Hybrid", draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """Take the top tokens and draw the others from the rest, as `Hybrid.draw` does."""
    from polydraft.schemes import _kernels as kernels

    rows, columns = draft_probs_RV.shape
    count = uniforms_RK.shape[1]
    draft_probs_RV, uniforms_RK = (table if table.stride(1) == 1 else table.contiguous() for table in (draft_probs_RV, uniforms_RK))
    blocks = -(-columns // _BLOCK)
    parts = -(-blocks // _TILES)
    sums_RM = draft_probs_RV.new_empty(rows, blocks, dtype=torch.int64)
    keys_RX = sums_RM.new_empty(rows, parts * count)
    children_RK = sums_RM.new_empty(rows, count)
    kernels.rank_blocks[(rows, parts)](
        draft_probs_RV, sums_RM, keys_RX, columns, blocks, count, draft_probs_RV.stride(0), TILES=_TILES, BLOCK=_BLOCK
    )
    kernels.draw_children[(rows,)](
        draft_probs_RV, sums_RM, keys_RX, uniforms_RK.double(), children_RK, columns, blocks, count, parts,
        draft_probs_RV.stride(0), uniforms_RK.stride(0),
        THRESHOLD=scheme.threshold, BLOCK=_BLOCK, BLOCK_K=power_of_two(count, _LEAST_CHILDREN),
        BLOCK_M=power_of_two(blocks), BLOCK_X=power_of_two(parts * count),
    )  # fmt: skip
    return children_RK
