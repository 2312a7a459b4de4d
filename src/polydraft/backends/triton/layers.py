"""Llama-shaped models and feature heads on a GPU, in ten launches per layer.

A pass over a few tokens should take no longer than reading the weights. So everything between the four matrix products of a
layer is six kernels, and the products of a single token have their own kernel. Attention costs what the current text costs,
whatever the size of the buffers, so a captured pass serves many lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from polydraft.backends.triton import kernels_run, overlapping, power_of_two
from polydraft.backends.triton.attention import attend_tree, obstacle
from polydraft.backends.triton.invariant import (
    FORMATS,
    Sight,
    invariant_attention,
    invariant_linear,
    invariant_parts,
    sight_of,
)
from polydraft.models.bodies import FastBody, LeanBody, LeanLayer, fast_body, is_product
from polydraft.models.cache import SlotCache
from polydraft.models.families import steady_positions
from polydraft.models.hf import HFModel
from polydraft.models.hf_context import HFContext
from polydraft.models.products import Product, fast_product
from polydraft.models.quantised import Int8Body, Int8Layer, Int8Linear, Int8Weight, is_int8_llama, multiply_int8, rounded
from polydraft.operations import implements
from polydraft.trees import Block, causal_block

MOST_TOKENS = 128
"""Most tokens per row for these kernels; longer blocks are prompts, limited by arithmetic instead of bandwidth."""
_ROWS = 4
"""Outputs that one program of a product computes."""
_LARGE_WEIGHT = 2**23
"""Bytes of a weight from which reading it takes longer than a launch, so that it matters how it is read."""


@dataclass(frozen=True, eq=False)
class TreeView:
    """What a block of tokens sees, without a mask over all slots."""

    slots_BT: Tensor
    lengths_B: Tensor
    visible_BTU: Tensor
    max_length: int
    """Most committed tokens of any row in any replay."""
    starts_BT: Tensor | None = None
    """First committed slot that each token sees; None for all slots."""
    slot_positions_BS: Tensor | None = None
    """Position of each slot's content; needed for invariant bits."""
    causal: bool = False
    """Whether each token of the block sees all earlier ones."""
    rows_B: Tensor | None = None
    """For causal blocks with invariant bits: the tokens' rows in the storage; None for all rows in order."""


class Rotation(NamedTuple):
    """Cosines and sines that rotate queries and keys: of each token, or tables `[P, C]` if positions are given."""

    cos: Tensor
    sin: Tensor
    positions_BT: Tensor | None


