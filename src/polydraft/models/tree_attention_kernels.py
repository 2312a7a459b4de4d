"""Triton kernels of tree attention: keys in chunks, side by side, and their joining; see `polydraft.models.tree_attention`.

Imported only where Triton is there. Axes as in CONTRIBUTING; a *line* is one of the M = T · group pairs of a tree token and
a query head that share a key head, so that keys and values are read once for all of them.
"""

import triton
import triton.language as tl


@triton.jit
def _chunk(total, splits, BLOCK_KEYS: tl.constexpr):
    """Keys of one split: the real context shared out evenly, whatever the largest context of the launch is."""
    return tl.cdiv(tl.cdiv(total, splits), BLOCK_KEYS) * BLOCK_KEYS


@triton.jit
def _absorb(queries_MC, scores_mask, keys_NC, values_NC, peak_M, sum_M, mixed_MC, scale, PRECISION: tl.constexpr):
    """Take a block of keys into the running softmax, in base 2."""
    scores_MN = tl.dot(queries_MC, tl.trans(keys_NC), input_precision=PRECISION) * scale
    scores_MN = tl.where(scores_mask, scores_MN, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(scores_MN, 1))
    # A line that has seen nothing yet has the peak -inf; any finite one keeps its differences from being NaN.
    base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    weights_MN = tl.exp2(scores_MN - base_M[:, None])
    shrink_M = tl.exp2(peak_M - base_M)
    sum_M = sum_M * shrink_M + tl.sum(weights_MN, 1)
    mixed_MC = mixed_MC * shrink_M[:, None]
    mixed_MC += tl.dot(weights_MN.to(values_NC.dtype), values_NC, input_precision=PRECISION)
    return new_peak_M, sum_M, mixed_MC


