"""Llama-shaped models in fewer operations, with the same weights and arithmetic.

Half of a small model's time on a CPU, and most of it on a GPU, goes into launching some forty operations per layer. Here they
are sixteen: one product for queries, keys and values, one for both halves of the MLP, fused norms. The weights are the model's
own, laid out side by side in memory; nothing is copied for keeps.

Backends run whole passes of such a body in one go (`fast_body`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.cache import SlotCache
from polydraft.operations import operation
from polydraft.trees import Block

if TYPE_CHECKING:
    from polydraft.models.hf import HFModel
    from polydraft.models.hf_context import HFContext

_MODEL_TYPES = {"llama", "mistral", "qwen2"}


class FastBody(ABC):
    """The body of a model as a backend runs it: whole passes at once."""

    invariant: bool = False
    """Whether each token gets the bits that it has alone."""
    variance: str | None = "the kernels for that run on GPUs"
    """Why it does not get them, where it could not."""
    leaves_out: bool = False
    """Whether a pass takes no time for tokens that its block does not keep; their features are 0."""
    key_shape: tuple[int, int]
    """Heads and channels of keys, and of values."""

    @abstractmethod
    def extend(self, context: "HFContext", tokens_BT: Tensor, block: Block) -> Tensor | None:
        """Do what `Context.extend` does; None where torch has to run this pass."""

    def reading(self, context: "HFContext", count: int, size: int, most: int) -> Callable[[Tensor], Tensor] | None:
        """Return a pass that reads prompts and can be captured; None where there is none.

        It takes `[count, 1 + size]` numbers: for each prompt the row that it belongs to and its next tokens. Rows have at most
        `most` committed tokens.
        """
        return None

    def product(self, input_BTX: Tensor, weight_FX: Tensor, bias_F: Tensor | None) -> Tensor:
        """Multiply inputs by weights as the body does."""
        return functional.linear(input_BTX, weight_FX, bias_F)


@operation
def fast_body(model: "HFModel", invariant: bool) -> FastBody | None:
    """Return what runs whole passes of a model, invariant if that is asked for and can be; None: torch runs its layers."""
    return None


@operation
def kernel_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why there are no GPU kernels for models in this number format on this device; None if there are."""
    return f"the kernels for that run on GPUs, not on {device}"


class LeanBody:
    """Compute the last hidden states of a Llama-shaped `transformers` model; build one with `lean_body`."""

    def __init__(self, body: Any) -> None:
        self.embedding = body.embed_tokens
        self.rotary = body.rotary_emb
        self.norm = body.norm
        self.layers = [LeanLayer(layer, index) for index, layer in enumerate(body.layers)]

    def __call__(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask_B1TS: Tensor | None,
        cache: SlotCache | None,
        taps: Sequence[int] = (),
    ) -> Tensor:
        """Return the last hidden states, after the final norm, and beside them the outputs of the layers `taps`.

        Without a cache the tokens are whole texts, of which nothing is kept: each sees all before it.
        """
        hidden_BTF: Tensor = self.embedding(tokens_BT)
        cos_BTC, sin_BTC = self.rotary(hidden_BTF, position_ids=positions_BT)
        half = sin_BTC.shape[-1] // 2
        # Rotating halves as (x1, x2) -> (-x2, x1) is a swap if the sign sits in the sine.
        signed_BTC = torch.cat([-sin_BTC[..., :half], sin_BTC[..., half:]], dim=-1)
        tapped = []
        for number, layer in enumerate(self.layers, start=1):
            hidden_BTF = layer(hidden_BTF, cos_BTC[:, :, None], signed_BTC[:, :, None], mask_B1TS, cache)
            if number in taps:
                tapped.append(hidden_BTF)
        normed_BTF = _rms_norm(hidden_BTF, self.norm)
        return torch.cat([normed_BTF, *tapped], dim=-1) if tapped else normed_BTF


W = TypeVar("W")


