"""Where the tokens of a pass go in the memory of a batch: by one kernel on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run, side_by_side
from polydraft.trees import Block

_BLOCK = 64
"""Tokens of a row that one program places."""
_NO_LIMIT = 2**62


@dataclass(frozen=True, eq=False)
class Placed:
    """The tokens of a block in the memory of a batch."""

    tokens_BT: Tensor
    """Where no token was drawn, some token that the model has."""
    positions_BT: Tensor
    slots_BT: Tensor
    starts_BT: Tensor | None
    """First position that each token sees, where a window says so."""


def place(
    tokens_BT: Tensor,
    block: Block,
    lengths_B: Tensor,
    slot_positions_BS: Tensor,
    *,
    max_positions: int | None,
    num_tokens: int | None,
    window: int | None,
) -> Placed:
    """Return where the tokens of a block go, and put their positions down in `slot_positions_BS`.

    Tokens past the position limit can only lead to text past it, which the engine cuts off: they stay at the last position.
    """
    if not kernels_run(tokens_BT):
        positions_BT = lengths_B[:, None] + block.depths_BT
        if max_positions is not None:
            positions_BT = positions_BT.clamp(max=max_positions - 1)
        places_BT = block.places_BT
        if places_BT is None:
            places_BT = torch.arange(block.start, block.stop, device=lengths_B.device)
        slots_BT = lengths_B[:, None] + places_BT
        slot_positions_BS.scatter_(1, slots_BT, positions_BT)
        known_BT = tokens_BT.clamp(min=0, max=None if num_tokens is None else num_tokens - 1)
        return Placed(known_BT, positions_BT, slots_BT, None if window is None else (positions_BT - window + 1).clamp(min=0))
    from polydraft.backends.triton import slot_kernels as kernels

    batch_size, size = tokens_BT.shape
    tokens_BT, depths_BT = side_by_side(tokens_BT), side_by_side(block.depths_BT)
    places_BT = depths_BT if block.places_BT is None else side_by_side(block.places_BT.expand(batch_size, -1))
    placed_4BT = tokens_BT.new_empty(4, batch_size, size)
    kernels.place_tokens[batch_size, -(-size // _BLOCK)](
        tokens_BT, depths_BT, places_BT, lengths_B, slot_positions_BS, placed_4BT, size, block.start,
        (max_positions or _NO_LIMIT) - 1, (num_tokens or _NO_LIMIT) - 1, window or 0,
        tokens_BT.stride(0), depths_BT.stride(0), places_BT.stride(0), slot_positions_BS.stride(0), placed_4BT.stride(0),
        PLACES=block.places_BT is not None, CUT=window is not None, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
    known_BT, positions_BT, slots_BT, starts_BT = placed_4BT.unbind()
    return Placed(known_BT, positions_BT, slots_BT, None if window is None else starts_BT)
