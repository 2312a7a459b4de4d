"""Products and attention on a GPU that give a token the same bits alone, in a tree, in a batch, or in a prompt read in chunks.

A sum's bits depend on its order, and fast libraries choose the order by the number of rows. Here it is fixed:

- *Products.* Matrix units add sixteen channels at a time to a running sum. Whatever the tile that contains a token, and the
  instruction that its size calls for, an output's bits are the same (measured, and checked by the tests). So tiles may depend
  on the number of rows. Long sums over few outputs are cut into splits, to have enough programs. The cuts depend only on the
  weight's shape, and the parts are added in order, by the next kernel or by one program that goes through all of them.
- *Attention.* Keys are added in groups of sixteen by *position*, whatever slots they are in, and splits are ranges of
  positions. Committed text is in the order of positions, and its full groups are read once for all tokens of a tree; the rest
  of a token's path, from the first group that is not full, is gathered for that token alone. The running softmax uses whole
  numbers as bases, so rescaling is exact and tiles may have any size.

Norms, rotation and gates work on one row at a time anyway. float16 has too few exponents for whole-number bases.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polydraft.backends.triton import overlapping, power_of_two
from polydraft.backends.triton.attention import MULTIPROCESSORS, attention_blocks
from polydraft.devices import captures

FORMATS = (torch.bfloat16, torch.float32)
_SPLIT_CHANNELS, _MOST_SPLITS = 128, 4
"""The channels of a split are a multiple of the first; the second is the most splits for a weight with few outputs."""
_ENOUGH_OUTPUTS = 2**13
"""Outputs times splits that give enough programs."""
_ENOUGH_PROGRAMS = 99
"""With this many programs, three of four multiprocessors have work, and attention's blocks need not be smaller."""
_LARGE_WEIGHT = 2**23
"""Bytes of a weight from which tiles are chosen for bandwidth instead of latency."""
_FEW_CHANNELS = 2**11
"""With up to this many channels, programs of a large weight are short: smaller blocks then leave fewer multiprocessors idle."""
_SPLIT_KEYS, _TAIL = 256, 16
"""Positions of a split, and of a group: the channels that matrix units add at a time."""
_LEAST_ROOM = 99 * 2**10
"""Bytes of shared memory per program with compute capability 8.6 and 8.9."""


@dataclass(frozen=True)
class Tile:
    """What one program of a product works on; any tile gives the same bits, some are faster."""

    outputs: int
    rows: int
    channels: int
    stages: int
    warps: int


def splits_of(outputs: int, channels: int) -> int:
    """Return the number of splits of a weight's channels; it must depend on the shape alone, or bits would change."""
    most = _MOST_SPLITS if channels >= 2 * _MOST_SPLITS * _SPLIT_CHANNELS else 1
    return min(most, math.ceil(_ENOUGH_OUTPUTS / outputs))


