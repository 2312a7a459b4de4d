"""Small arrays of either library, numpy's on a CPU and torch's elsewhere, for `polydraft.draft` until that is plain torch."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from polydraft.devices import can_sync as can_sync
from polydraft.verify import weights

Array = Any
"""A numpy array or a tensor."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


def quietly(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate functions in which rows of no account may divide 0 by 0, of which numpy would warn and torch does not."""

    @wraps(function)
    def quiet(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return quiet


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


Ranked = tuple[Array, Array]
"""The largest weights of each row in order, and their tokens."""


def largest(weights_RV: Tensor, count: int) -> Ranked:
    """Return `weights.largest` in the library that is quicker where it is."""
    value_RK, token_RK = weights.largest(weights_RV, count)
    return as_array(value_RK), as_array(token_RK)