# Triton compiles a kernel anew for whole numbers that are 1 or divisible by 16, and for addresses that are divisible by 16.
# What differs from tree to tree must not count: forests of beams would compile for seconds on end. A level's mask begins
# anywhere in its tree's, and sums anywhere behind peaks.
@triton.jit(do_not_specialize=["visible", "peaks", "sums", "size", "places", "splits", "visible_row", "visible_token"])
def attend(
    query, key, value, lengths, visible, starts, output, mixed, peaks, sums,
    scale, size, places, splits,
    query_row, query_head, query_token, key_row, key_head, key_slot, value_row, value_head, value_slot,
    visible_row, visible_token, visible_place, output_row, output_token, output_head,
    GROUP: tl.constexpr, CHANNELS: tl.constexpr, ALONE: tl.constexpr, PRECISION: tl.constexpr, CUT: tl.constexpr,
    BLOCK_LINES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Attend from one block of lines to one chunk of keys; grid [splits, key heads x blocks of lines, B].

    Writes the result itself with one split, else what `join` needs: weighted values, the peak and the sum of weights.
    """
    split, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    lines = size * GROUP
    blocks = tl.cdiv(lines, BLOCK_LINES)
    head = tl.program_id(1) // blocks
    length = tl.load(lengths + row).to(tl.int32)
    total = length + places
    chunk = _chunk(total, splits, BLOCK_KEYS)
    first = split * chunk
    stop = tl.minimum(first + chunk, total)
    if first >= stop:
        return

    line_M = (tl.program_id(1) % blocks) * BLOCK_LINES + tl.arange(0, BLOCK_LINES)
    token_M, query_head_M = line_M // GROUP, head * GROUP + line_M % GROUP
    real_M = line_M < lines
    channel_C, key_N = tl.arange(0, BLOCK_CHANNELS), tl.arange(0, BLOCK_KEYS)
    real_C = channel_C < CHANNELS
    wide_head = head.to(tl.int64)
    query += row * query_row
    key += row * key_row + wide_head * key_head
    value += row * value_row + wide_head * value_head
    visible += row * visible_row
    query_offsets_MC = query_head_M[:, None] * query_head + token_M[:, None] * query_token + channel_C[None, :]
    queries_MC = tl.load(query + query_offsets_MC, mask=real_M[:, None] & real_C[None, :], other=0.0)
    peak_M = tl.full([BLOCK_LINES], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_LINES], tl.float32)
    mixed_MC = tl.zeros([BLOCK_LINES, BLOCK_CHANNELS], tl.float32)

    # Committed text: every line sees every key, from the start of its window on.
    context_stop = tl.minimum(stop, length)
    start_M = tl.zeros([BLOCK_LINES], tl.int32)
    if CUT:
        start_M = tl.load(starts + row * size + token_M, mask=real_M, other=0).to(tl.int32)
    for start in range(first, context_stop, BLOCK_KEYS):
        slot_N = start + key_N
        real_N = slot_N < context_stop
        real_NC = real_N[:, None] & real_C[None, :]
        keys_NC = tl.load(key + slot_N[:, None] * key_slot + channel_C[None, :], mask=real_NC, other=0.0)
        values_NC = tl.load(value + slot_N[:, None] * value_slot + channel_C[None, :], mask=real_NC, other=0.0)
        seen_MN = real_N[None, :] & (slot_N[None, :] >= start_M[:, None])
        peak_M, sum_M, mixed_MC = _absorb(queries_MC, seen_MN, keys_NC, values_NC, peak_M, sum_M, mixed_MC, scale, PRECISION)

    # Uncommitted places: what the tree's mask lets a token see.
    for start in range(tl.maximum(first, length), stop, BLOCK_KEYS):
        slot_N = start + key_N
        real_N = slot_N < stop
        real_NC = real_N[:, None] & real_C[None, :]
        keys_NC = tl.load(key + slot_N[:, None] * key_slot + channel_C[None, :], mask=real_NC, other=0.0)
        values_NC = tl.load(value + slot_N[:, None] * value_slot + channel_C[None, :], mask=real_NC, other=0.0)
        visible_offsets_MN = token_M[:, None] * visible_token + (slot_N - length)[None, :] * visible_place
        visible_MN = tl.load(visible + visible_offsets_MN, mask=real_M[:, None] & real_N[None, :], other=0) != 0
        peak_M, sum_M, mixed_MC = _absorb(queries_MC, visible_MN, keys_NC, values_NC, peak_M, sum_M, mixed_MC, scale, PRECISION)

    if ALONE:
        result_MC = mixed_MC / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        output += row * output_row
        output_offsets_MC = token_M[:, None] * output_token + query_head_M[:, None] * output_head + channel_C[None, :]
        tl.store(output + output_offsets_MC, result_MC.to(output.dtype.element_ty), mask=real_M[:, None] & real_C[None, :])
    else:
        heads = tl.num_programs(1) // blocks
        part_M = ((row * heads + head) * splits + split) * lines + line_M
        tl.store(peaks + part_M, peak_M, mask=real_M)
        tl.store(sums + part_M, sum_M, mask=real_M)
        mixed_offsets_MC = part_M[:, None] * CHANNELS + channel_C[None, :]
        tl.store(mixed + mixed_offsets_MC, mixed_MC, mask=real_M[:, None] & real_C[None, :])


@triton.jit(do_not_specialize=["peaks", "sums", "lines", "places", "splits"])
def join(
    output, mixed, peaks, sums, lengths, lines, places, splits, output_row, output_token, output_head,
    GROUP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_LINES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Put the splits of `attend` together; grid [blocks of lines, key heads, B]."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    total = tl.load(lengths + row).to(tl.int32) + places
    used = tl.cdiv(total, _chunk(total, splits, BLOCK_KEYS))
    line_M = tl.program_id(0) * BLOCK_LINES + tl.arange(0, BLOCK_LINES)
    channel_C = tl.arange(0, BLOCK_CHANNELS)
    real_M = line_M < lines
    real_MC = real_M[:, None] & (channel_C < CHANNELS)[None, :]
    peak_M = tl.full([BLOCK_LINES], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_LINES], tl.float32)
    mixed_MC = tl.zeros([BLOCK_LINES, BLOCK_CHANNELS], tl.float32)
    first_part = (row * tl.num_programs(1) + head) * splits
    for split in range(used):
        part_M = (first_part + split) * lines + line_M
        part_peak_M = tl.load(peaks + part_M, mask=real_M, other=float("-inf"))
        part_sum_M = tl.load(sums + part_M, mask=real_M, other=0.0)
        part_MC = tl.load(mixed + part_M[:, None] * CHANNELS + channel_C[None, :], mask=real_MC, other=0.0)
        new_peak_M = tl.maximum(peak_M, part_peak_M)
        base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
        shrink_M, part_shrink_M = tl.exp2(peak_M - base_M), tl.exp2(part_peak_M - base_M)
        sum_M = sum_M * shrink_M + part_sum_M * part_shrink_M
        mixed_MC = mixed_MC * shrink_M[:, None] + part_MC * part_shrink_M[:, None]
        peak_M = new_peak_M
    result_MC = mixed_MC / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    output += row * output_row
    token_M, query_head_M = line_M // GROUP, head * GROUP + line_M % GROUP
    output_offsets_MC = token_M[:, None] * output_token + query_head_M[:, None] * output_head + channel_C[None, :]
    tl.store(output + output_offsets_MC, result_MC.to(output.dtype.element_ty), mask=real_MC)
