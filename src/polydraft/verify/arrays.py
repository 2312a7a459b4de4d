"""Small arrays of either library: numpy's on a CPU, where its calls take a fifth of torch's time, torch's elsewhere.

Work on cells and children is dozens of operations on little data, of which the calls are most of the cost. Code that is
written with these few functions, and with what both libraries spell alike, runs on either.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from polydraft.backends.native import loaded
from polydraft.backends.native.verification import largest_weights
from polydraft.sampling import NO_TOKEN

Array = Any
"""A numpy array or a tensor."""
_P = ParamSpec("_P")
_T = TypeVar("_T")
_HOSTS = ("cpu",)
"""Devices whose memory the host can use; tests empty it, to run on a CPU what other devices run."""


def quietly(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate functions in which rows of no account may divide 0 by 0, of which numpy would warn and torch does not."""

    @wraps(function)
    def quiet(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():  # then nothing is numpy's, and its settings cannot be part of a graph
            return function(*args, **kwargs)
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return quiet


def can_sync(tensor: Tensor) -> bool:
    """Whether the host may look at values: it costs nothing on a CPU and saves idle work; elsewhere it stalls the device."""
    return tensor.device.type in _HOSTS


def as_array(tensor: Tensor) -> Array:
    """Return the tensor in the library that is quicker where it is, without a copy."""
    return tensor.numpy() if can_sync(tensor) else tensor


def as_tensor(array: Array) -> Tensor:
    """Return the tensor of an array, without a copy."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def xp(array: Array) -> ModuleType:
    """Return numpy or torch, for functions that have the same name and arguments in both."""
    return np if isinstance(array, np.ndarray) else torch


def arange(count: int, like: Array) -> Array:
    """Return 0, 1, ..., count − 1."""
    return np.arange(count) if isinstance(like, np.ndarray) else torch.arange(count, device=like.device)


def at_least(array: Array, least: float) -> Array:
    """Raise what is smaller."""
    return np.maximum(array, least) if isinstance(array, np.ndarray) else array.clamp(min=least)


def at_most(array: Array, most: float) -> Array:
    """Lower what is larger."""
    return np.minimum(array, most) if isinstance(array, np.ndarray) else array.clamp(max=most)


def take(table_RC: Array, index_RK: Array) -> Array:
    """Look up K entries of each row."""
    if not isinstance(table_RC, np.ndarray):
        return table_RC.gather(1, index_RK)
    return table_RC[0].take(index_RK) if len(table_RC) == 1 else np.take_along_axis(table_RC, index_RK, 1)


def top(table_RC: Array, count: int) -> tuple[Array, Array]:
    """Return the largest entries of each row in order, and where they are."""
    if not isinstance(table_RC, np.ndarray):
        return tuple(table_RC.topk(count, dim=1))
    index_RK = table_RC.argpartition(-count, -1)[:, -count:]
    value_RK = take(table_RC, index_RK)
    order_RK = (-value_RK).argsort(-1)
    return take(value_RK, order_RK), take(index_RK, order_RK)


def sums_by(cell_RV: Array, weight_RV: Array, cells: int) -> Array:
    """Return the total weight of each cell, `[R, cells]`, as float64."""
    if not isinstance(cell_RV, np.ndarray):
        return weight_RV.new_zeros(len(weight_RV), cells, dtype=torch.float64).scatter_add_(1, cell_RV, weight_RV.double())
    if len(cell_RV) > 1:
        cell_RV = cell_RV + cells * np.arange(len(cell_RV))[:, None]
    return np.bincount(cell_RV.ravel(), weight_RV.ravel(), cells * len(weight_RV)).reshape(-1, cells)


def total(table_RC: Array) -> Array:
    """Add up each row of float64 numbers below a million, to the same bits whatever its order, its padding and its company.

    Rounded to a fixed number of binary places, they are added without any rounding.
    """
    return (table_RC * _FIXED_POINT).round().sum(-1) / _FIXED_POINT


_FIXED_POINT = 2.0**32


def put(table_RC: Array, index_RK: Array, value_RK: Array) -> None:
    """Set K entries of each row; where one is named twice, to the same."""
    if isinstance(table_RC, np.ndarray):
        table_RC[np.arange(len(table_RC))[:, None], index_RK] = value_RK
    else:
        table_RC.scatter_(1, index_RK, value_RK)


def add_to(table_RC: Array, index_RK: Array, value_RK: Array) -> None:
    """Add to K entries of each row, twice where one is named twice."""
    if isinstance(table_RC, np.ndarray):
        np.add.at(table_RC, (np.arange(len(table_RC))[:, None], index_RK), value_RK)
    else:
        table_RC.scatter_add_(1, index_RK, value_RK)


def running_max(table_RC: Array) -> Array:
    """Return the largest entry up to each place."""
    return np.maximum.accumulate(table_RC, -1) if isinstance(table_RC, np.ndarray) else table_RC.cummax(-1).values


def raised(base_RC: Array, power_R1: Array) -> Array:
    """Return whole powers, from 1 up, one per row; anything for power 0."""
    if not isinstance(base_RC, np.ndarray):
        return base_RC**power_R1
    result_RC = base_RC
    for power in range(1, int(power_R1.max(initial=0))):
        higher_RC = result_RC * base_RC
        result_RC = higher_RC if len(base_RC) == 1 else np.where(power_R1 > power, higher_RC, result_RC)
    return result_RC


def backwards(table_RC: Array) -> Array:
    """Return each row from its end."""
    return table_RC[:, ::-1] if isinstance(table_RC, np.ndarray) else table_RC.flip(-1)


def searchsorted(table_RC: Array, mark_RK: Array) -> Array:
    """Count the entries of a rising row that do not exceed each mark."""
    if not isinstance(table_RC, np.ndarray):
        return torch.searchsorted(table_RC, mark_RK, right=True)
    count_RK = np.empty(mark_RK.shape, dtype=np.int64)
    for row in range(len(table_RC)):
        count_RK[row] = table_RC[row].searchsorted(mark_RK[row], "right")
    return count_RK


def quotient(numerator: Array, denominator: Array) -> Array:
    """Divide where a numerator is 0 wherever its denominator is, or of no account there."""
    return numerator / at_least(denominator, _LEAST)


_LEAST = 1e-300
"""Stands for a denominator of zero; smaller than any sum of float32 numbers."""


_BLOCK = 256
_FEW = 64
"""Of the largest weights so many are found by compiled code, which keeps them in order one by one."""
_SHORT = 2**14
"""Tokens of a distribution up to which torch finds its largest weights on a CPU in a third of the time that blocks take."""


Ranked = tuple[Array, Array]
"""The largest weights of each row in order, and their tokens."""


def normalised(weights_RV: Tensor) -> Tensor:
    """Scale rows to sum one; rows without mass stay zero."""
    weights_RV = weights_RV.double()
    return ratio(weights_RV, weights_RV.sum(-1, keepdim=True))


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, giving 0 where the denominator is 0; no epsilon, which would make a distribution inexact."""
    positive = denominator > 0
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), 0.0)


