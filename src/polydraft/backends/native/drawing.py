"""Drawing from rows of weights, and finding their largest, in C on a CPU."""

import torch
from torch import Tensor

from polydraft.backends.native.build import library, loaded
from polydraft.backends.native.verification import draw, largest_weights
from polydraft.devices import can_sync
from polydraft.operations import implements
from polydraft.sampling.categorical import draw_independent
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
def _draw_independent(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    return draw(library(), weights_RV, uniforms_RK)


def _can_rank(weights_RV: Tensor, count: int) -> bool:
    return 0 < count <= _MOST and weights_RV.shape[1] > 0 and readable(weights_RV, torch.float32)


@implements(largest, "native", supports=_can_rank)
def _largest(weights_RV: Tensor, count: int) -> Ranked:
    ranked = largest_weights(library(), weights_RV, min(count, weights_RV.shape[1]))
    return largest.reference(weights_RV, count) if ranked is None else ranked  # None: there are NaNs
