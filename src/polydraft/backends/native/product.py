"""Products with one weight, again and again: what can be kept between two of them is kept."""

import ctypes

import torch
from torch import Tensor

from polydraft.backends.native.arguments import Weight, multiply


class NativeProduct:
    """Multiply by one weight, in float32; as `torch.nn.functional.linear` otherwise.

    What its owner changes in place is followed, and so is a weight whose data has moved.
    """

    def __init__(self, library: ctypes.CDLL, weight: Weight) -> None:
        self._library, self._weight = library, weight
        self._address, self._matrix = 0, weight.matrix()

    def __call__(self, input_XF: Tensor) -> Tensor:
        """Return the products of all rows of an input of any shape."""
        if self._weight.data_FX.data_ptr() != self._address:
            self._address, self._matrix = self._weight.data_FX.data_ptr(), self._weight.matrix()
        rows_RF = input_XF.reshape(-1, input_XF.shape[-1]).float()
        rows_RF = rows_RF if rows_RF.stride(1) == 1 else rows_RF.contiguous()
        output_RG = multiply(self._library, self._matrix, rows_RF, torch.get_num_threads())
        return output_RG.view(*input_XF.shape[:-1], self._matrix.rows)