def without(draft_RV: Tensor, tokens_RJ: Tensor) -> Tensor:
    """Remove tokens from a distribution and renormalise what is left."""
    if tokens_RJ.shape[1] == 0:
        return draft_RV
    present_RJ = (tokens_RJ != NO_TOKEN).to(draft_RV.dtype)
    removed_RV = torch.zeros_like(draft_RV).scatter_add_(1, tokens_RJ.clamp(min=0), present_RJ)
    return normalised(draft_RV.masked_fill(removed_RV > 0, 0.0))


def largest(weights_RV: Tensor, count: int) -> Ranked:
    """Return the largest weights of each row in order, and their tokens; all of them where there are fewer than `count`.

    The `count` largest of a long row lie in the blocks with the `count` largest maxima, which takes one cheap pass to find;
    `topk` over the row takes several dear ones.
    """
    weights_RV = weights_RV.to(torch.promote_types(weights_RV.dtype, torch.float32))  # numpy knows no bfloat16
    rows, vocabulary = weights_RV.shape
    count = min(count, vocabulary)
    plain = can_sync(weights_RV) and not torch.compiler.is_compiling()
    if plain and weights_RV.dtype == torch.float32 and weights_RV.stride(1) == 1 and count <= _FEW:
        library = loaded()
        ranked = None if library is None else largest_weights(library, weights_RV, count)
        if ranked is not None:
            return ranked
    if vocabulary <= _SHORT and plain:
        found = weights_RV.topk(count)
        return as_array(found.values), as_array(found.indices)
    blocks = vocabulary // _BLOCK
    if blocks * _BLOCK != vocabulary or blocks < 2 * count:
        return top(as_array(weights_RV), count)
    maxima_RM = as_array(weights_RV.reshape(rows, blocks, _BLOCK).amax(-1))
    block_RK = top(maxima_RM, count)[1]
    token_RX = (block_RK[:, :, None] * _BLOCK + arange(_BLOCK, block_RK)).reshape(rows, count * _BLOCK)
    value_RK, index_RK = top(take(as_array(weights_RV), token_RX), count)
    return value_RK, take(token_RX, index_RK)


def likeliest(weights_RV: Tensor) -> Tensor:
    """Return the token with the largest weight of each row, of equal ones that with the smallest id."""
    rows, vocabulary = weights_RV.shape
    if vocabulary % _BLOCK:
        return weights_RV.argmax(-1, keepdim=True)
    weights_RMC = weights_RV.reshape(rows, -1, _BLOCK)
    block_R1 = weights_RMC.amax(-1).argmax(-1, keepdim=True)
    inside_RC = weights_RMC.gather(1, block_R1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    return block_R1 * _BLOCK + inside_RC.argmax(-1, keepdim=True)
