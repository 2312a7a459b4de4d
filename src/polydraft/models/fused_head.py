"""A feature head on a GPU in some twenty launches a level, where the plain way takes eighty."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from polydraft.models.cache import SlotCache
from polydraft.models.fused import TreeView, add_norm, gate, rotate_store
from polydraft.models.tree_attention import tree_attention

if TYPE_CHECKING:
    from polydraft.models.feature_head import FeatureHead


class FusedHead:
    """Compute what a `FeatureHead` computes, with kernels that do several things at once."""

    def __init__(self, head: "FeatureHead", epsilon: float) -> None:
        self._head, self._epsilon = head, epsilon
        self._angles_PX = torch.empty(0)
        """Cosines and sines of each position, both halves of the channels."""

    def __call__(
        self, fused_BTH: Tensor, tokens_BT: Tensor, positions_BT: Tensor, view: TreeView, cache: SlotCache, capacity: int
    ) -> Tensor:
        """Return the head's outputs of some entries; `capacity` bounds the positions."""
        head, shape, epsilon = self._head, self._head.shape, self._epsilon
        size = shape.hidden_size
        pair_BTX = fused_BTH.new_empty(*tokens_BT.shape, 2 * size)
        add_norm(fused_BTH, None, head.feature_norm.weight, epsilon, pair_BTX[..., :size])
        add_norm(functional.embedding(tokens_BT, head.tables[0]), None, head.token_norm.weight, epsilon, pair_BTX[..., size:])
        joined_BTH = head.join(pair_BTX)
        _, normed_BTH = add_norm(joined_BTH, None, head.attention_norm.weight, epsilon)
        projected_BTX = head.qkv(normed_BTH)
        key_BHSC, value_BHSC = cache.storage(0, projected_BTX, shape.num_key_heads, shape.head_size)
        cos_BTC, sin_BTC = functional.embedding(positions_BT, self._angles(capacity)).chunk(2, dim=-1)
        query_BHTC = rotate_store(projected_BTX, cos_BTC, sin_BTC, view.slots_BT, key_BHSC, value_BHSC)
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
        attended_BTH = head.attention_output(mixed_BHTC.transpose(1, 2).flatten(2))
        hidden_BTH, normed_BTH = add_norm(joined_BTH, attended_BTH, head.mlp_norm.weight, epsilon)
        down_BTH = head.down(gate(head.gate_up(normed_BTH)))
        return add_norm(hidden_BTH, down_BTH, head.output_norm.weight, epsilon)[1]

    def _angles(self, capacity: int) -> Tensor:
        if len(self._angles_PX) < capacity:
            channels, weight = self._head.shape.head_size, self._head.down.weight
            exponents_C = torch.arange(0, channels, 2, device=weight.device, dtype=torch.float32) / channels
            places_P1 = torch.arange(capacity, device=weight.device, dtype=torch.float32)[:, None]
            angles_PC = (places_P1 * self._head.shape.rope_theta**-exponents_C).repeat(1, 2)
            self._angles_PX = torch.cat([angles_PC.cos(), angles_PC.sin()], dim=1).to(weight.dtype)
        return self._angles_PX
