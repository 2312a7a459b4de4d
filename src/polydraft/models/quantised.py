"""Models with weights in int8, on a CPU: a quarter of float32's reading, products by compiled code.

Each row of a weight is scaled by its largest number, each token's input, in 15 bits, by its own. Embeddings and norms stay as
they are. The target is then this model: generation is exact with respect to it, as for every other dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.errors import UsageError
from polydraft.models.families import quantised_by
from polydraft.operations import operation

PADDING = 64
"""Rows of int8 weights are filled up with zeros to a multiple of this."""


def rounded(weight_FX: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in int8, its rows filled up with zeros, and what one step of each row is worth.

    Each row is scaled by its largest number; the rest of the row is rounded to 127 steps.
    """
    rows, columns = weight_FX.shape
    least_F, most_F = weight_FX.aminmax(dim=1)
    scales_F = torch.maximum(-least_F, most_F).float() / 127
    steps_FX = (weight_FX.float() / scales_F.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    if not bool(scales_F.isfinite().all()):  # NaN has no step; the scale carries it on
        steps_FX.nan_to_num_(0, 0, 0)
    data_FX = torch.zeros(rows, columns + -columns % PADDING, dtype=torch.int8)
    data_FX[:, :columns] = steps_FX
    return data_FX, scales_F.contiguous()


@operation
def multiply_int8(input_RX: Tensor, data_FX: Tensor, scales_F: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return the products, in float32, of float32 inputs with a `rounded` weight."""
    weight_FX = data_FX[:, : input_RX.shape[1]] * scales_F[:, None]
    return functional.linear(input_RX, weight_FX, None if bias_F is None else bias_F.float())


class Int8Linear(nn.Module):
    """A linear layer with its weight in int8; takes the place of `torch.nn.Linear`.

    Parameters
    ----------
    held : tuple of Tensor, optional
        The weight, `rounded` already; otherwise that of the layer is.
    """

    def __init__(self, linear: nn.Linear, held: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Plain attributes, so that model.to(dtype) leaves them alone.
        self.held: tuple[Tensor, Tensor] = rounded(linear.weight.detach()) if held is None else held

    @property
    def weight(self) -> Tensor:
        """What the steps are worth, in float32; made anew at every call."""
        data_FX, scales_F = self.held
        return data_FX[:, : self.in_features] * scales_F[:, None]

    def forward(self, input_XF: Tensor) -> Tensor:
        """Return the products, in the input's dtype."""
        rows_RF = input_XF.reshape(-1, self.in_features).float().contiguous()
        output_RG = multiply_int8(rows_RF, *self.held, self.bias)
        return output_RG.view(*input_XF.shape[:-1], -1).to(input_XF.dtype)


def refuse_without_kernels() -> None:
    """Refuse int8 where nothing multiplies by it faster than by float32."""
    if multiply_int8.chosen(torch.ones(1, 1), *rounded(torch.ones(1, 1)), None) is None:
        raise UsageError(
            "dtype int8 needs native kernels, which are off or cannot be built here; install a C compiler, or use float32"
        )


def quantise(model: Any, keep: bool = False) -> Any:
    """Put every linear layer of a model, its output head included, into int8, one by one, so that memory falls as it goes.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    keep : bool
        Leave the weights alone: they are somebody else's too.

    Returns
    -------
    transformers.PreTrainedModel
        The same object.
    """
    refuse_without_kernels()
    if (scheme := quantised_by(model)) is not None:
        raise UsageError(
            f"dtype int8 does not work with weights that are quantised by {scheme} already; use float32 or bfloat16"
        )
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
                if child is not head and not keep:  # the head's weight may be the embeddings too
                    child.weight.data = torch.empty(0)
    return model.requires_grad_(False)


def is_quantised(model: Any) -> bool:
    """Whether a model's output head is in int8."""
    return type(model.get_output_embeddings()) is Int8Linear