class FusedLayer(Generic[W]):
    """Weights of one layer, those of several products as one, which `join` makes of their layers, with the biases."""

    def __init__(self, layer: Any, index: int, join: Callable[[list[Any]], tuple[W, Tensor | None]]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.qkv_bias = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self.gate_up_bias = join([mlp.gate_proj, mlp.up_proj])
        self.output, self.down = attention.o_proj, mlp.down_proj
        self.channels, self.scale = attention.head_dim, attention.scaling
        self.queries = attention.q_proj.out_features // self.channels
        self.keys = attention.k_proj.out_features // self.channels


class LeanLayer(FusedLayer[Tensor]):
    """One layer in the model's own number format, and what it computes."""

    def __init__(self, layer: Any, index: int) -> None:
        super().__init__(layer, index, _side_by_side)

    def __call__(
        self, hidden_BTF: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor, mask_B1TS: Tensor | None, cache: SlotCache | None
    ) -> Tensor:
        """Return the layer's output."""
        batch_size, size, _ = hidden_BTF.shape
        normed_BTF = _rms_norm(hidden_BTF, self.input_norm)
        projected = functional.linear(normed_BTF, self.qkv, self.qkv_bias)
        heads_BTHC = projected.view(batch_size, size, -1, self.channels)
        plain_BTHC = heads_BTHC[:, :, : self.queries + self.keys]
        first, second = plain_BTHC.chunk(2, dim=-1)
        turned_BTHC = plain_BTHC * cos_BT1C + torch.cat([second, first], dim=-1) * sin_BT1C
        query_BHTC = turned_BTHC[:, :, : self.queries].transpose(1, 2)
        key_BHSC = turned_BTHC[:, :, self.queries :].transpose(1, 2)
        value_BHSC = heads_BTHC[:, :, self.queries + self.keys :].transpose(1, 2)
        if cache is not None:
            key_BHSC, value_BHSC = cache.update(key_BHSC, value_BHSC, self.index)
        if mask_B1TS is not None and hidden_BTF.is_cuda and self.queries != self.keys:
            # No fused CUDA kernel takes grouped heads together with a mask.
            key_BHSC = key_BHSC.repeat_interleave(self.queries // self.keys, dim=1)
            value_BHSC = value_BHSC.repeat_interleave(self.queries // self.keys, dim=1)
        attended_BHTC = functional.scaled_dot_product_attention(
            query_BHTC, key_BHSC, value_BHSC, mask_B1TS, is_causal=cache is None, scale=self.scale, enable_gqa=True
        )
        hidden_BTF = hidden_BTF + self.output(attended_BHTC.transpose(1, 2).reshape(batch_size, size, -1))
        normed_BTF = _rms_norm(hidden_BTF, self.mlp_norm)
        gate, up = functional.linear(normed_BTF, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        down_BTF: Tensor = self.down(functional.silu(gate) * up)
        return hidden_BTF + down_BTF


def is_llama_shaped(model: Any) -> bool:
    """Whether a model has the layers that are understood here."""
    return model.config.model_type in _MODEL_TYPES and model.config.hidden_act == "silu"


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether hooks, of adapters say, work on some modules: code that passes these by would leave the hooks out."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def is_product(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a layer is a product of this kind and nothing more: no hooks, no adapter, no weights of a special type."""
    unchanged = type(layer) is kind and "forward" not in vars(layer) and not has_hooks([layer])
    return unchanged and (kind is not nn.Linear or type(layer.weight) is nn.Parameter)


def lean_body(model: Any) -> LeanBody | None:
    """Return the lean form of a model's body, or None where its shape is not the one understood here."""
    body = model.base_model
    plain = (
        is_llama_shaped(model)
        and model.config._attn_implementation == "sdpa"
        # Of other types are quantised weights, torchao's say, which cannot be put side by side.
        and all(type(part) is nn.Linear and type(part.weight) is nn.Parameter for part in linears(body))
        # Weights made in inference mode cannot become views without breaking the model for its owner.
        and not any(parameter.is_inference() for parameter in body.parameters())
        and not has_hooks(body.modules())
        and len({parameter.device for parameter in body.parameters()}) == 1
    )
    return LeanBody(body) if plain else None


def linears(body: Any) -> Iterator[nn.Module]:
    """Yield what stands where a Llama-shaped body has linear layers: these, or what an adapter has put in their place."""
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        yield from (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))


def _rms_norm(hidden_BTF: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(hidden_BTF, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _side_by_side(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Return weights and biases of several linear layers as one of each; the layers go on as views of them."""
    biases = [linear.bias for linear in linears]
    return _fused([linear.weight for linear in linears]), None if biases[0] is None else _fused(biases)


def _fused(weights: list[Tensor]) -> Tensor:
    fused = adjacent(weights)
    if fused is None:
        # Ordinary tensors even if the caller is in inference mode: the model's owner may go on to train it.
        with torch.inference_mode(False):
            fused = torch.cat([weight.detach() for weight in weights])
        start = 0
        for weight in weights:
            weight.data = fused[start : start + len(weight)]
            start += len(weight)
    return fused


def adjacent(weights: list[Tensor]) -> Tensor | None:
    """Return weights that already stand side by side in one storage, as an earlier call left them, as one matrix."""
    first = weights[0].detach()
    end = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and weight.is_contiguous() and weight.data_ptr() == end):
            return None
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())
