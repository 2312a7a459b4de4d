"""Arguments of the compiled functions as C structures: matrices, bodies, passes and rounds; and a check of the results."""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The kernels' numbers for the dtypes of weights."""
FLOATS = (torch.float32, torch.bfloat16)
"""Dtypes of models; their weights may also be in int8."""


class Matrix(ctypes.Structure):
    """A weight as the kernels see it."""

    owner: "Weight"
    sizes: dict[int, int]
    """Bytes of working memory by number of tokens, cached because asking takes as long as a small product."""
    _fields_ = (
        ("data", c_void_p), ("scales", c_void_p), ("bias", c_void_p),
        ("rows", c_int64), ("columns", c_int64), ("stride", c_int64), ("format", c_int32), ("small", c_int32),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """Weights of one layer."""

    _fields_ = (
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p),
        ("qkv", Matrix), ("output", Matrix), ("gate_up", Matrix), ("down", Matrix),
    )  # fmt: skip


class Body(ctypes.Structure):
    """Weights and sizes of a model."""

    _fields_ = (
        ("layers", POINTER(Layer)), ("final_norm", c_void_p), ("embedding", c_void_p),
        ("feature_norm", c_void_p), ("token_norm", c_void_p), ("join", Matrix),
        ("num_layers", c_int64), ("hidden", c_int64), ("queries", c_int64), ("keys", c_int64), ("channels", c_int64),
        ("mlp", c_int64), ("vocabulary", c_int64), ("epsilon", c_float), ("scale", c_float), ("format", c_int32),
        ("reserved", c_int32),
    )  # fmt: skip


