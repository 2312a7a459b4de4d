"""Compiled products for the linear layers of any model, on a CPU, while one of our passes runs.

Models without a compiled body (`polydraft.backends.native.models`) run the code of `transformers`. Most of such a pass is
products of a few tokens, which torch computes far more slowly than it could read the weights. Inside a `with` statement linear
layers use compiled products; outside it, and in other threads, the model is unchanged. Weights are read in place; hooks and
adapters still work, because only a layer's own product is replaced.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.backends.native.arguments import FLOATS, Weight
from polydraft.backends.native.build import kernels
from polydraft.backends.native.product import NativeProduct
from polydraft.models.forwards import ReplacedForwards
from polydraft.models.placement import cpu_computes_bfloat16
from polydraft.models.products import fast_linears
from polydraft.operations import implements

MOST_ROWS = 64
"""Most tokens of a product. With more, torch is as fast, unless it has no instructions for the dtype."""
LEAST_WEIGHTS = 1 << 17
"""Fewest numbers of a weight. With fewer, the call takes longer than the product."""


class _Here(threading.local):
    """Whether this thread is inside one of our passes."""

    depth = 0


_HERE = _Here()


class _Forward:
    """Replaces one layer's `forward`."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._addresses = (0, 0)
        self._product: NativeProduct | None = None

    def __call__(self, input: Tensor) -> Tensor:
        weight_FX, bias_F = self._layer.weight, self._layer.bias
        few = 0 < input.numel() <= MOST_ROWS * weight_FX.shape[1] or (_slow(input.dtype) and input.numel() > 0)
        here = _HERE.depth and few and input.is_cpu
        if here and input.dtype == weight_FX.dtype and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            addresses = weight_FX.data_ptr(), 0 if bias_F is None else bias_F.data_ptr()
            if addresses != self._addresses:  # a weight that has moved may have another dtype as well
                self._addresses = addresses
                self._product = NativeProduct(Weight(weight_FX, bias_F)) if _fits(self._layer) else None
            if self._product is not None:
                rows_RX = input.reshape(-1, input.shape[-1])
                parts = [self._product(rows_RX[first : first + MOST_ROWS]) for first in range(0, len(rows_RX), MOST_ROWS)]
                return torch.cat(parts).view(*input.shape[:-1], -1).to(input.dtype)
        return functional.linear(input, weight_FX, bias_F)


def _slow(dtype: torch.dtype) -> bool:
    """Whether torch has no instructions for a dtype on this CPU, and multiplies hundreds of times more slowly."""
    return dtype == torch.bfloat16 and not cpu_computes_bfloat16()


def _fits(layer: nn.Linear) -> bool:
    """Whether compiled code can read a layer's current weight."""
    weight_FX, bias_F = layer.weight, layer.bias
    return (
        type(weight_FX) is nn.Parameter
        and weight_FX.is_cpu
        and weight_FX.dtype in FLOATS
        and weight_FX.stride(1) == 1
        and (bias_F is None or (bias_F.dtype == weight_FX.dtype and bias_F.is_cpu and bias_F.is_contiguous()))
    )


_PLACES = ReplacedForwards()


class NativeLinears(AbstractContextManager[None]):
    """A context in which some layers multiply by compiled code in this thread; made by `native_linears`."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._forwards = [(layer, _Forward(layer)) for layer in layers]

    def __enter__(self) -> None:
        _PLACES.enter(self._forwards)
        _HERE.depth += 1

    def __exit__(self, *error: object) -> None:
        _HERE.depth -= 1
        _PLACES.leave()


def _layers(model: Any) -> list[nn.Linear]:
    modules = list(model.modules())
    # torch.compile would notice the changed layer and compile again at every pass.
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        return []
    return [part for part in modules if type(part) is nn.Linear and part.weight.numel() >= LEAST_WEIGHTS and _fits(part)]


@implements(fast_linears, "native", supports=lambda model: bool(_layers(model)) and kernels() is not None)
def native_linears(model: Any) -> NativeLinears:
    """Return a context that runs a model's large linear layers by compiled code."""
    return NativeLinears(_layers(model))