def plan_product(rows: int, outputs: int, channels: int, dtype: torch.dtype, room: int = _LEAST_ROOM) -> Tile:
    """Choose a tile: the fastest on an H200, or close to it, among those tried for models of 135M, 1.5B and 7B weights.

    `room` limits its bytes of shared memory.
    """
    tile = _usual_tile(rows, outputs, channels, dtype)
    bytes_per_stage = (tile.outputs + tile.rows) * tile.channels * dtype.itemsize
    return dataclasses.replace(tile, stages=max(min(tile.stages, room // bytes_per_stage), 1))


def _usual_tile(rows: int, outputs: int, channels: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:  # no matrix units, and twice the memory
        return Tile(32, 16, 32, 2, 4) if rows <= 64 else Tile(64, 64, 32, 2, 8)
    if dtype == torch.int8:
        return Tile(64, 8, 256, 4, 4) if rows <= 8 else Tile(32, min(power_of_two(rows), 64), 128, 4, 2)
    splits = splits_of(outputs, channels)
    # Several programs on a multiprocessor hide each other's latency.
    crowded = outputs > 2 * 64 * MULTIPROCESSORS
    if rows > 192:
        return Tile(128, 128, 64, 4, 8) if splits > 1 else Tile(128, 256, 64, 3, 8) if crowded else Tile(128, 128, 64, 4, 4)
    if rows > 128:
        return Tile(64, 128, 64, 6, 4) if splits > 1 else Tile(128, 128, 64, 6, 8) if crowded else Tile(64, 128, 64, 3, 4)
    large = outputs * channels * dtype.itemsize >= _LARGE_WEIGHT
    if rows > 64 and large:
        return Tile(128, 64, 128, 4, 4) if splits > 1 else Tile(64, 128, 64, 3, 4) if crowded else Tile(128, 128, 64, 6, 8)
    if rows > 64:
        return Tile(64, 64, 128, 3, 4) if splits > 1 else Tile(64, 128, 64, 3 if crowded else 4, 4)
    width = max(power_of_two(rows), 8)
    if splits > 1:
        return Tile(64, width, 128, 6 if width < 32 and outputs >= _ENOUGH_OUTPUTS // 2 else 4, 4)
    if not large or channels % 128:
        return Tile(32, width, 128, 4, 2) if width == 8 and not crowded else Tile(64, width, 64, 6, 4)
    if crowded and channels <= _FEW_CHANNELS:
        return Tile(64, width, 128, 4, 2) if width == 8 else Tile(64, width, 64, 4, 4)
    if width == 64:
        return Tile(128, width, 64, 4, 4) if crowded else Tile(64, width, 128, 3, 4)
    return Tile(64, width, 128, 3 if crowded and width < 32 else 4, 4)


@cache
def shared_room(device: torch.device) -> int:
    """Return the bytes of shared memory per program."""
    if captures(device) and torch.cuda.get_device_capability(device) >= (9, 0):
        return 227 * 2**10
    return _LEAST_ROOM


def invariant_linear(input_BTX: Tensor, weight_FX: Tensor, bias_F: Tensor | None) -> Tensor:
    """Do what `torch.nn.functional.linear` does, with bits that depend on each row alone."""
    return invariant_parts(input_BTX, weight_FX, bias_F, most_apart=0)[0]


def invariant_parts(
    input_BTX: Tensor,
    weight_FX: Tensor,
    bias_F: Tensor | None,
    most_apart: int = 128,
    tile: Tile | None = None,
    scales_F: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a product as parts, which the caller must add in order, in float32, and then round.

    A single part is the product itself, in `dtype` or the input's dtype; more than `most_apart` rows always give a single part.
    A weight in int8 needs scales.
    """
    from polydraft.backends.triton import invariant_kernels as kernels

    (outputs, channels), rows = weight_FX.shape, input_BTX.numel() // input_BTX.shape[-1]
    input_BTX = input_BTX.contiguous()
    assert input_BTX.shape[-1] == channels and weight_FX.is_contiguous()
    assert weight_FX.dtype == (input_BTX.dtype if scales_F is None else torch.int8)
    tile = tile or plan_product(rows, outputs, channels, weight_FX.dtype, shared_room(input_BTX.device))
    splits = splits_of(outputs, channels)
    width = math.ceil(math.ceil(channels / splits) / _SPLIT_CHANNELS) * _SPLIT_CHANNELS
    splits = math.ceil(channels / width)
    apart = splits > 1 and rows <= most_apart
    form = torch.float32 if apart else dtype or input_BTX.dtype
    output_SBTF = input_BTX.new_empty(splits if apart else 1, *input_BTX.shape[:-1], outputs, dtype=form)
    grid = math.ceil(rows / tile.rows), math.ceil(outputs / tile.outputs), splits if apart else 1
    kernels.invariant_product[grid](
        input_BTX, weight_FX, weight_FX if bias_F is None else bias_F, weight_FX if scales_F is None else scales_F,
        output_SBTF, rows, outputs, channels, width,
        **overlapping(input_BTX), SPLITS=splits, APART=apart, BIAS=bias_F is not None, SCALED=scales_F is not None,
        EVEN=channels % tile.channels == 0, PRECISION="ieee",
        BLOCK_OUTPUTS=tile.outputs, BLOCK_ROWS=tile.rows, BLOCK_CHANNELS=tile.channels,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return output_SBTF


@dataclass(frozen=True, eq=False)
class Sight:
    """What the tokens of a block see of committed text and of each other."""

    lengths_B: Tensor
    """Committed tokens per row."""
    max_length: int
    """Most committed tokens of any row, in any replay."""
    starts_BT: Tensor | None = None
    """First position that each token sees; None for all positions."""
    positions_BT: Tensor | None = None
    tails_BTX: Tensor | None = None
    """For trees: the slots that each token sees, by position, from the last multiple of `TAIL` in committed text up to its own
    position; -1 where it sees none. None for causal blocks, where each token sees all earlier ones."""
    rows_B: Tensor | None = None
    """For causal blocks: the tokens' rows in the storage; None for all rows in order."""


def sight_of(
    lengths_B: Tensor,
    max_length: int,
    starts_BT: Tensor | None,
    positions_BT: Tensor,
    visible_BTU: Tensor,
    slot_positions_BS: Tensor,
) -> Sight:
    """Return what the tokens of a tree see, from the tree's mask."""
    from polydraft.backends.triton import invariant_kernels as kernels

    batch_size, size, places = visible_BTU.shape
    assert positions_BT.is_contiguous() and slot_positions_BS.is_contiguous()
    assert starts_BT is None or starts_BT.is_contiguous()
    width, block = math.ceil((_TAIL - 1 + places) / _TAIL) * _TAIL, power_of_two(places)
    tails_BTX = torch.empty(batch_size, size, width, dtype=torch.int32, device=lengths_B.device)
    kernels.list_tails[size, batch_size](
        visible_BTU.view(torch.uint8), lengths_B, lengths_B if starts_BT is None else starts_BT, positions_BT,
        slot_positions_BS, tails_BTX, size, places, slot_positions_BS.shape[1], width, *visible_BTU.stride(),
        CUT=starts_BT is not None, TAIL=_TAIL, BLOCK=block, BLOCK_WIDTH=2 * max(block, _TAIL), num_warps=1,
    )  # fmt: skip
    return Sight(lengths_B, max_length, starts_BT, positions_BT, tails_BTX)


@dataclass(frozen=True)
class AttendPlan:
    """What one program that reads committed text works on; any plan gives the same bits, some are faster."""

    lines: int
    keys: int
    at_once: bool
    """Whether one program goes through all splits, and writes one part instead of one per split."""
    warps: int = 4
    stages: int = 2


def plan_attend(
    batch_size: int, key_heads: int, lines: int, splits: int, channels: int, dtype: torch.dtype, room: int
) -> AttendPlan:
    """Choose sizes for `lines` = T · group lines over at most `splits` splits: one program per multiprocessor, if possible.

    Parts are written and read again, so there are none if there are enough programs without splits. If there are too few even
    with splits, blocks have fewer lines: they read the same keys more often, from the caches, but keep more multiprocessors
    busy. The smallest blocks mostly wait for keys, and load more of them at a time (`benchmarks/gpu_tiles.py --attention`).

    Parameters
    ----------
    room : int
        Bytes of shared memory per program.
    """
    block_lines, block_keys = attention_blocks(lines, channels, dtype)
    heads = batch_size * key_heads
    if heads * math.ceil(lines / block_lines) >= MULTIPROCESSORS:
        return AttendPlan(block_lines, block_keys, at_once=True)
    while block_lines > 16 and heads * splits * math.ceil(lines / block_lines) < _ENOUGH_PROGRAMS:
        block_lines //= 2
    plans = [] if dtype == torch.float32 else [AttendPlan(block_lines, block_keys, at_once=False, stages=3)]
    if plans and block_lines == 16:
        plans.insert(0, dataclasses.replace(plans[0], keys=2 * block_keys))
    for plan in plans:
        # Shared memory holds the queries, and the keys and values of the next stages.
        held = 2 * plan.keys * (plan.stages - 1) + block_lines
        if held * power_of_two(channels) * dtype.itemsize <= room:
            return plan
    return AttendPlan(block_lines, block_keys, at_once=False)


def invariant_attention(
    query_BHTC: Tensor, key_BHSC: Tensor, value_BHSC: Tensor, sight: Sight, scale: float, plan: AttendPlan | None = None
) -> Tensor:
    """Do what `polydraft.models.attention.tree_attention` does, with bits that depend on each token's path alone."""
    from polydraft.backends.triton import invariant_kernels as kernels

    batch_size, query_heads, size, channels = query_BHTC.shape
    key_heads, causal = key_BHSC.shape[1], sight.tails_BTX is None
    group = query_heads // key_heads
    assert query_heads % key_heads == 0 and query_BHTC.stride(3) == key_BHSC.stride(3) == value_BHSC.stride(3) == 1
    assert causal or sight.rows_B is None
    lines = size * group
    splits = max(math.ceil((sight.max_length + (size if causal else 0)) / _SPLIT_KEYS), 1)
    plan = plan or plan_attend(batch_size, key_heads, lines, splits, channels, query_BHTC.dtype, shared_room(query_BHTC.device))
    at_once, blocks = plan.at_once or (causal and splits == 1), math.ceil(lines / plan.lines)
    parts = 2 if at_once else splits
    output_BTHC = query_BHTC.new_empty(batch_size, size, query_heads, channels)
    count = 1 if at_once and causal else batch_size * key_heads * parts * lines
    mixed_XC = output_BTHC.new_empty(count, channels, dtype=torch.float32)
    bases_X, sums_X = output_BTHC.new_empty(2, count, dtype=torch.float32)
    starts = sight.lengths_B if sight.starts_BT is None else sight.starts_BT
    sizes: dict[str, Any] = {
        **overlapping(query_BHTC),
        "GROUP": group, "CHANNELS": channels, "CAUSAL": causal, "AT_ONCE": at_once, "PRECISION": "ieee",
        "BLOCK_CHANNELS": max(power_of_two(channels), 16), "SPLIT": _SPLIT_KEYS, "TAIL": _TAIL,
        # A product fused with a difference would be rounded differently, and not in all kernels alike.
        "enable_fp_fusion": False,
    }  # fmt: skip
    strides = *query_BHTC.stride()[:3], *key_BHSC.stride()[:3], *value_BHSC.stride()[:3], *output_BTHC.stride()[:3]
    scale *= math.log2(math.e)
    kernels.invariant_attend[1 if at_once else splits, key_heads * blocks, batch_size](
        query_BHTC, key_BHSC, value_BHSC, sight.lengths_B, starts, sight.lengths_B if sight.rows_B is None else sight.rows_B,
        output_BTHC, mixed_XC, bases_X, sums_X, scale, size, splits, parts, *strides, **sizes, SOME=sight.rows_B is not None,
        CUT=sight.starts_BT is not None, BLOCK_LINES=plan.lines, BLOCK_KEYS=plan.keys,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if not (at_once and causal):
        tails = sight.lengths_B if sight.tails_BTX is None else sight.tails_BTX
        positions = sight.lengths_B if sight.positions_BT is None else sight.positions_BT
        repeat = max(8 // power_of_two(group), 1)
        kernels.invariant_join[size, key_heads, batch_size](
            query_BHTC, key_BHSC, value_BHSC, sight.lengths_B, positions, tails, output_BTHC, mixed_XC, bases_X, sums_X,
            scale, size, tails.shape[-1], parts, *strides, **sizes, LINES=power_of_two(group), REPEAT=repeat, num_warps=1,
        )  # fmt: skip
    return output_BTHC.transpose(1, 2)
