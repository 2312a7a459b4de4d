"""Models with weights in int8, on a CPU: a quarter of float32's reading, products by compiled code.

Each row of a weight is scaled by its largest number, each token's input, in 15 bits, by its own. Embeddings and norms stay as
they are. The target is then this model: generation is exact with respect to it, as for every other dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn

from polydraft.backends.native import Weight, kernels, multiply, quantised
from polydraft.errors import UsageError
from polydraft.models._bodies import _MODEL_TYPES, _adjacent
from polydraft.models.families import quantised_by


class Int8Linear(nn.Module):
    """A linear layer with its weight in int8; takes the place of `torch.nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        held = quantised(linear.weight.detach())
        self.bias = linear.bias
        # Plain attributes, so that model.to(dtype) leaves them alone.
        assert held.scales_F is not None
        self.held: tuple[Tensor, Tensor] = (held.data_FX, held.scales_F)

    @property
    def weight(self) -> Tensor:
        """What the steps are worth, in float32; made anew at every call."""
        data_FX, scales_F = self.held
        return data_FX[:, : self.in_features] * scales_F[:, None]

    def int8(self) -> Weight:
        """Return what compiled code multiplies by."""
        return Weight(self.held[0], self.bias, self.held[1], self.in_features)

    def forward(self, input_XF: Tensor) -> Tensor:
        """Return the products, in the input's dtype."""
        library = kernels()
        assert library is not None, "quantise() has seen to it"
        rows_RF = input_XF.reshape(-1, self.in_features).float().contiguous()
        output_RG = multiply(library, self.int8().matrix(), rows_RF, torch.get_num_threads())
        return output_RG.view(*input_XF.shape[:-1], -1).to(input_XF.dtype)


def quantise(model: Any) -> Any:
    """Put every linear layer of a model, its output head included, into int8, one by one, so that memory falls as it goes.

    Returns
    -------
    transformers.PreTrainedModel
        The same object.
    """
    if kernels() is None:
        raise UsageError(
            "dtype int8 needs native kernels, which are off or cannot be built here; install a C compiler, or use float32"
        )
    if (scheme := quantised_by(model)) is not None:
        raise UsageError(
            f"dtype int8 does not work with weights that are quantised by {scheme} already; use float32 or bfloat16"
        )
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
                if child is not head:  # its weight may be the embeddings too
                    child.weight.data = torch.empty(0)
    return model.requires_grad_(False)


def is_quantised(model: Any) -> bool:
    """Whether a model's output head is in int8."""
    return type(model.get_output_embeddings()) is Int8Linear


class Int8Body:
    """The parts of a Llama-shaped model in int8, named as in a `LeanBody`; build one with `int8_body`."""

    def __init__(self, body: Any) -> None:
        self.embedding, self.rotary, self.norm = body.embed_tokens, body.rotary_emb, body.norm
        self.layers = [Int8Layer(layer) for layer in body.layers]


class Int8Layer:
    """Weights of one layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = _side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = _side_by_side([mlp.gate_proj, mlp.up_proj])
        self.output, self.down = attention.o_proj.int8(), mlp.down_proj.int8()
        self.channels, self.scale = attention.head_dim, attention.scaling
        self.queries = attention.q_proj.out_features // self.channels
        self.keys = attention.k_proj.out_features // self.channels


def int8_body(model: Any) -> Int8Body | None:
    """Return the parts of a quantised model's body, or None where its shape is not the one understood here."""
    body = model.base_model
    fits = is_quantised(model) and model.config.model_type in _MODEL_TYPES and model.config.hidden_act == "silu"
    # Hooks and adapters work on the modules that are passed by here.
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in body.modules())
    return Int8Body(body) if fits and not hooked else None


def _side_by_side(linears: list[Int8Linear]) -> Weight:
    """Return several weights as one; the layers go on as views of it."""
    parts = [_joined([linear.held[place] for linear in linears]) for place in range(2)]
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.held = (parts[0][start:end], parts[1][start:end])
        start = end
    bias_F = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    return Weight(parts[0], bias_F, parts[1], linears[0].in_features)


def _joined(tensors: list[Tensor]) -> Tensor:
    found = _adjacent(tensors)
    return torch.cat(tensors) if found is None else found
