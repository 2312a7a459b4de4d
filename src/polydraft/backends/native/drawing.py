"""Drawing from rows of weights, finding their largest, and Gumbel noise, in C on a CPU."""

import torch
from torch import Tensor

from polydraft.backends.native.arguments import working_memory
from polydraft.backends.native.build import library, loaded
from polydraft.devices import can_sync
from polydraft.operations import implements
from polydraft.sampling.categorical import draw_independent
from polydraft.sampling.gumbel import largest_perturbed, perturbed
from polydraft.verify.weights import Ranked, largest

_MOST = 64
"""Most weights to find per row, because the compiled code keeps them sorted by insertion."""


def readable(table_RX: Tensor, dtype: torch.dtype) -> bool:
    """Whether compiled code can read a table."""
    side_by_side = table_RX.stride(1) == 1 or table_RX.shape[1] == 1
    return can_sync(table_RX) and table_RX.dtype == dtype and side_by_side and loaded() is not None


def _can_draw(weights_RV: Tensor, uniforms_RK: Tensor) -> bool:
    return readable(weights_RV, torch.float32) and readable(uniforms_RK, torch.float64)


@implements(draw_independent, "native", supports=_can_draw)
def draw(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """Draw K tokens per row, with replacement, from float32 weights; -1 where all are zero."""
    kernels, (rows, count), width = library(), weights_RV.shape, uniforms_RK.shape[1]
    assert weights_RV.dtype == torch.float32 and weights_RV.stride(1) == 1
    assert uniforms_RK.dtype == torch.float64 and (width == 1 or uniforms_RK.stride(1) == 1)
    tokens_RK = torch.empty(rows, width, dtype=torch.long)
    kernels.polydraft_draw(
        weights_RV.data_ptr(), weights_RV.stride(0), rows, count, uniforms_RK.data_ptr(), uniforms_RK.stride(0), width,
        working_memory(kernels.polydraft_draw_memory(count)), tokens_RK.data_ptr(),
    )  # fmt: skip
    return tokens_RK


def _can_rank(weights_RV: Tensor, count: int) -> bool:
    return 0 < count <= _MOST and weights_RV.shape[1] > 0 and readable(weights_RV, torch.float32)


@implements(largest, "native", supports=_can_rank)
def _largest(weights_RV: Tensor, count: int) -> Ranked:
    ranked = largest_weights(weights_RV, min(count, weights_RV.shape[1]))
    return largest.reference(weights_RV, count) if ranked is None else ranked


def largest_weights(weights_RV: Tensor, count: int) -> Ranked | None:
    """Return the largest of each row's float32 weights in order, and their columns; None if there are NaNs."""
    assert weights_RV.dtype == torch.float32 and weights_RV.stride(1) == 1 and 0 < count <= weights_RV.shape[1]
    rows, size = weights_RV.shape
    value_RK, token_RK = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
    sizes = (weights_RV.stride(0), rows, size, count)
    comparable = library().polydraft_largest(weights_RV.data_ptr(), *sizes, value_RK.data_ptr(), token_RK.data_ptr())
    return (value_RK, token_RK) if comparable else None


def _can_perturb(scores_BGV: Tensor, *noise: Tensor | int | None) -> bool:
    return scores_BGV.is_contiguous() and readable(scores_BGV.flatten(0, 1), torch.float32)


def _noise(
    scores_BGV: Tensor, keys_B: Tensor, positions_BK: Tensor, scales_B: Tensor, tokens_D: Tensor | None
) -> tuple[int | None, ...]:
    """Return the first arguments of functions that add noise."""
    (rows, nodes, columns), own_keys = scores_BGV.shape, positions_BK.shape[1]
    given = keys_B, positions_BK, scales_B, *(() if tokens_D is None else (tokens_D,))
    assert own_keys in (1, nodes) and all(one.is_contiguous() for one in given)
    assert keys_B.dtype == positions_BK.dtype == torch.long and (tokens_D is None or tokens_D.dtype == torch.long)
    numbers = scores_BGV.data_ptr(), rows, own_keys, nodes // own_keys, columns
    tokens = None if tokens_D is None else tokens_D.data_ptr()
    return *numbers, keys_B.data_ptr(), positions_BK.data_ptr(), scales_B.data_ptr(), tokens


@implements(perturbed, "native", supports=_can_perturb)
def _perturbed(scores_BGV: Tensor, keys_B: Tensor, positions_BK: Tensor, scales_B: Tensor, tokens_D: Tensor | None) -> Tensor:
    noisy_BGV = torch.empty_like(scores_BGV)
    library().polydraft_perturb(*_noise(scores_BGV, keys_B, positions_BK, scales_B, tokens_D), noisy_BGV.data_ptr())
    return noisy_BGV


def _can_find_largest(
    scores_BGV: Tensor, keys_B: Tensor, positions_BK: Tensor, scales_B: Tensor, tokens_D: Tensor | None, count: int = 1
) -> bool:
    return count <= _MOST and _can_perturb(scores_BGV)


@implements(largest_perturbed, "native", supports=_can_find_largest)
def _largest_perturbed(
    scores_BGV: Tensor, keys_B: Tensor, positions_BK: Tensor, scales_B: Tensor, tokens_D: Tensor | None, count: int = 1
) -> Tensor:
    columns_BGK = torch.empty(*scores_BGV.shape[:2], count, dtype=torch.long)
    noise = _noise(scores_BGV, keys_B, positions_BK, scales_B, tokens_D)
    library().polydraft_largest_perturbed(*noise, count, columns_BGK.data_ptr())
    return columns_BGK
