"""Arguments of compiled drawing and verification, as C structures: rows of weights, children of a level, ends of paths."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from polydraft.backends.native.arguments import working_memory

MOST_CHILDREN = 64


class Pick(ctypes.Structure):
    """Children of one node per row, the target's and the draft's distributions there, and the picked child."""

    _fields_ = (
        *((name, c_void_p) for name in ("target", "draft", "offsets", "known", "column_of", "others", "children", "nodes")),
        *(
            (name, c_void_p)
            for name in ("uniforms", "state", "lumped", "distribution", "ratio", "mass", "child", "fault", "memory")
        ),
        *((name, c_int64) for name in ("rows", "vocabulary", "draft_columns", "columns", "width", "uniform_stride", "buckets")),
        ("threshold", c_double),
    )


class End(ctypes.Structure):
    """Paths, what was computed along them, and where they stop."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("lumped", "distribution", "target", "weight", "mass", "going", "known", "uniforms", "memory")
        ),
        *((name, c_void_p) for name in ("accepted", "token")),
        *((name, c_int64) for name in ("rows", "levels", "vocabulary", "draft_columns", "columns", "uniform_stride")),
    )


def declare_verification(library: ctypes.CDLL) -> None:
    """Declare the arguments and results of these functions of a library."""
    library.polydraft_pick.argtypes, library.polydraft_pick.restype = (POINTER(Pick),), None
    library.polydraft_pick_memory.argtypes, library.polydraft_pick_memory.restype = (c_int64, c_int64), c_int64
    library.polydraft_end.argtypes, library.polydraft_end.restype = (POINTER(End),), None
    library.polydraft_draw.argtypes = (c_void_p, *(c_int64,) * 3, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    library.polydraft_draw.restype = None
    library.polydraft_draw_memory.argtypes, library.polydraft_draw_memory.restype = (c_int64,), c_int64
    library.polydraft_largest.argtypes = (c_void_p, *(c_int64,) * 4, c_void_p, c_void_p)
    library.polydraft_largest.restype = c_int32


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    """Return the addresses of some tensors as a C array."""
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def draw(library: ctypes.CDLL, weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """Draw K tokens per row, with replacement, from float32 weights; -1 where all are zero."""
    (rows, count), width = weights_RV.shape, uniforms_RK.shape[1]
    assert weights_RV.dtype == torch.float32 and weights_RV.stride(1) == 1
    assert uniforms_RK.dtype == torch.float64 and (width == 1 or uniforms_RK.stride(1) == 1)
    tokens_RK = torch.empty(rows, width, dtype=torch.long)
    library.polydraft_draw(
        weights_RV.data_ptr(), weights_RV.stride(0), rows, count, uniforms_RK.data_ptr(), uniforms_RK.stride(0), width,
        working_memory(library.polydraft_draw_memory(count)), tokens_RK.data_ptr(),
    )  # fmt: skip
    return tokens_RK


def largest_weights(library: ctypes.CDLL, weights_RV: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the largest of each row's float32 weights in order, and their columns; None if there are NaNs."""
    assert weights_RV.dtype == torch.float32 and weights_RV.stride(1) == 1 and 0 < count <= weights_RV.shape[1]
    rows, size = weights_RV.shape
    value_RK, token_RK = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
    sizes = (weights_RV.stride(0), rows, size, count)
    comparable = library.polydraft_largest(weights_RV.data_ptr(), *sizes, value_RK.data_ptr(), token_RK.data_ptr())
    return (value_RK, token_RK) if comparable else None
