"""Which slots the tokens of a pass go to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.operations import operation
from polydraft.trees import Block


@dataclass(frozen=True, eq=False)
class Placed:
    """The tokens of a block, their positions and their slots."""

    tokens_BT: Tensor
    """Nodes without a token get some token that the model knows."""
    positions_BT: Tensor
    slots_BT: Tensor
    starts_BT: Tensor | None
    """First position that each token sees; None without a window."""


@operation
def place(
    tokens_BT: Tensor,
    block: Block,
    lengths_B: Tensor,
    slot_positions_BS: Tensor,
    max_positions: int | None,
    num_tokens: int | None,
    window: int | None,
) -> Placed:
    """Return which slots the tokens of a block go to, and write their positions into `slot_positions_BS`.

    Tokens past the position limit get the last position: the engine cuts off whatever text they lead to.
    """
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
