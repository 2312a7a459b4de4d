"""Repeated products with the same weight."""

import torch
from torch import Tensor, nn

from polydraft.backends.native.arguments import FLOATS, Weight, multiply, quantised
from polydraft.backends.native.build import kernels, library
from polydraft.models.bodies import is_product
from polydraft.models.products import fast_product
from polydraft.models.quantised import Int8Linear, multiply_int8
from polydraft.operations import implements


class NativeProduct:
    """Multiply by one weight, like `torch.nn.functional.linear` but in float32.

    In-place changes of the weight take effect, and its data may move.
    """

    def __init__(self, weight: Weight) -> None:
        self._library, self._weight = library(), weight
        self._address, self._matrix = 0, weight.matrix()

    def __call__(self, input_XF: Tensor) -> Tensor:
        """Return the products of all rows of an input of any shape."""
        if self._weight.data_FX.data_ptr() != self._address:
            self._address, self._matrix = self._weight.data_FX.data_ptr(), self._weight.matrix()
        rows_RF = input_XF.reshape(-1, input_XF.shape[-1]).float()
        rows_RF = rows_RF if rows_RF.stride(1) == 1 else rows_RF.contiguous()
        output_RG = multiply(self._library, self._matrix, rows_RF, torch.get_num_threads())
        return output_RG.view(*input_XF.shape[:-1], self._matrix.rows)


Layer = nn.Module | tuple[Tensor, Tensor | None]
"""A linear layer, or a weight and its bias."""


def _supports(layer: Layer, int8: bool = False) -> bool:
    if isinstance(layer, Int8Linear):
        return is_product(layer, Int8Linear) and layer.held[0].is_cpu and kernels() is not None
    if isinstance(layer, nn.Module) and not is_product(layer):  # hooks, an adapter
        return False
    weight_FX = _parts(layer)[0]
    return weight_FX.is_cpu and weight_FX.dtype in FLOATS and weight_FX.stride(1) == 1 and kernels() is not None


@implements(fast_product, "native", supports=_supports)
def native_product(layer: Layer, int8: bool = False) -> NativeProduct:
    """Return products with a layer or a weight by compiled code."""
    return NativeProduct(weight_of(layer, int8))


def weight_of(layer: Layer, int8: bool = False) -> Weight:
    """Return the weight of a layer for compiled code, rounded to int8 if asked for."""
    if isinstance(layer, Int8Linear):
        return Weight(layer.held[0], layer.bias, layer.held[1], layer.in_features)
    weight_FX, bias_F = _parts(layer)
    return quantised(weight_FX.detach(), bias_F) if int8 else Weight(weight_FX, bias_F)


def _parts(layer: Layer) -> tuple[Tensor, Tensor | None]:
    if isinstance(layer, tuple):
        return layer
    assert isinstance(layer, nn.Linear)
    return layer.weight, layer.bias


@implements(multiply_int8, "native", supports=lambda input_RX, *_: input_RX.is_cpu and kernels() is not None)
def native_int8(input_RX: Tensor, data_FX: Tensor, scales_F: Tensor, bias_F: Tensor | None) -> Tensor:
    """Multiply by compiled code; inputs are rounded to 15 bits."""
    weight = Weight(data_FX, bias_F, scales_F, input_RX.shape[1])
    return multiply(library(), weight.matrix(), input_RX.float(), torch.get_num_threads())
