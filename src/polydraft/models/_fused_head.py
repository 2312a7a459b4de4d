"""A feature head on a GPU, with kernels that do several things at once."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from polydraft.backends.triton import power_of_two, side_by_side
from polydraft.models._fused import TreeView, add_norm, gate, rotate_store
from polydraft.models._invariant import invariant_linear
from polydraft.models.cache import SlotCache
from polydraft.models.tree_attention import tree_attention

if TYPE_CHECKING:
    from polydraft.models.heads.feature_head import FeatureHead

_MOST_ROWS = 64
"""That our own products multiply: the library's are made for more, and cut small ones into parts that another kernel adds."""


class Entries(NamedTuple):
    """What a head reads in one pass."""

    tokens_BT: Tensor
    fused_BWH: Tensor
    """Features, or the head's own outputs in their place."""
    parents: Tensor | None
    """Which of them each token follows, `[T]` or row by row; token t follows feature t where there are none."""


def following(fused_BWH: Tensor, parents: Tensor | None) -> Tensor:
    """Return the features that each token follows."""
    if parents is None:
        return fused_BWH
    if fused_BWH.shape[1] == 1:
        return fused_BWH.expand(-1, parents.shape[-1], -1)
    if parents.dim() == 1 or len(parents) == 1:
        return fused_BWH.index_select(1, parents.flatten())
    return fused_BWH.gather(1, parents[..., None].expand(-1, -1, fused_BWH.shape[-1]))


class FusedHead:
    """Compute what a `FeatureHead` computes, with kernels that do several things at once."""

    def __init__(self, head: "FeatureHead", epsilon: float) -> None:
        self._head, self._epsilon = head, epsilon
        self._angles_PX = torch.empty(0)
        """Cosines and sines of each position, both halves of the channels."""
        weights = [parameter.detach().to(head.dtype) for parameter in head.tap_norms.parameters()]
        self._tap_weights_PH = torch.stack(weights) if weights else None
        """Of the norms of what the head reads."""

    def fused(self, features_RF: Tensor) -> Tensor:
        """Do what `FeatureHead.fused` does."""
        from polydraft.backends.triton import slot_kernels as kernels

        head = self._head
        if self._tap_weights_PH is None or head.fuse is None:
            return head.fused(features_RF)
        if not head.shape.reads_last:
            features_RF = features_RF[..., head.shape.hidden_size :]
        shape, (parts, width) = features_RF.shape, self._tap_weights_PH.shape
        features_RF = features_RF.flatten(0, -2)
        if features_RF.stride(1) != 1:
            features_RF = features_RF.contiguous()
        normed_RF = features_RF.new_empty(features_RF.shape)
        kernels.norm_parts[len(features_RF), parts](
            features_RF, self._tap_weights_PH, normed_RF, self._epsilon, width, features_RF.stride(0),
            BLOCK=power_of_two(width), num_warps=4 if width <= 1024 else 8 if width <= 4096 else 16,
        )  # fmt: skip
        return _product(head.fuse, normed_RF).view(*shape[:-1], -1)

    def _entered(self, entries: Entries) -> Tensor:
        """Return norms of features and of embedded tokens, side by side."""
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
            CHOSEN=parents is not None, BLOCK=power_of_two(size), num_warps=4 if size <= 1024 else 8,
        )  # fmt: skip
        return pair_BTX

    def __call__(self, entries: Entries, positions_BT: Tensor, view: TreeView, cache: SlotCache, capacity: int) -> Tensor:
        """Return the head's outputs of some entries; `capacity` bounds the positions."""
        head, shape, epsilon = self._head, self._head.shape, self._epsilon
        size, pair_BTX = shape.hidden_size, self._entered(entries)
        if head.join is None or head.attention_norm is None:
            passing_BTH, normed_BTX = pair_BTX[..., :size], pair_BTX
            if not shape.normed_residual:
                passing_BTH = following(entries.fused_BWH, entries.parents)
        else:
            passing_BTH, normed_BTX = add_norm(_product(head.join, pair_BTX), None, head.attention_norm.weight, epsilon)
        projected_BTX = head.normed_heads(_product(head.qkv, normed_BTX)).flatten(2)
        key_BHSC, value_BHSC = cache.storage(0, projected_BTX, shape.num_key_heads, shape.head_size)
        cos_PC, sin_PC = self._angles(capacity).chunk(2, dim=-1)
        query_BHTC = rotate_store(projected_BTX, cos_PC, sin_PC, view.slots_BT, key_BHSC, value_BHSC, positions_BT=positions_BT)
        mixed_BHTC = tree_attention(
            query_BHTC,
            key_BHSC,
            value_BHSC,
            view.lengths_B,
            view.visible_BTU,
            shape.head_size**-0.5,
            view.max_length,
            view.starts_BT,
        )
        attended_BTH = _product(head.attention_output, mixed_BHTC.transpose(1, 2).flatten(2))
        hidden_BTH, normed_BTH = add_norm(passing_BTH, attended_BTH, head.mlp_norm.weight, epsilon)
        down_BTH = _product(head.down, gate(_product(head.gate_up, normed_BTH)))
        output_BTH, normed_BTH = add_norm(hidden_BTH, down_BTH, head.output_norm.weight, epsilon)
        return normed_BTH if shape.normed_output else output_BTH

    def _angles(self, capacity: int) -> Tensor:
        if len(self._angles_PX) < capacity:
            weight = self._head.down.weight
            cos_PC, _, sin_PC = self._head.angles(torch.arange(capacity, device=weight.device), torch.float32).unbind(1)
            self._angles_PX = torch.cat([cos_PC, cos_PC, sin_PC, sin_PC], dim=1).to(weight.dtype)
        return self._angles_PX


def _product(layer: nn.Linear, input_XF: Tensor) -> Tensor:
    """Apply a layer."""
    if input_XF.dtype == torch.float32 or input_XF.numel() > _MOST_ROWS * input_XF.shape[-1]:
        return layer(input_XF)  # type: ignore[no-any-return]
    return invariant_linear(input_XF, layer.weight, layer.bias)
