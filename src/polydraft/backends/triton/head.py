"""A feature head on a GPU, with fused kernels."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from polydraft.backends.triton import kernels_run, overlapping, power_of_two, runs_on_tensors, side_by_side
from polydraft.backends.triton.attention import attend_tree, obstacle
from polydraft.backends.triton.invariant import invariant_parts
from polydraft.backends.triton.layers import MOST_TOKENS, TreeView, add_norm, gate, rotate_store
from polydraft.models.cache import SlotCache
from polydraft.models.heads.feature_head import FeatureHead
from polydraft.models.heads.head_context import FastHead, HeadContext, fast_head, following, keep_entries, take_roots
from polydraft.models.quantised import rounded
from polydraft.operations import implements
from polydraft.trees import Block

_MOST_ROWS = 64
"""Most rows for our own products. The library's are made for more, and split small ones into parts that another kernel adds."""
_LARGE_WEIGHT = 2**24
"""Bytes of a weight from which reading it in int8 saves more time than a launch takes."""


class Entries(NamedTuple):
    """What a head reads in one pass."""

    tokens_BT: Tensor
    fused_BWH: Tensor
    """Features, or the head's own outputs instead."""
    parents: Tensor | None
    """Which of the features each token follows, `[T]` or row by row; if None, token t follows feature t."""


class FusedHead(FastHead):
    """Computes what a `FeatureHead` computes, with fused kernels."""

    def __init__(self, head: FeatureHead) -> None:
        self._head, self._epsilon = head, head.shape.norm_epsilon
        self._angles_PX = torch.empty(0)
        """Cosines and sines of each position, for both halves of the channels."""
        weights = [parameter.detach().to(head.dtype) for parameter in head.tap_norms.parameters()]
        self._tap_weights_PH = torch.stack(weights) if weights else None
        """Weights of the norms of the features' parts."""
        self._rounded: dict[nn.Linear, tuple[Tensor, Tensor]] = {}
        """Large weights in int8, with their scales."""

    def read(
        self, context: HeadContext, tokens_BT: Tensor, fused_BWH: Tensor, block: Block, parents: Tensor | None
    ) -> Tensor | None:
        """Pass the entries of a tree; None if it is a long text, or if the window ends inside the tree."""
        # The kernels apply the window to committed text only, so it must cover all that is not committed.
        if block.size > MOST_TOKENS or self._head.shape.window < block.stop:
            return None
        used, placed = context.used(block), context.place(tokens_BT, block)
        view = TreeView(placed.slots_BT, context.lengths_B, block.visible_BTU, used - block.stop, placed.starts_BT)
        entries = Entries(placed.tokens_BT, fused_BWH, parents)
        return self(entries, placed.positions_BT, view, context.cache, context.capacity)

    def fused(self, features_RF: Tensor) -> Tensor | None:
        """Norm the parts of the features by one kernel, and fuse them; None if they are not normed."""
        from polydraft.backends.triton import slot_kernels as kernels

        head = self._head
        if self._tap_weights_PH is None or head.fuse is None:
            return None
        if not head.shape.reads_last:
            features_RF = features_RF[..., head.shape.hidden_size :]
        shape, (parts, width) = features_RF.shape, self._tap_weights_PH.shape
        features_RF = side_by_side(features_RF.flatten(0, -2))
        normed_RF = features_RF.new_empty(features_RF.shape)
        kernels.norm_parts[len(features_RF), parts](
            features_RF, self._tap_weights_PH, normed_RF, self._epsilon, width, features_RF.stride(0),
            BLOCK=power_of_two(width), num_warps=4 if width <= 1024 else 8 if width <= 4096 else 16,
        )  # fmt: skip
        return _total(self._parts(head.fuse, normed_RF), normed_RF.dtype).view(*shape[:-1], -1)

    def _entered(self, entries: Entries) -> Tensor:
        """Return the normed features and the normed token embeddings, concatenated."""
        from polydraft.backends.triton import slot_kernels as kernels

        head, (tokens_BT, fused_BWH, parents) = self._head, entries
        embedding_VH, size = head.tables[0], head.shape.hidden_size
        assert tokens_BT.is_contiguous() and fused_BWH.stride(2) == embedding_VH.stride(1) == 1
        pair_BTX = fused_BWH.new_empty(*tokens_BT.shape, 2 * size)
        chosen = tokens_BT if parents is None else side_by_side(parents)
        kernels.enter_head[tokens_BT.numel(), 2](
            fused_BWH, tokens_BT, chosen, embedding_VH, head.feature_norm.weight, head.token_norm.weight, pair_BTX,
            self._epsilon, size, tokens_BT.shape[1], *fused_BWH.stride()[:2],
            chosen.stride(0) if chosen.dim() == 2 and len(chosen) > 1 else 0, embedding_VH.stride(0),
            **overlapping(pair_BTX), CHOSEN=parents is not None, BLOCK=power_of_two(size), num_warps=4 if size <= 1024 else 8,
        )  # fmt: skip
        return pair_BTX

    def __call__(self, entries: Entries, positions_BT: Tensor, view: TreeView, cache: SlotCache, capacity: int) -> Tensor:
        """Return the head's outputs for some entries; `capacity` is an upper bound of the positions."""
        head, shape, epsilon = self._head, self._head.shape, self._epsilon
        size, pair_BTX = shape.hidden_size, self._entered(entries)
        if head.join is None or head.attention_norm is None:
            passing_BTH, normed_BTX = pair_BTX[..., :size], pair_BTX
            if not shape.normed_residual:
                passing_BTH = following(entries.fused_BWH, entries.parents)
        else:
            passing_BTH, normed_BTX = add_norm(None, self._parts(head.join, pair_BTX), head.attention_norm.weight, epsilon)
        projected = self._parts(head.qkv, normed_BTX)
        if shape.query_key_norm:
            projected = head.normed_heads(_total(projected, normed_BTX.dtype)).flatten(2)
        keys_LBHSC, values_LBHSC = cache.held(normed_BTX, shape.num_key_heads, shape.head_size)
        key_BHSC, value_BHSC = keys_LBHSC[0], values_LBHSC[0]
        cos_PC, sin_PC = self._angles(capacity).chunk(2, dim=-1)
        query_BHTC = rotate_store(projected, cos_PC, sin_PC, view.slots_BT, key_BHSC, value_BHSC, positions_BT=positions_BT)
        mixed_BHTC = attend_tree(
            query_BHTC,
            key_BHSC,
            value_BHSC,
            view.lengths_B,
            view.visible_BTU,
            shape.head_size**-0.5,
            view.max_length,
            view.starts_BT,
        )
        attended_SBTH = self._parts(head.attention_output, mixed_BHTC.transpose(1, 2).flatten(2))
        hidden_BTH, normed_BTH = add_norm(passing_BTH, attended_SBTH, head.mlp_norm.weight, epsilon)
        gate_up_BTX = self._parts(head.gate_up, normed_BTH, most_apart=0)[0]
        down_SBTH = self._parts(head.down, gate(gate_up_BTX))
        output_BTH, normed_BTH = add_norm(hidden_BTH, down_SBTH, head.output_norm.weight, epsilon)
        return normed_BTH if shape.normed_output else output_BTH

    def _parts(self, layer: nn.Linear, input_BTX: Tensor, most_apart: int = _MOST_ROWS) -> Tensor:
        """Apply a layer; the next kernel adds up the parts. More than `most_apart` rows give a single part."""
        if input_BTX.dtype == torch.float32 or input_BTX.numel() > _MOST_ROWS * input_BTX.shape[-1]:
            return layer(input_BTX)[None]  # type: ignore[no-any-return]
        if not self._head.int8 or layer.weight.nbytes < _LARGE_WEIGHT:
            return invariant_parts(input_BTX, layer.weight, layer.bias, most_apart)
        if layer not in self._rounded:
            self._rounded[layer] = rounded(layer.weight.detach())
        data_FX, scales_F = self._rounded[layer]
        return invariant_parts(input_BTX, data_FX, layer.bias, most_apart, scales_F=scales_F)

    def _angles(self, capacity: int) -> Tensor:
        if len(self._angles_PX) < capacity:
            weight = self._head.down.weight
            cos_PC, _, sin_PC = self._head.angles(torch.arange(capacity, device=weight.device), torch.float32).unbind(1)
            self._angles_PX = torch.cat([cos_PC, cos_PC, sin_PC, sin_PC], dim=1).to(weight.dtype)
        return self._angles_PX


