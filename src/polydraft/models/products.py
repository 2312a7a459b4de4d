"""Matrix products of a few tokens with large weights, which backends may compute faster than torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from polydraft.operations import operation

Product = Callable[[Tensor], Tensor]
"""Multiplies all rows of an input by one weight. Results may be in float32 whatever the input's dtype is."""


@operation
def fast_product(layer: nn.Module | tuple[Tensor, Tensor | None], int8: bool = False) -> Product | None:
    """Return a fast product with a linear layer, or with a weight and its bias; None means torch does it.

    Parameters
    ----------
    int8 : bool
        Multiply by a weight rounded to int8 (`polydraft.models.quantised`).
    """
    return None


@operation
def fast_linears(model: Any) -> AbstractContextManager[None] | None:
    """Return a context manager under which the linear layers of any model multiply faster; None means torch does it."""
    return None


def by_rows(product: Product, input_XF: Tensor) -> Tensor:
    """Apply a linear layer to all rows of an input of any shape as one matrix product.

    If the input is a view that cannot be flattened, such as a slice of a tree's nodes, torch would compute a batch of products.
    In bfloat16 on a CPU with matrix units, that took four times as long.
    """
    output_RG = product(input_XF.flatten(0, -2))
    return output_RG.view(*input_XF.shape[:-1], output_RG.shape[-1])
