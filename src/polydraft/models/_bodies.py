"""Bodies of models that run by our own code, with the same weights and arithmetic.

*Llama-shaped models* in fewer operations: half of a small model's time on a CPU, and most of it on a GPU, goes into launching
some forty operations per layer. Here they are sixteen: one product for queries, keys and values, one for both halves of the
MLP, fused norms. The weights are the model's own, laid out side by side in memory; nothing is copied for keeps.

*GPT-Neo*, whose local layers need a mask of their own: the layers of `transformers` cut their window, and the future, by a
table over slots. In a tree siblings share a position but not a slot, and in a batch of texts of different lengths the last
slots are not the last tokens, so that table hides what should be seen. Here the same weights run with masks that follow
positions; the table is not looked at.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polydraft.errors import UsageError
from polydraft.models.cache import SlotCache
from polydraft.models.families import FULL, SLIDING

_MODEL_TYPES = {"llama", "mistral", "qwen2"}
GPT_NEO = "gpt_neo"


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


class LeanLayer:
    """Weights of one layer, fused, and what they compute."""

    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.qkv_bias = _side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self.gate_up_bias = _side_by_side([mlp.gate_proj, mlp.up_proj])
        self.output, self.down = attention.o_proj, mlp.down_proj
        self.channels = attention.head_dim
        self.queries = attention.q_proj.out_features // self.channels
        self.keys = attention.k_proj.out_features // self.channels
        self.scale = attention.scaling

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


def lean_body(model: Any) -> LeanBody | None:
    """Return the lean form of a model's body, or None where its shape is not the one understood here."""
    config = model.config
    body = model.base_model
    plain = (
        config.model_type in _MODEL_TYPES
        and config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        # Of other types are quantised weights, torchao's say, which cannot be put side by side.
        and all(type(part) is nn.Linear and type(part.weight) is nn.Parameter for part in _linears(body))
        # Weights made in inference mode cannot become views without breaking the model for its owner.
        and not any(parameter.is_inference() for parameter in body.parameters())
        # Hooks and adapters work on the modules that are passed by here.
        and not any(module._forward_hooks or module._forward_pre_hooks for module in body.modules())
        and len({parameter.device for parameter in body.parameters()}) == 1
    )
    return LeanBody(body) if plain else None


def _linears(body: Any) -> Iterator[nn.Module]:
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
    fused = _adjacent(weights)
    if fused is None:
        # Ordinary tensors even if the caller is in inference mode: the model's owner may go on to train it.
        with torch.inference_mode(False):
            fused = torch.cat([weight.detach() for weight in weights])
        start = 0
        for weight in weights:
            weight.data = fused[start : start + len(weight)]
            start += len(weight)
    return fused


def _adjacent(weights: list[Tensor]) -> Tensor | None:
    """Return weights that already stand side by side in one storage, as an earlier call left them, as one matrix."""
    first = weights[0].detach()
    end = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and weight.is_contiguous() and weight.data_ptr() == end):
            return None
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())


class GPTNeoBody:
    """Compute the last hidden states of a GPT-Neo model.

    Parameters
    ----------
    obstacle : str, optional
        Why its layers cannot be run one by one from here, such as that they are on several devices.
    """

    def __init__(self, model: Any, obstacle: str | None) -> None:
        self._body = model.base_model
        passed_by = [self._body, *self._body.h, *(block.attn for block in self._body.h)]
        passed_by += [block.attn.attention for block in self._body.h]
        if any(module._forward_hooks or module._forward_pre_hooks for module in passed_by):
            obstacle = obstacle or "its layers have hooks"
        if obstacle is not None:
            raise UsageError(f"model type {GPT_NEO!r} works only unchanged and on one device, but {obstacle}; load it as it is")

    def __call__(
        self, tokens_BT: Tensor, positions_BT: Tensor, mask: Any, cache: SlotCache, taps: Sequence[int] = ()
    ) -> Tensor:
        """Return the last hidden states, after the final norm, and beside them the outputs of the layers `taps`."""
        hidden_BTF: Tensor = self._body.wte(tokens_BT) + self._body.wpe(positions_BT)
        tapped = []
        for index, block in enumerate(self._body.h):
            attention = block.attn.attention
            kind = SLIDING if attention.attention_type == "local" else FULL
            mask_B1TS = mask[kind] if isinstance(mask, dict) else mask
            hidden_BTF = hidden_BTF + _attended(attention, block.ln_1(hidden_BTF), mask_B1TS, cache, index)
            hidden_BTF = hidden_BTF + block.mlp(block.ln_2(hidden_BTF))
            if index + 1 in taps:
                tapped.append(hidden_BTF)
        normed_BTF: Tensor = self._body.ln_f(hidden_BTF)
        return torch.cat([normed_BTF, *tapped], dim=-1) if tapped else normed_BTF


def _attended(attention: Any, normed_BTF: Tensor, mask_B1TS: Tensor | None, cache: SlotCache, index: int) -> Tensor:
    """Return what attention adds; scores are not scaled and in float32, as this family was trained."""
    query_BHTC, key_BHTC, value_BHTC = (
        product(normed_BTF).unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
        for product in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    key_BHSC, value_BHSC = cache.update(key_BHTC, value_BHTC, index)
    scores_BHTS = query_BHTC.float() @ key_BHSC.float().transpose(-1, -2)
    if mask_B1TS is not None:
        hidden_B1TS = ~mask_B1TS if mask_B1TS.dtype == torch.bool else mask_B1TS < 0
        scores_BHTS = scores_BHTS.masked_fill(hidden_B1TS, torch.finfo(scores_BHTS.dtype).min)
    weights_BHTS = scores_BHTS.softmax(dim=-1).to(value_BHSC.dtype)
    output_BTF: Tensor = attention.out_proj((weights_BHTS @ value_BHSC).transpose(1, 2).flatten(2))
    return output_BTF