class FusedBody(FastBody):
    """Compute the last hidden states of a Llama-shaped model on a GPU.

    Parameters
    ----------
    invariant : bool
        If the body can, give each token the same bits as if it were computed alone, see `polydraft.backends.triton.invariant`.
    product : callable, optional
        Multiplies inputs by weights and adds biases; our own kernels if not given.
    """

    def __init__(
        self,
        body: LeanBody | Int8Body,
        invariant: bool = False,
        product: Callable[[Tensor, Any, Tensor | None], Tensor] | None = None,
    ) -> None:
        self._body, self.variance = body, _variance(body)
        self.key_shape = body.layers[0].keys, body.layers[0].channels
        self.invariant = invariant and self.variance is None
        self._product = product or (invariant_linear if self.invariant else linear)
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}
        """Cosines and sines of all positions `[P, C]`, kept because captured passes read them."""

    def __call__(
        self, tokens_BT: Tensor, positions_BT: Tensor, view: TreeView, cache: SlotCache, taps: Sequence[int] = ()
    ) -> Tensor:
        """Return the last hidden states, after the final norm, concatenated with the outputs of the layers `taps`."""
        sight = self._sight(view, positions_BT) if self.invariant else None
        hidden_BTF: Tensor = self._body.embedding(tokens_BT)
        rotation = self._rotation(hidden_BTF, positions_BT, cache.capacity)
        delta_BTF, tapped = None, []
        layers: Sequence[LeanLayer | Int8Layer] = self._body.layers
        for number, layer in enumerate(layers):
            hidden_BTF, normed_BTF = add_norm(hidden_BTF, delta_BTF, layer.input_norm.weight, layer.input_norm.variance_epsilon)
            if number in taps:
                tapped.append(hidden_BTF)
            attended_BTF = self._attended(layer, normed_BTF, rotation, view, sight, cache)
            hidden_BTF, normed_BTF = add_norm(hidden_BTF, attended_BTF, layer.mlp_norm.weight, layer.mlp_norm.variance_epsilon)
            delta_BTF = self._through(layer.down, gate(self.product(normed_BTF, layer.gate_up, layer.gate_up_bias)))
        norm = self._body.norm
        hidden_BTF, normed_BTF = add_norm(hidden_BTF, delta_BTF, norm.weight, norm.variance_epsilon)
        if len(self._body.layers) in taps:
            tapped.append(hidden_BTF)
        return torch.cat([normed_BTF, *tapped], dim=-1) if tapped else normed_BTF

    def extend(self, context: HFContext, tokens_BT: Tensor, block: Block) -> Tensor | None:
        """Pass the tokens of a tree; None if it is a long prompt, or if the window ends inside the tree."""
        # Most kernels apply the window to committed text only, so it must cover all that is not committed.
        unfit = block.size > MOST_TOKENS or (context.window is not None and context.window < block.stop)
        if torch.is_grad_enabled() if self.invariant else unfit:
            return None
        used, placed = context.used(block), context.place(tokens_BT, block)
        view = TreeView(
            placed.slots_BT,
            context.lengths_B,
            block.visible_BTU,
            used - block.stop,
            placed.starts_BT,
            context.positions_BS,
            causal=block.plain or (block.stop == 1 and block.places_BT is None),
        )
        return self(placed.tokens_BT, placed.positions_BT, view, context.cache, context.model.taps)

    def reading(self, context: HFContext, count: int, size: int, most: int) -> Callable[[Tensor], Tensor] | None:
        """Return a pass that reads prompts; only if bits are invariant, because it pads them."""
        if not self.invariant or torch.is_grad_enabled():
            return None
        model, window, limit = context.model, context.window, context.max_positions
        # All rows, in use or not, so that one capture serves any number of rows.
        all_lengths_B, all_positions_BS = context.every_row("lengths_B"), context.every_row("positions_BS")

        def read(values_BX: Tensor) -> Tensor:
            """Read rows and tokens from values, so that one capture serves all of them."""
            rows_B, tokens_BT = values_BX[:, 0].contiguous(), values_BX[:, 1:].clamp(max=model.vocab_size - 1)
            lengths_B = all_lengths_B[rows_B]
            slots_BT = lengths_B[:, None] + torch.arange(size, device=context.device)
            positions_BT = slots_BT if limit is None else slots_BT.clamp(max=limit - 1)
            all_positions_BS[rows_B[:, None], slots_BT] = positions_BT
            starts_BT = None if window is None else (positions_BT - window + 1).clamp(min=0)
            visible_BTU = causal_block(count, size, context.device).visible_BTU
            view = TreeView(slots_BT, lengths_B, visible_BTU, most, starts_BT, causal=True, rows_B=rows_B)
            return self(tokens_BT, positions_BT, view, context.cache, model.taps)

        return read

    def product(self, input_BTX: Tensor, weight_FX: Any, bias_F: Tensor | None) -> Tensor:
        """Multiply inputs by weights in the way the body does."""
        return self._product(input_BTX, weight_FX, bias_F)

    def _rotation(self, hidden_BTF: Tensor, positions_BT: Tensor, capacity: int) -> Rotation:
        """Return the rotation of each token: by a table, if positions mean the same in every text."""
        known = self._rotations.get(capacity)
        if known is None:
            capture = hidden_BTF.is_cuda and torch.cuda.is_current_stream_capturing()
            if capture or not steady_positions(self._body.rotary.config):
                cos_BTC, sin_BTC = self._body.rotary(hidden_BTF, position_ids=positions_BT)
                return Rotation(cos_BTC.contiguous(), sin_BTC.contiguous(), None)
            all_1P = torch.arange(capacity, device=hidden_BTF.device)[None]
            cos_PC, sin_PC = (part[0].contiguous() for part in self._body.rotary(hidden_BTF, position_ids=all_1P))
            known = self._rotations[capacity] = cos_PC, sin_PC
        return Rotation(*known, positions_BT.contiguous())

    def _attended(
        self,
        layer: LeanLayer | Int8Layer,
        normed_BTF: Tensor,
        rotation: Rotation,
        view: TreeView,
        sight: Sight | None,
        cache: SlotCache,
    ) -> Tensor:
        projected_SBTX = self._parts(normed_BTF, layer.qkv, layer.qkv_bias)
        keys_LBHSC, values_LBHSC = cache.held(normed_BTF, layer.keys, layer.channels)
        key_BHSC, value_BHSC = keys_LBHSC[layer.index], values_LBHSC[layer.index]
        query_BHTC = rotate_store(
            projected_SBTX, rotation.cos, rotation.sin, view.slots_BT, key_BHSC, value_BHSC, view.rows_B, rotation.positions_BT
        )
        if sight is not None:
            mixed_BHTC = invariant_attention(query_BHTC, key_BHSC, value_BHSC, sight, layer.scale)
        else:
            mixed_BHTC = attend_tree(
                query_BHTC, key_BHSC, value_BHSC, view.lengths_B, view.visible_BTU, layer.scale, view.max_length, view.starts_BT
            )
        return self._through(layer.output, mixed_BHTC.transpose(1, 2).flatten(2))

    def _parts(self, input_BTX: Tensor, weight: Any, bias_F: Tensor | None) -> Tensor:
        """Multiply inputs by weights; the next kernel adds up the parts."""
        if isinstance(weight, Int8Weight):
            return invariant_parts(input_BTX, weight.data_FX, bias_F, scales_F=weight.scales_F)
        if self.invariant:
            return invariant_parts(input_BTX, weight, bias_F)
        return self.product(input_BTX, weight, bias_F)[None]

    def _through(self, layer: Module, input_BTX: Tensor) -> Tensor:
        """Apply a layer, by our own product if it is a plain one, in parts for `add_norm`."""
        if is_product(layer):
            assert isinstance(layer, Linear)
            return self._parts(input_BTX, layer.weight, layer.bias)
        if is_product(layer, Int8Linear):
            assert isinstance(layer, Int8Linear)
            return invariant_parts(input_BTX, layer.held[0], layer.bias, scales_F=layer.held[1])
        output_BTF: Tensor = layer(input_BTX)
        return output_BTF

    def _sight(self, view: TreeView, positions_BT: Tensor) -> Sight:
        if view.causal:
            return Sight(view.lengths_B, view.max_length, view.starts_BT, rows_B=view.rows_B)
        assert view.slot_positions_BS is not None
        return sight_of(
            view.lengths_B, view.max_length, view.starts_BT, positions_BT.contiguous(), view.visible_BTU, view.slot_positions_BS
        )


