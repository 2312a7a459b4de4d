"""Trees behind ragged texts, for tests of tree attention on the CPU and on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.backends.triton.attention import AttentionPlan, attend_tree
from polydraft.models.attention import tree_attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of tree attention with random numbers in it."""

    lengths: tuple[int, ...]
    size: int
    earlier: int = 0
    """Uncommitted places before the block, as at a deeper level of a draft tree."""
    key_heads: int = 2
    group: int = 1
    channels: int = 64
    dtype: torch.dtype = torch.float32
    room: int = 37
    """Slots past everything, which hold garbage."""

    def build(self, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        batch_size, places = len(self.lengths), self.earlier + self.size
        slots = max(self.lengths) + places + self.room
        query_BTHC = torch.randn(batch_size, self.size, self.key_heads * self.group, self.channels, generator=generator)
        # Keys and values as a cache of three layers holds them: slices with room at their end.
        keys_LBHSC = torch.randn(3, batch_size, self.key_heads, slots, self.channels, generator=generator)
        values_LBHSC = torch.randn(3, batch_size, self.key_heads, slots, self.channels, generator=generator)
        for row, length in enumerate(self.lengths):
            keys_LBHSC[:, row, :, length + places :] = torch.nan
            values_LBHSC[:, row, :, length + places :] = torch.nan
        visible_BTU = torch.rand(batch_size, self.size, places, generator=generator) < 0.4
        own_T = torch.arange(self.size)
        visible_BTU[:, own_T, own_T + self.earlier] = True
        lengths_B = torch.tensor(self.lengths, device=device)
        query_BHTC = query_BTHC.to(device, self.dtype).transpose(1, 2)
        return (
            query_BHTC,
            keys_LBHSC.to(device, self.dtype)[1],
            values_LBHSC.to(device, self.dtype)[1],
            lengths_B,
            visible_BTU.to(device),
        )

    @property
    def tolerance(self) -> float:
        return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[self.dtype]


def largest_error(case: Case, device: str, max_length: int | None = None, plan: AttentionPlan | None = None) -> float:
    """Compare with masked attention in float32 over the same rounded numbers."""
    query_BHTC, key_BHSC, value_BHSC, lengths_B, visible_BTU = case.build(device)
    scale = case.channels**-0.5
    longest = max(case.lengths) if max_length is None else max_length
    got = attend_tree(query_BHTC, key_BHSC, value_BHSC, lengths_B, visible_BTU, scale, longest, plan=plan)
    assert got.dtype == case.dtype and got.shape == query_BHTC.shape
    assert got.transpose(1, 2).is_contiguous(), "the output projection should need no copy"
    exact = [tensor.float().nan_to_num(0.0) for tensor in (query_BHTC, key_BHSC, value_BHSC)]
    expected = tree_attention.reference(*exact, lengths_B, visible_BTU, scale, longest)
    return float((got.float() - expected).abs().max())


def by_blocks(key_BHSC: Tensor, value_BHSC: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as memory by blocks has them: slots follow each other with all that they hold."""
    batch_size, heads, slots, channels = key_BHSC.shape
    memory_BSL2HC = key_BHSC.new_full((batch_size, slots, 3, 2, heads, channels), torch.nan)
    for part, stored_BHSC in enumerate((key_BHSC, value_BHSC)):
        memory_BSL2HC[:, :, 1, part] = stored_BHSC.transpose(1, 2)
    key_BSHC, value_BSHC = memory_BSL2HC[:, :, 1].unbind(2)
    return key_BSHC.transpose(1, 2), value_BSHC.transpose(1, 2)