class Pass(ctypes.Structure):
    """Inputs and outputs of one pass."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "depths", "chosen", "lengths", "slot_positions", "visible")),
        *((name, c_void_p) for name in ("cosines", "sines", "features", "keys", "values", "output", "taps", "memory")),
        *((name, c_int64) for name in ("batch", "size", "start", "places", "capacity", "most_position")),
        *((name, c_int64) for name in ("depth_batch", "depth_token", "visible_batch", "visible_token", "visible_place")),
        *((name, c_int64) for name in ("slot_stride", "output_stride", "num_taps", "window", "threads", "stored")),
    )


MOST_CHILDREN = 64
"""Most children of a node that verification can pick from."""


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


def declare(library: ctypes.CDLL) -> None:
    """Declare the arguments and results of a library's functions."""
    library.polydraft_pass.argtypes, library.polydraft_pass.restype = (POINTER(Body), POINTER(Pass)), c_int32
    library.polydraft_memory.argtypes, library.polydraft_memory.restype = (POINTER(Body), POINTER(Pass)), c_int64
    library.polydraft_product.argtypes = (POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)
    library.polydraft_product.restype = None
    library.polydraft_product_memory.argtypes = (POINTER(Matrix), c_int64)
    library.polydraft_product_memory.restype = c_int64
    library.polydraft_instructions.argtypes, library.polydraft_instructions.restype = (), c_char_p
    library.polydraft_pick.argtypes, library.polydraft_pick.restype = (POINTER(Pick),), None
    library.polydraft_pick_memory.argtypes, library.polydraft_pick_memory.restype = (c_int64, c_int64), c_int64
    library.polydraft_end.argtypes, library.polydraft_end.restype = (POINTER(End),), None
    library.polydraft_draw.argtypes = (c_void_p, *(c_int64,) * 3, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    library.polydraft_draw.restype = None
    library.polydraft_draw_memory.argtypes, library.polydraft_draw_memory.restype = (c_int64,), c_int64
    library.polydraft_largest.argtypes = (c_void_p, *(c_int64,) * 4, c_void_p, c_void_p)
    library.polydraft_largest.restype = c_int32
    noise = c_void_p, *(c_int64,) * 4, *(c_void_p,) * 4
    library.polydraft_perturb.argtypes, library.polydraft_perturb.restype = (*noise, c_void_p), None
    library.polydraft_largest_perturbed.argtypes = (*noise, c_int64, c_void_p)
    library.polydraft_largest_perturbed.restype = None


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight matrix in torch's own memory: nothing is copied, and in-place changes take effect."""

    data_FX: Tensor
    """One row per output, in float32, bfloat16, or int8 (padded with zeros, see `rounded`)."""
    bias_F: Tensor | None = None
    scales_F: Tensor | None = None
    """Scale of each int8 row."""
    columns: int = 0
    """Number of inputs; the width of `data_FX` if not given."""

    @property
    def num_inputs(self) -> int:
        """Number of inputs per token."""
        return self.columns or self.data_FX.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose addresses `matrix` holds."""
        return [part for part in (self.data_FX, self.bias_F, self.scales_F) if part is not None]

    def matrix(self) -> Matrix:
        """Return the structure for the kernels; valid as long as the tensors do not move."""
        data = self.data_FX
        assert data.stride(1) == 1 and data.dtype in FORMATS, (data.dtype, data.stride())
        assert all(part.is_contiguous() for part in self.tensors()[1:])
        bias, scales = (None if part is None else part.data_ptr() for part in (self.bias_F, self.scales_F))
        small = 0 if self.bias_F is None else FORMATS[self.bias_F.dtype]
        rows, stride = data.shape[0], data.stride(0)
        matrix = Matrix(data.data_ptr(), scales, bias, rows, self.num_inputs, stride, FORMATS[data.dtype], small)
        matrix.owner = self  # keeps the tensors alive
        matrix.sizes = {}
        return matrix


def quantised(weight_FX: Tensor, bias_F: Tensor | None = None) -> Weight:
    """Return a weight in int8."""
    from polydraft.models.quantised import rounded  # late, against a cycle: models import sampling, which loads these kernels

    data_FX, scales_F = rounded(weight_FX)
    return Weight(data_FX, bias_F, scales_F, weight_FX.shape[1])


class _WorkingMemory(threading.local):
    """A buffer per thread that grows as needed."""

    buffer = torch.empty(0, dtype=torch.uint8)
    size, address = -1, 0


_MEMORY = _WorkingMemory()


def working_memory(size: int) -> int:
    """Return the address of this many bytes, aligned to a cache line, for a compiled function until this thread asks again."""
    if _MEMORY.size < size:
        _MEMORY.size = size + size // 4
        _MEMORY.buffer = torch.empty(_MEMORY.size + 64, dtype=torch.uint8)
        start = _MEMORY.buffer.data_ptr()
        _MEMORY.address = start + -start % 64
    return _MEMORY.address


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    """Return the addresses of some tensors as a C array."""
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def multiply(library: ctypes.CDLL, matrix: Matrix, input_RX: Tensor, threads: int) -> Tensor:
    """Return the products, in float32, of float32 inputs; a token's numbers must be adjacent."""
    assert input_RX.dtype == torch.float32 and input_RX.stride(1) == 1 and input_RX.shape[1] == matrix.columns
    count = input_RX.shape[0]
    output_RF = torch.empty(count, matrix.rows)
    size = matrix.sizes.get(count)
    if size is None:
        size = matrix.sizes[count] = library.polydraft_product_memory(matrix, count)
    source, stride = input_RX.data_ptr(), input_RX.stride(0)
    library.polydraft_product(matrix, source, stride, output_RF.data_ptr(), count, threads, working_memory(size))
    return output_RF


def self_check(library: ctypes.CDLL, threads: int) -> str | None:
    """Return which dtype a library multiplies wrongly, or None. Takes a millisecond, once per process."""
    with torch.no_grad():
        weight_FX = torch.linspace(-1, 1, 37 * 83).sin().view(37, 83)
        input_RX = torch.linspace(-2, 2, 9 * 83).cos().view(9, 83)
        expected_RF = input_RX @ weight_FX.T
        weights = {"float32": (Weight(weight_FX), 1e-4), "bfloat16": (Weight(weight_FX.bfloat16()), 0.2)}
        weights["int8"] = (quantised(weight_FX), 0.5)
        for name, (weight, tolerance) in weights.items():
            error_RF = multiply(library, weight.matrix(), input_RX, threads) - expected_RF
            if not bool(error_RF.abs().max() < tolerance):
                return f"{name}, off by {error_RF.abs().max():.2g}"
    return None
