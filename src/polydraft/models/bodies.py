"""Llama-shaped models in fewer operations, with the same weights and arithmetic.

Half of a small model's time on a CPU, and most of it on a GPU, is spent launching about forty operations per layer. Here there
are sixteen: one product for queries, keys and values, one for both halves of the MLP, fused norms. The weights are the model's
own, placed next to each other in memory; no second copy stays.

Backends run whole passes of such a body at once (`fast_body`).
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
_KNOWN_PACKAGES = ("torch.", "transformers.", "polydraft.")


class FastBody(ABC):
    """A model's body as a backend runs it: whole passes at once."""

    invariant: bool = False
    """Whether each token's features have the same bits as if it were computed alone."""
    variance: str | None = "the kernels for that run on GPUs"
    """Why the body cannot be invariant; None if it can."""
    key_shape: tuple[int, int]
    """Heads and channels of keys, the same as of values."""

    @abstractmethod
    def extend(self, context: "HFContext", tokens_BT: Tensor, block: Block) -> Tensor | None:
        """Do what `Context.extend` does; return None if torch has to run this pass."""

    def reading(self, context: "HFContext", count: int, size: int, most: int) -> Callable[[Tensor], Tensor] | None:
        """Return a pass that reads prompts and can be captured; None if there is none.

        It takes `[count, 1 + size]` numbers: each prompt's row and its next tokens. Rows have at most `most` committed tokens.
        """
        return None

    def product(self, input_BTX: Tensor, weight_FX: Tensor, bias_F: Tensor | None) -> Tensor:
        """Multiply inputs by weights in the way the body does."""
        return functional.linear(input_BTX, weight_FX, bias_F)


@operation
def fast_body(model: "HFModel", invariant: bool) -> FastBody | None:
    """Return a backend's body for a model, invariant if asked for and possible; None if torch has to run its layers."""
    return None


@operation
def kernel_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why there are no GPU kernels for models with this dtype on this device; None if there are."""
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
        """Return the last hidden states, after the final norm, concatenated with the outputs of the layers `taps`.

        Without a cache, the tokens are whole texts: each token sees all earlier ones, and nothing is kept.
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
    """Weights of one layer, with several products fused into one: `join` makes a weight and a bias from their layers."""

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
    """One layer with weights in the model's own dtype, computed in torch."""

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
    """Whether a model has the layers that this module knows."""
    return model.config.model_type in _MODEL_TYPES and model.config.hidden_act == "silu"


def is_altered(modules: Iterable[nn.Module]) -> bool:
    """Whether some modules do more than their classes in torch or transformers, which code that bypasses them would miss.

    They may have hooks (of adapters, say), a `forward` of their own, or a class from elsewhere.
    """
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or not type(module).__module__.startswith(_KNOWN_PACKAGES)
        for module in modules
    )


def is_product(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a layer is a plain product of this kind: no hooks, no adapter, no quantised weight (torchao's, say)."""
    plain = type(layer) is kind and not is_altered([layer])
    return plain and (kind is not nn.Linear or type(layer.weight) is nn.Parameter)


def lean_body(model: Any) -> LeanBody | None:
    """Return the lean form of a model's body; None if this module does not know its shape."""
    body = model.base_model
    plain = (
        is_llama_shaped(model)
        and model.config._attn_implementation == "sdpa"
        and all(map(is_product, linears(body)))
        # Weights made in inference mode cannot become views without breaking the model for its owner.
        and not any(parameter.is_inference() for parameter in body.parameters())
        and not is_altered(body.modules())
        and len({parameter.device for parameter in body.parameters()}) == 1
    )
    return LeanBody(body) if plain else None


def linears(body: Any) -> Iterator[nn.Module]:
    """Yield a Llama-shaped body's linear layers, or what an adapter has replaced them with."""
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        yield from (getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))


def _rms_norm(hidden_BTF: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(hidden_BTF, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _side_by_side(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Fuse weights and biases of several linear layers into one of each; the layers become views of them."""
    biases = [linear.bias for linear in linears]
    return _fused([linear.weight for linear in linears]), None if biases[0] is None else _fused(biases)


def _fused(weights: list[Tensor]) -> Tensor:
    fused = adjacent(weights)
    if fused is None:
        # Ordinary tensors even in inference mode: the model's owner may train it later.
        with torch.inference_mode(False):
            fused = torch.cat([weight.detach() for weight in weights])
        start = 0
        for weight in weights:
            weight.data = fused[start : start + len(weight)]
            start += len(weight)
    return fused


def adjacent(weights: list[Tensor]) -> Tensor | None:
    """Return weights that are already adjacent in memory (fused by an earlier call) as one matrix; None if they are not."""
    first = weights[0].detach()
    end = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and weight.is_contiguous() and weight.data_ptr() == end):
            return None
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())
