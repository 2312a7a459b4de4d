"""Attention from the tokens of a tree to their text, which costs what the actual text costs, and nothing for masked slots.

`scaled_dot_product_attention` with a mask reads every slot it is given, repeats grouped heads, and needs a mask over the whole
context. Here the committed text needs no mask, its length is read on the device, and long texts are split over the
multiprocessors and joined by a second kernel [1]_. So a launch that is captured for a largest context costs only what the
current context costs.

References
----------
.. [1] Dao et al. 2023, Flash-Decoding for long-context inference (split keys). Deviation: the splits share the actual length,
   read in the kernel, evenly.
.. [2] Dao et al. 2022, FlashAttention, arXiv:2205.14135 (algorithm 1, the running softmax).
"""

import importlib.util
import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run, overlapping, power_of_two, triton_obstacle
from polydraft.devices import captures
from polydraft.models.attention import tree_attention
from polydraft.models.bodies import kernel_obstacle
from polydraft.operations import implements

_FORMATS = (torch.bfloat16, torch.float16, torch.float32)
MULTIPROCESSORS = 132
"""Of an H100 or H200; on other GPUs, tiles and splits are only slightly less fast."""
_MOST_SPLITS = 64
_SHORT_TEXT = 2048
_USUAL_CHANNELS = 128
"""Heads with more channels get fewer keys at a time, to fit into 99 KiB of shared memory (compute capability 8.6 and 8.9)."""


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """How the work is split; depends only on static sizes, so that a graph can keep it."""

    block_lines: int
    """Pairs of token and query head that one program works on."""
    block_keys: int
    splits: int
    """Programs that share the keys of a head."""
    warps: int
    stages: int


def _is_asked(device: torch.device, dtype: torch.dtype) -> bool:
    return captures(device) or kernels_run(torch.empty(0))


@implements(kernel_obstacle, "triton", supports=_is_asked)
def obstacle(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return why the kernels cannot run on a device in this dtype, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if dtype not in _FORMATS:
        return f"tree attention does not compute in {str(dtype).removeprefix('torch.')}"
    if captures(device):
        return triton_obstacle(device)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter multiplies the bits of bfloat16, not its numbers" if dtype == torch.bfloat16 else None
    return f"the device is {device}, not a GPU"


def attention_blocks(lines: int, channels: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many lines and keys a program takes at a time; float32 takes twice the shared memory."""
    most = 32 if dtype == torch.float32 else 64
    keys = most // 2 if channels > _USUAL_CHANNELS else most
    return min(max(power_of_two(lines), 16), most), keys


def plan_attention(batch_size: int, key_heads: int, lines: int, channels: int, keys: int, dtype: torch.dtype) -> AttentionPlan:
    """Choose sizes for `lines` = T · group lines over at most `keys` keys: as many programs as multiprocessors, no more splits.

    Each split writes sums that are read again, so over short texts fewer are faster (13.3 against 15.0 µs at 600 keys on an
    H200, 46 lines, 32 heads); over long ones, two programs per multiprocessor hide each other's latency.
    """
    block_lines, block_keys = attention_blocks(lines, channels, dtype)
    programs = batch_size * key_heads * math.ceil(lines / block_lines)
    # A few idle multiprocessors cost less than a second wave of a few programs.
    wanted = math.ceil(MULTIPROCESSORS / programs - 0.25 if keys <= _SHORT_TEXT else 2 * MULTIPROCESSORS / programs)
    splits = min(wanted, math.ceil(keys / (2 * block_keys)), _MOST_SPLITS)
    return AttentionPlan(block_lines=block_lines, block_keys=block_keys, splits=max(splits, 1), warps=4, stages=2)


def _supports(query_BHTC: Tensor, *_: object, **__: object) -> bool:
    return kernels_run(query_BHTC) and obstacle(query_BHTC.device, query_BHTC.dtype) is None


@implements(tree_attention, "triton", supports=_supports)
def attend_tree(
    query_BHTC: Tensor,
    key_BHSC: Tensor,
    value_BHSC: Tensor,
    lengths_B: Tensor,
    visible_BTU: Tensor,
    scale: float,
    max_length: int,
    starts_BT: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Do what `polydraft.models.attention.tree_attention` does, at the cost of the current text.

    Lengths are read in the kernel, so a captured launch follows them; `max_length` changes how the work is split, not its
    amount. Slots past `lengths_B + U` are not read. A token that sees nothing gets zeros. The result is laid out as
    `[B, T, H, C]`, so that the output projection's input is a view of it. `plan` replaces the sizes of `plan_attention`.
    """
    from polydraft.backends.triton import layer_kernels as kernels

    batch_size, query_heads, size, channels = query_BHTC.shape
    key_heads, places = key_BHSC.shape[1], visible_BTU.shape[2]
    assert query_heads % key_heads == 0, (query_heads, key_heads)
    assert visible_BTU.shape == (batch_size, size, places) and visible_BTU.dtype == torch.bool, visible_BTU.shape
    assert query_BHTC.stride(3) == key_BHSC.stride(3) == value_BHSC.stride(3) == 1, "channels must lie side by side"
    assert starts_BT is None or starts_BT.is_contiguous()
    assert lengths_B.is_contiguous() and max_length + places <= key_BHSC.shape[2], (max_length, places, key_BHSC.shape)
    group = query_heads // key_heads
    lines = size * group
    if plan is None:
        plan = plan_attention(batch_size, key_heads, lines, channels, max_length + places, query_BHTC.dtype)
    visible_BTU = visible_BTU.view(torch.uint8)
    output_BTHC = query_BHTC.new_empty(batch_size, size, query_heads, channels)
    parts = batch_size * key_heads * plan.splits * lines if plan.splits > 1 else 1
    mixed_XC = output_BTHC.new_empty(parts, channels, dtype=torch.float32)
    peaks_X, sums_X = output_BTHC.new_empty(2, parts, dtype=torch.float32)
    output_strides = output_BTHC.stride()[:3]
    sizes = overlapping(query_BHTC) | {"GROUP": group, "CHANNELS": channels, "BLOCK_KEYS": plan.block_keys}
    sizes["BLOCK_CHANNELS"] = max(power_of_two(channels), 16)  # the least that matrix units take
    kernels.attend[plan.splits, key_heads * math.ceil(lines / plan.block_lines), batch_size](
        query_BHTC, key_BHSC, value_BHSC, lengths_B, visible_BTU, lengths_B if starts_BT is None else starts_BT,
        output_BTHC, mixed_XC, peaks_X, sums_X, scale * math.log2(math.e), size, places, plan.splits,
        *query_BHTC.stride()[:3], *key_BHSC.stride()[:3], *value_BHSC.stride()[:3], *visible_BTU.stride(), *output_strides,
        **sizes, ALONE=plan.splits == 1, PRECISION="ieee", CUT=starts_BT is not None,
        BLOCK_LINES=plan.block_lines, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if plan.splits > 1:
        few = 8
        kernels.join[math.ceil(lines / few), key_heads, batch_size](
            output_BTHC, mixed_XC, peaks_X, sums_X, lengths_B, lines, places, plan.splits, *output_strides,
            **sizes, BLOCK_LINES=few, num_warps=4,
        )  # fmt: skip
    return output_BTHC.transpose(1, 2)