def linear(input_BTX: Tensor, weight_FX: Tensor, bias_F: Tensor | None) -> Tensor:
    """Do what `torch.nn.functional.linear` does; for a single token and a large weight, at the speed of reading the weight."""
    if input_BTX.numel() == input_BTX.shape[-1] and weight_FX.nbytes >= _LARGE_WEIGHT and weight_FX.is_contiguous():
        return vector_product(input_BTX, weight_FX, bias_F)
    return functional.linear(input_BTX, weight_FX, bias_F)


def vector_product(input_BTX: Tensor, weight_FX: Tensor, bias_F: Tensor | None) -> Tensor:
    """Multiply the input, a single vector, by a weight."""
    from polydraft.backends.triton import layer_kernels as kernels

    rows, channels = weight_FX.shape
    assert input_BTX.is_contiguous() and input_BTX.numel() == channels and weight_FX.is_contiguous()
    output_BTF = input_BTX.new_empty(*input_BTX.shape[:-1], rows)
    block = 2048 if channels % 2048 == 0 else 1024  # the fastest of those tried on an H200 that leave no lane idle
    kernels.vector_product[(-(-rows // _ROWS),)](
        input_BTX, weight_FX, weight_FX if bias_F is None else bias_F, output_BTF, rows, channels,
        BIAS=bias_F is not None, ROWS=_ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return output_BTF


def _supports(model: HFModel, invariant: bool) -> bool:
    understood = model.lean is not None or is_int8_llama(model.hf_model)
    here = understood and kernels_run(model.hf_model.base_model.norm.weight)
    return here and obstacle(model.device, model.dtype) is None


@implements(fast_body, "triton", supports=_supports)
def fused_body(model: HFModel, invariant: bool) -> FusedBody:
    """Return the fused form of a model's lean body, or of one in int8."""
    if model.lean is not None:
        return FusedBody(model.lean, invariant)

    def multiply(input_BTX: Tensor, weight: Int8Weight, bias_F: Tensor | None) -> Tensor:
        return invariant_parts(input_BTX, weight.data_FX, bias_F, most_apart=0, scales_F=weight.scales_F)[0]

    return FusedBody(Int8Body(model.hf_model.base_model), product=multiply)


def _reads_int8(input_RX: Tensor, data_FX: Tensor, scales_F: Tensor, bias_F: Tensor | None) -> bool:
    return kernels_run(input_RX) and input_RX.shape[1] == data_FX.shape[1] and input_RX.is_contiguous()


@implements(multiply_int8, "triton", supports=_reads_int8)
def fused_int8(input_RX: Tensor, data_FX: Tensor, scales_F: Tensor, bias_F: Tensor | None) -> Tensor:
    """Multiply by a weight in int8, which is read once for all rows."""
    return invariant_parts(input_RX, data_FX, bias_F, most_apart=0, scales_F=scales_F, dtype=torch.float32)[0]


def _multiplies_int8(layer: Module | tuple[Tensor, Tensor | None], int8: bool = False) -> bool:
    return int8 and isinstance(layer, tuple) and layer[0].dtype in FORMATS and kernels_run(layer[0])


@implements(fast_product, "triton", supports=_multiplies_int8)
def int8_product(layer: Module | tuple[Tensor, Tensor | None], int8: bool = False) -> Product:
    """Return a product with a weight that is read in int8 for a few rows; many rows are limited by arithmetic and use torch."""
    assert isinstance(layer, tuple)
    (weight_FX, bias_F), (data_FX, scales_F) = layer, rounded(layer[0].detach())
    data_FX = data_FX[:, : weight_FX.shape[1]].contiguous()  # without the padding for CPUs

    def multiply(input_XF: Tensor) -> Tensor:
        if input_XF.numel() > MOST_TOKENS * input_XF.shape[-1]:
            return functional.linear(input_XF, weight_FX, bias_F)
        return invariant_parts(input_XF, data_FX, bias_F, most_apart=0, scales_F=scales_F)[0]

    return multiply


def _variance(body: LeanBody | Int8Body) -> str | None:
    """Return why a fused body cannot be invariant, or None."""
    if (dtype := body.embedding.weight.dtype) not in FORMATS:
        return f"it computes in bfloat16 or float32, not in {str(dtype).removeprefix('torch.')}"
    if not all(is_product(part) for layer in body.layers for part in (layer.output, layer.down)):
        return "its layers are not plain products"
    return None


def add_norm(
    hidden_BTF: Tensor | None, delta: Tensor | None, weight_F: Tensor, epsilon: float, normed_BTF: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `hidden + delta`, either of which may be None, and its norm times `weight`, written to `normed_BTF` if given.

    `delta` is `[B, T, F]`, or the parts `[S, B, T, F]` of a product, which are added in order.
    """
    from polydraft.backends.triton import layer_kernels as kernels

    if hidden_BTF is None:
        assert delta is not None and delta.dim() == 4
        total_BTF = torch.empty(delta.shape[1:], dtype=weight_F.dtype, device=delta.device)
    else:
        hidden_BTF = hidden_BTF.contiguous()
        total_BTF = hidden_BTF if delta is None else torch.empty_like(hidden_BTF)
    channels = total_BTF.shape[-1]
    if normed_BTF is None:
        normed_BTF = torch.empty_like(total_BTF)
    added = total_BTF if delta is None else delta
    assert added.is_contiguous() and weight_F.is_contiguous()
    rows = total_BTF.numel() // channels
    kernels.add_norm[(rows,)](
        total_BTF if hidden_BTF is None else hidden_BTF, added, weight_F, total_BTF, normed_BTF, epsilon, rows, channels,
        normed_BTF.stride(-2), PARTS=0 if delta is None else delta.numel() // total_BTF.numel(),
        **overlapping(total_BTF), RESIDUAL=hidden_BTF is not None,
        BLOCK=power_of_two(channels), num_warps=16 if channels > 2048 else 8 if channels > 1024 else 4,
    )  # fmt: skip
    return total_BTF, normed_BTF


def rotate_store(
    projected: Tensor,
    cos_BTC: Tensor,
    sin_BTC: Tensor,
    slots_BT: Tensor,
    key_BHSC: Tensor,
    value_BHSC: Tensor,
    rows_B: Tensor | None = None,
    positions_BT: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values in `rows_B` (all rows if None), and return the queries `[B, H, T, C]`.

    `projected` is `[B, T, X]`, or the parts `[S, B, T, X]` of a product. With `positions_BT`, cosines and sines are tables of
    all positions, `[P, C]`.
    """
    from polydraft.backends.triton import layer_kernels as kernels

    batch_size, size, width = projected.shape[-3:]
    keys, channels = key_BHSC.shape[1], key_BHSC.shape[3]
    queries = width // channels - 2 * keys
    assert projected.is_contiguous() and slots_BT.is_contiguous() and cos_BTC.stride() == sin_BTC.stride()
    if positions_BT is None:
        assert cos_BTC.shape == (batch_size, size, channels) and cos_BTC.stride(0) == size * cos_BTC.stride(1), cos_BTC.shape
    else:
        assert positions_BT.is_contiguous() and cos_BTC.shape[1:] == (channels,), cos_BTC.shape
    query_BTHC = key_BHSC.new_empty(batch_size, size, queries, channels)
    kernels.rotate_store[(batch_size * size,)](
        projected, cos_BTC, sin_BTC, slots_BT if positions_BT is None else positions_BT, slots_BT,
        slots_BT if rows_B is None else rows_B, query_BTHC, key_BHSC, value_BHSC, size,
        batch_size * size, cos_BTC.stride(-2), *key_BHSC.stride()[:3], *value_BHSC.stride()[:3],
        **overlapping(projected), PARTS=projected.numel() // (batch_size * size * width),
        LOOKED_UP=positions_BT is not None, SOME=rows_B is not None,
        QUERIES=queries, KEYS=keys, CHANNELS=channels, BLOCK_HEADS=power_of_two(queries + 2 * keys),
        HALF=power_of_two(channels // 2), num_warps=8 if queries > 16 else 4,
    )  # fmt: skip
    return query_BTHC.transpose(1, 2)


def gate(gate_up_BTX: Tensor) -> Tensor:
    """Return SiLU of the first half of the channels times the second half."""
    from polydraft.backends.triton import layer_kernels as kernels

    channels = gate_up_BTX.shape[-1] // 2
    assert gate_up_BTX.is_contiguous()
    output_BTX = gate_up_BTX.new_empty(*gate_up_BTX.shape[:-1], channels)
    block = min(power_of_two(channels), 1024)
    kernels.gate[(output_BTX.numel() // channels, -(-channels // block))](
        gate_up_BTX, output_BTX, channels, **overlapping(gate_up_BTX), BLOCK=block, num_warps=4
    )
    return output_BTX
