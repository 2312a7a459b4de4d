"""Models with weights in int8, which compiled code multiplies by: they read a quarter of float32's bytes, half of bfloat16's.

Each row of a weight is scaled by its largest number, and each token's input, rounded to 15 bits, by its own. Embeddings and
norms stay as they are. Generation is exact with respect to this quantised model, as it is for every dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.errors import UsageError
from polydraft.models.bodies import FusedLayer, adjacent, is_altered, is_llama_shaped, linears
from polydraft.models.families import quantised_by
from polydraft.operations import operation

PADDING = 64
"""On a CPU, rows of int8 weights are padded with zeros to a multiple of this."""


def rounded(weight_FX: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in int8, its rows padded with zeros, and the scale of each row.

    The largest number of each row becomes 127; the others are rounded to whole steps.
    """
    rows, columns = weight_FX.shape
    least_F, most_F = weight_FX.aminmax(dim=1)
    scales_F = torch.maximum(-least_F, most_F).float() / 127
    steps_FX = (weight_FX.float() / scales_F.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    if not bool(scales_F.isfinite().all()):  # int8 has no NaN; the scale carries it on
        steps_FX.nan_to_num_(0, 0, 0)
    padding = -columns % PADDING if weight_FX.is_cpu else 0
    data_FX = torch.zeros(rows, columns + padding, dtype=torch.int8, device=weight_FX.device)
    data_FX[:, :columns] = steps_FX
    return data_FX, scales_F.contiguous()


@operation
def multiply_int8(input_RX: Tensor, data_FX: Tensor, scales_F: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return the products of inputs with a `rounded` weight, in float32."""
    weight_FX = data_FX[:, : input_RX.shape[1]] * scales_F[:, None]
    return functional.linear(input_RX.float(), weight_FX, None if bias_F is None else bias_F.float())


class Int8Linear(nn.Module):
    """A linear layer with its weight in int8, which replaces a `torch.nn.Linear`.

    Parameters
    ----------
    held : tuple of Tensor, optional
        The weight if it is `rounded` already; by default the layer's weight is rounded.
    """

    def __init__(self, linear: nn.Linear, held: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Plain attributes, so that model.to(dtype) leaves them alone.
        self.held: tuple[Tensor, Tensor] = rounded(linear.weight.detach()) if held is None else held

    @property
    def weight(self) -> Tensor:
        """The weight in float32, dequantised at every call."""
        data_FX, scales_F = self.held
        return data_FX[:, : self.in_features] * scales_F[:, None]

    def forward(self, input_XF: Tensor) -> Tensor:
        """Return the products, in the input's dtype."""
        rows_RF = input_XF.reshape(-1, self.in_features).contiguous()
        output_RG = multiply_int8(rows_RF, *self.held, self.bias)
        return output_RG.view(*input_XF.shape[:-1], -1).to(input_XF.dtype)


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """The weights of some layers side by side."""

    data_FX: Tensor
    scales_F: Tensor
    num_inputs: int
    """Columns without the padding."""


class Int8Body:
    """The parts of a Llama-shaped model in int8, named as in a `LeanBody`."""

    def __init__(self, body: Any) -> None:
        self.embedding, self.rotary, self.norm = body.embed_tokens, body.rotary_emb, body.norm
        self.layers = [Int8Layer(layer, index) for index, layer in enumerate(body.layers)]


class Int8Layer(FusedLayer[Int8Weight]):
    """One layer in int8."""

    def __init__(self, layer: Any, index: int) -> None:
        super().__init__(layer, index, _side_by_side)


def _side_by_side(linears: list[Int8Linear]) -> tuple[Int8Weight, Tensor | None]:
    """Join several weights and biases into one of each; the layers become views of them."""
    data_FX, scales_F = (_joined([linear.held[place] for linear in linears]) for place in range(2))
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.held = data_FX[start:end], scales_F[start:end]
        start = end
    bias_F = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    return Int8Weight(data_FX, scales_F, linears[0].in_features), bias_F


def _joined(tensors: list[Tensor]) -> Tensor:
    found = adjacent(tensors)
    return torch.cat(tensors) if found is None else found


def is_int8_llama(model: Any) -> bool:
    """Whether a model is in int8 and `Int8Body` can run it: Llama-shaped, without hooks or adapters."""
    if not (is_quantised(model) and is_llama_shaped(model)):
        return False
    body = model.base_model
    return all(type(part) is Int8Linear for part in linears(body)) and not is_altered(body.modules())


def kernels_missing(device: torch.device | None = None) -> str | None:
    """Return why int8 products would not be faster than float32 ones; None if they are."""
    one_11 = torch.ones(1, 1, device=device)
    if multiply_int8.chosen(one_11, *rounded(one_11), None) is None:
        return "int8 needs native kernels, which are off or cannot be built here"
    return None


def refuse_without_kernels(device: torch.device | None = None) -> None:
    """Refuse int8 where its products would not be faster than float32 ones."""
    if (reason := kernels_missing(device)) is not None:
        raise UsageError(f"dtype {reason}; install a C compiler, or use float32")


def refuse_twice(scheme: str | None) -> None:
    """Refuse int8 for weights that are quantised already."""
    if scheme is not None:
        raise UsageError(
            f"dtype int8 does not work with weights that are quantised by {scheme} already; use float32 or bfloat16"
        )


def quantise(model: Any, keep: bool = False) -> Any:
    """Convert all linear layers of a model to int8, the output head included, freeing each weight once it is converted.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    keep : bool
        Do not free the original weights, because another model uses them too.

    Returns
    -------
    transformers.PreTrainedModel
        The same object.
    """
    refuse_without_kernels(model.device)
    refuse_twice(quantised_by(model))
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
