"""Products of a few tokens with large weights, and backends that compute them faster than torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from polydraft.operations import operation

Product = Callable[[Tensor], Tensor]
"""Multiplies all rows of an input by one weight; logits and features may come in float32 whatever the input is."""


@operation
def fast_product(layer: nn.Module | tuple[Tensor, Tensor | None], int8: bool = False) -> Product | None:
    """Return a fast product with a linear layer, or with a weight and its bias; None to use torch.

    Parameters
    ----------
    int8 : bool
        Multiply by a weight rounded to int8 (`polydraft.models.quantised`).
    """
    return None


@operation
def fast_linears(model: Any) -> AbstractContextManager[None] | None:
    """Return a context in which the linear layers of a model of any shape multiply faster; None to use torch."""
    return None


def by_rows(product: Product, input_XF: Tensor) -> Tensor:
    """Apply a linear layer to all rows of an input of any shape as one matrix product.

    Of a view whose leading strides do not fit together, such as a slice of a tree's nodes, torch makes a batch of products:
    on a CPU with matrix units, in bfloat16, that took four times as long.
    """
    output_RG = product(input_XF.flatten(0, -2))
    return output_RG.view(*input_XF.shape[:-1], output_RG.shape[-1])
