"""Triton kernels for everything between a layer's matrix products, for the products of a single token, and for tree attention.

See `polydraft.backends.triton.layers` and `polydraft.backends.triton.attention`. Imported only if Triton is installed.

The kernels of a layer read and write the model's dtype and compute in float32.

Tree attention processes chunks of keys in parallel and joins them. Axes as in CONTRIBUTING; a *line* is one of the M = T ·
group pairs of a tree token and a query head that share a key head, so that keys and values are read once for all of them.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import let_next_start, wait_for_others


@triton.jit(do_not_specialize=["rows"])
def add_norm(
    hidden, delta, weight, total, normed, epsilon, rows, channels, normed_row,
    PDL: tl.constexpr, PARTS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of a product to the residual stream, and take the root-mean-square norm; grid [rows]."""
    wait_for_others(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel_C = tl.arange(0, BLOCK)
    real_C = channel_C < channels
    value_C = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        value_C += tl.load(hidden + row * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    if PARTS > 0:
        delta_C = tl.load(delta + row * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            place = (row + part * rows) * channels
            delta_C += tl.load(delta + place + channel_C, mask=real_C, other=0.0).to(tl.float32)
        # Rounded in between, like the result of a separate product.
        value_C += delta_C.to(total.dtype.element_ty).to(tl.float32)
        # The norm is of the stored, rounded sum.
        stored_C = value_C.to(total.dtype.element_ty)
        tl.store(total + row * channels + channel_C, stored_C, mask=real_C)
        value_C = stored_C.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value_C * value_C, 0) / channels + epsilon)
    weight_C = tl.load(weight + channel_C, mask=real_C, other=0.0).to(tl.float32)
    tl.store(normed + row * normed_row + channel_C, (value_C * scale * weight_C).to(normed.dtype.element_ty), mask=real_C)


@triton.jit
def _added(parts, place_HC, real_HC, stride, FORM: tl.constexpr, PARTS: tl.constexpr):
    """Add up the parts of a product, and round like the result of a separate product."""
    sum_HC = tl.load(parts + place_HC, mask=real_HC, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        sum_HC += tl.load(parts + part * stride + place_HC, mask=real_HC, other=0.0).to(tl.float32)
    return sum_HC.to(FORM).to(tl.float32)


# Not specialised, because numbers of tokens differ from tree to tree.
@triton.jit(do_not_specialize=["rows", "size", "tokens"])
def rotate_store(
    projected, cos, sin, positions, slots, rows, query, keys, values, size, tokens, angle_row,
    key_row, key_head, key_slot, value_row, value_head, value_slot,
    PDL: tl.constexpr, PARTS: tl.constexpr, LOOKED_UP: tl.constexpr, SOME: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys by their positions (RoPE), and store keys and values in their slots; grid [B · T].

    `projected` holds a token's heads of queries, keys and values one after the other, in parts to add up. With `SOME`, `rows`
    are the tokens' rows in the storage. With `LOOKED_UP`, `cos` and `sin` are tables by position.
    """
    wait_for_others(PDL)
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = token // size
    if SOME:
        row = tl.load(rows + row)
    slot = tl.load(slots + token)
    heads: tl.constexpr = QUERIES + 2 * KEYS
    head_H = tl.arange(0, BLOCK_HEADS)[:, None]
    channel_C = tl.arange(0, HALF)[None, :]
    real_HC = (head_H < heads) & (channel_C < CHANNELS // 2)
    source_HC = token * heads * CHANNELS + head_H * CHANNELS + channel_C
    form: tl.constexpr = query.dtype.element_ty
    stride = tokens.to(tl.int64) * heads * CHANNELS
    first_HC = _added(projected, source_HC, real_HC, stride, form, PARTS)
    second_HC = _added(projected, source_HC + CHANNELS // 2, real_HC, stride, form, PARTS)
    angle = token
    if LOOKED_UP:
        angle = tl.load(positions + token)
    angle_C = angle * angle_row + channel_C
    real_C = channel_C < CHANNELS // 2
    cos1_C = tl.load(cos + angle_C, mask=real_C, other=1.0).to(tl.float32)
    cos2_C = tl.load(cos + angle_C + CHANNELS // 2, mask=real_C, other=1.0).to(tl.float32)
    sin1_C = tl.load(sin + angle_C, mask=real_C, other=0.0).to(tl.float32)
    sin2_C = tl.load(sin + angle_C + CHANNELS // 2, mask=real_C, other=0.0).to(tl.float32)
    turned1_HC = first_HC * cos1_C - second_HC * sin1_C
    turned2_HC = second_HC * cos2_C + first_HC * sin2_C
    is_query_HC = real_HC & (head_H < QUERIES)
    query_HC = token * QUERIES * CHANNELS + head_H * CHANNELS + channel_C
    tl.store(query + query_HC, turned1_HC.to(form), mask=is_query_HC)
    tl.store(query + query_HC + CHANNELS // 2, turned2_HC.to(form), mask=is_query_HC)
    is_key_HC = real_HC & (head_H >= QUERIES) & (head_H < QUERIES + KEYS)
    key_HC = row * key_row + (head_H - QUERIES) * key_head + slot * key_slot + channel_C
    tl.store(keys + key_HC, turned1_HC.to(form), mask=is_key_HC)
    tl.store(keys + key_HC + CHANNELS // 2, turned2_HC.to(form), mask=is_key_HC)
    is_value_HC = real_HC & (head_H >= QUERIES + KEYS)
    value_HC = row * value_row + (head_H - QUERIES - KEYS) * value_head + slot * value_slot + channel_C
    tl.store(values + value_HC, first_HC.to(form), mask=is_value_HC)
    tl.store(values + value_HC + CHANNELS // 2, second_HC.to(form), mask=is_value_HC)


@triton.jit
def gate(gate_up, output, channels, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Return SiLU of the first half times the second; grid [rows, blocks of channels]."""
    wait_for_others(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_C = channel_C < channels
    gate_C = tl.load(gate_up + row * 2 * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    up_C = tl.load(gate_up + row * 2 * channels + channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    # Rounded in between, as two separate operations would.
    active_C = (gate_C / (1.0 + tl.exp(-gate_C))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * channels + channel_C, (active_C * up_C).to(output.dtype.element_ty), mask=real_C)


@triton.jit
def vector_product(vector, weight, bias, output, rows, channels, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply a weight matrix by one vector; grid [blocks of rows]."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_R = row_R < rows
    start_R1 = row_R.to(tl.int64)[:, None] * channels
    sums_RC = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, channels, BLOCK):
        channel_C = first + tl.arange(0, BLOCK)
        real_C = channel_C < channels
        # Weights are read once, the vector again and again, so weights must not evict it from the caches.
        weight_RC = tl.load(
            weight + start_R1 + channel_C[None, :], mask=real_R[:, None] & real_C[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        vector_C = tl.load(vector + channel_C, mask=real_C, other=0.0)
        sums_RC += weight_RC.to(tl.float32) * vector_C.to(tl.float32)[None, :]
    sum_R = tl.sum(sums_RC, 1)
    if BIAS:
        sum_R += tl.load(bias + row_R, mask=real_R, other=0.0).to(tl.float32)
    tl.store(output + row_R, sum_R.to(output.dtype.element_ty), mask=real_R)


@triton.jit
def _chunk(total, splits, BLOCK_KEYS: tl.constexpr):
    """Return the keys per split: the actual context in even shares, whatever the launch's largest context."""
    return tl.cdiv(tl.cdiv(total, splits), BLOCK_KEYS) * BLOCK_KEYS


@triton.jit
def _absorb(queries_MC, scores_mask, keys_NC, values_NC, peak_M, sum_M, mixed_MC, scale, PRECISION: tl.constexpr):
    """Take a block of keys into the running softmax, in base 2."""
    scores_MN = tl.dot(queries_MC, tl.trans(keys_NC), input_precision=PRECISION) * scale
    scores_MN = tl.where(scores_mask, scores_MN, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(scores_MN, 1))
    # The peak of a line that has seen nothing is -inf; a finite base keeps differences from being NaN.
    base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    weights_MN = tl.exp2(scores_MN - base_M[:, None])
    shrink_M = tl.exp2(peak_M - base_M)
    sum_M = sum_M * shrink_M + tl.sum(weights_MN, 1)
    mixed_MC = mixed_MC * shrink_M[:, None]
    mixed_MC += tl.dot(weights_MN.to(values_NC.dtype), values_NC, input_precision=PRECISION)
    return new_peak_M, sum_M, mixed_MC


# Triton compiles a kernel again for whole numbers that are 1 or divisible by 16, and for addresses that are divisible by 16.
# Arguments that differ from tree to tree must not be specialised, or forests of beams would compile for seconds on end. The
# alignment of addresses differs too: a level's mask begins anywhere in its tree's mask, sums anywhere after peaks, and the
# lengths of some rows anywhere among all lengths.
@triton.jit(
    do_not_specialize=[
        "lengths", "visible", "starts", "peaks", "sums", "size", "places", "splits", "visible_row", "visible_token"
    ]
)  # fmt: skip
def attend(
    query, key, value, lengths, visible, starts, output, mixed, peaks, sums,
    scale, size, places, splits,
    query_row, query_head, query_token, key_row, key_head, key_slot, value_row, value_head, value_slot,
    visible_row, visible_token, visible_place, output_row, output_token, output_head,
    PDL: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, ALONE: tl.constexpr, PRECISION: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK_LINES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Attend from one block of lines to one chunk of keys; grid [splits, key heads x blocks of lines, B].

    Writes the result if there is one split, else what `join` needs: weighted values, the peak and the sum of weights.
    """
    wait_for_others(PDL)
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

    # Committed text: every line sees every key from the start of its window on.
    context_stop = tl.minimum(stop, length)
    start_M = tl.zeros([BLOCK_LINES], tl.int32)
    if CUT:
        start_M = tl.load(starts + row * size + token_M, mask=real_M, other=0).to(tl.int32)
    for start in range(first, context_stop, BLOCK_KEYS):
        slot_N = start + key_N
        real_N = slot_N < context_stop
        real_NC = real_N[:, None] & real_C[None, :]
        keys_NC = tl.load(key + slot_N[:, None].to(tl.int64) * key_slot + channel_C[None, :], mask=real_NC, other=0.0)
        values_NC = tl.load(value + slot_N[:, None].to(tl.int64) * value_slot + channel_C[None, :], mask=real_NC, other=0.0)
        seen_MN = real_N[None, :] & (slot_N[None, :] >= start_M[:, None])
        peak_M, sum_M, mixed_MC = _absorb(queries_MC, seen_MN, keys_NC, values_NC, peak_M, sum_M, mixed_MC, scale, PRECISION)

    # Uncommitted places: a token sees what the tree's mask allows.
    for start in range(tl.maximum(first, length), stop, BLOCK_KEYS):
        slot_N = start + key_N
        real_N = slot_N < stop
        real_NC = real_N[:, None] & real_C[None, :]
        keys_NC = tl.load(key + slot_N[:, None].to(tl.int64) * key_slot + channel_C[None, :], mask=real_NC, other=0.0)
        values_NC = tl.load(value + slot_N[:, None].to(tl.int64) * value_slot + channel_C[None, :], mask=real_NC, other=0.0)
        visible_offsets_MN = token_M[:, None] * visible_token + (slot_N - length)[None, :] * visible_place
        visible_MN = tl.load(visible + visible_offsets_MN, mask=real_M[:, None] & real_N[None, :], other=0) != 0
        peak_M, sum_M, mixed_MC = _absorb(queries_MC, visible_MN, keys_NC, values_NC, peak_M, sum_M, mixed_MC, scale, PRECISION)

    let_next_start(PDL)
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


@triton.jit(do_not_specialize=["peaks", "sums", "lengths", "lines", "places", "splits"])
def join(
    output, mixed, peaks, sums, lengths, lines, places, splits, output_row, output_token, output_head,
    PDL: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_LINES: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Join the splits of `attend`; grid [blocks of lines, key heads, B]."""
    wait_for_others(PDL)
    let_next_start(PDL)
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