def _total(parts_SBTX: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up parts when no kernel does."""
    return parts_SBTX[0] if len(parts_SBTX) == 1 else parts_SBTX.sum(0).to(dtype)


def _supports(head: FeatureHead) -> bool:
    single = head.depths is None and head.shape.normed
    return single and kernels_run(head.down.weight) and obstacle(head.device, head.dtype) is None


implements(fast_head, "triton", supports=_supports)(FusedHead)


@implements(take_roots, "triton", supports=runs_on_tensors)
def take_roots_by_kernel(outputs_BWH: Tensor, fresh_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Take the roots' outputs by one kernel."""
    from polydraft.backends.triton import slot_kernels as kernels

    batch_size, _, channels = outputs_BWH.shape
    assert outputs_BWH.stride(1) == channels and outputs_BWH.stride(2) == 1
    roots_B1H = outputs_BWH.new_empty(batch_size, 1, channels)
    kernels.take_roots[batch_size,](
        outputs_BWH, fresh_B, lengths_B, roots_B1H, channels, outputs_BWH.stride(0),
        BLOCK=power_of_two(channels), num_warps=4,
    )  # fmt: skip
    return roots_B1H


@implements(keep_entries, "triton", supports=runs_on_tensors)
def keep_entries_by_kernel(
    tokens_BW: Tensor,
    path_BW: Tensor,
    keep_B: Tensor,
    features_BNF: Tensor,
    lengths_B: Tensor,
    kept: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Keep the fresh entries by one kernel."""
    from polydraft.backends.triton import slot_kernels as kernels

    kept_tokens_BW, kept_features_BWF, fresh_B = kept
    tokens_BW, path_BW, width = side_by_side(tokens_BW), side_by_side(path_BW), kept_tokens_BW.shape[1]
    assert kept_tokens_BW.is_contiguous() and kept_features_BWF.is_contiguous() and features_BNF.stride(2) == 1
    assert tokens_BW.shape == path_BW.shape == kept_tokens_BW.shape, (tokens_BW.shape, kept_tokens_BW.shape)
    kernels.keep_entries[len(tokens_BW), width](
        tokens_BW, path_BW, keep_B, features_BNF, lengths_B, kept_tokens_BW, kept_features_BWF, fresh_B,
        width, features_BNF.shape[2], tokens_BW.stride(0), path_BW.stride(0), *features_BNF.stride()[:2],
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
