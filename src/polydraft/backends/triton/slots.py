"""Where the tokens of a pass go in a batch's cache, and which of them are kept: one kernel each."""

from torch import Tensor

from polydraft.backends.triton import kernels_run, power_of_two, runs_on_tensors, side_by_side
from polydraft.models.block_slots import Placed, place
from polydraft.models.cache import SlotCache
from polydraft.models.storage import Storage, move_up
from polydraft.operations import implements
from polydraft.trees import Block

_BLOCK = 64
"""Tokens of a row that one program places."""
_NO_LIMIT = 2**62
_LEAST_PLACES, _MOST_PLACES = 8, 64
"""Shorter paths use the kernel compiled for the first; longer ones than the second would use up a program's registers."""


@implements(place, "triton", supports=runs_on_tensors)
def place_by_kernel(
    tokens_BT: Tensor,
    block: Block,
    lengths_B: Tensor,
    slot_positions_BS: Tensor,
    max_positions: int | None,
    num_tokens: int | None,
    window: int | None,
) -> Placed:
    """Place all tokens by one kernel."""
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


def _can_move(storage: Storage, lengths_B: Tensor, places_BD: Tensor, slot_positions_BS: Tensor) -> bool:
    held = type(storage) is SlotCache and storage.address != 0
    return held and places_BD.shape[1] <= _MOST_PLACES and kernels_run(places_BD)


@implements(move_up, "triton", supports=_can_move)
def move_up_by_kernel(storage: Storage, lengths_B: Tensor, places_BD: Tensor, slot_positions_BS: Tensor) -> None:
    """Move keys and values of all layers, and positions, by one kernel."""
    from polydraft.backends.triton import slot_kernels as kernels

    assert isinstance(storage, SlotCache)
    keys_LBHSC, values_LBHSC, count = storage.keys_LBHSC, storage.values_LBHSC, places_BD.shape[1]
    assert keys_LBHSC is not None and values_LBHSC is not None
    places_BD = side_by_side(places_BD)
    layers, rows, heads, _, channels = keys_LBHSC.shape
    kernels.move_slots[layers, rows, heads](
        keys_LBHSC, values_LBHSC, slot_positions_BS, lengths_B, places_BD, count, channels,
        places_BD.stride(0), slot_positions_BS.stride(0), *keys_LBHSC.stride()[:4], *values_LBHSC.stride()[:4],
        BLOCK_D=power_of_two(count, _LEAST_PLACES), BLOCK_C=power_of_two(channels), num_warps=4,
    )  # fmt: skip
