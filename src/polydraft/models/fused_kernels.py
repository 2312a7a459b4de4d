"""Triton kernels of a transformer layer: what stands between its matrix products, and the products of a single token.

See `polydraft.models.fused`.

Imported only where Triton is there. Every kernel reads and writes the model's number format and computes in float32.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    hidden, delta, weight, total, normed, epsilon, channels, normed_row,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to the residual stream and take the root-mean-square norm of the sum; grid [rows]."""
    row = tl.program_id(0).to(tl.int64)
    channel_C = tl.arange(0, BLOCK)
    real_C = channel_C < channels
    value_C = tl.load(hidden + row * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    if ADD:
        value_C += tl.load(delta + row * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
        # The norm is that of the sum as it is stored, rounded.
        stored_C = value_C.to(total.dtype.element_ty)
        tl.store(total + row * channels + channel_C, stored_C, mask=real_C)
        value_C = stored_C.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value_C * value_C, 0) / channels + epsilon)
    weight_C = tl.load(weight + channel_C, mask=real_C, other=0.0).to(tl.float32)
    tl.store(normed + row * normed_row + channel_C, (value_C * scale * weight_C).to(normed.dtype.element_ty), mask=real_C)


@triton.jit(do_not_specialize=["size"])  # it differs from tree to tree, and is no reason to compile anew
def rotate_store(
    projected, cos, sin, slots, query, keys, values, size, angle_row,
    key_row, key_head, key_slot, value_row, value_head, value_slot,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Turn queries and keys by their positions (RoPE), and put keys and values into their slots; grid [B · T].

    `projected` holds the heads of queries, keys and values of a token side by side.
    """
    token = tl.program_id(0).to(tl.int64)
    row = token // size
    slot = tl.load(slots + token)
    heads: tl.constexpr = QUERIES + 2 * KEYS
    head_H = tl.arange(0, BLOCK_HEADS)[:, None]
    channel_C = tl.arange(0, HALF)[None, :]
    real_HC = (head_H < heads) & (channel_C < CHANNELS // 2)
    source_HC = token * heads * CHANNELS + head_H * CHANNELS + channel_C
    first_HC = tl.load(projected + source_HC, mask=real_HC, other=0.0).to(tl.float32)
    second_HC = tl.load(projected + source_HC + CHANNELS // 2, mask=real_HC, other=0.0).to(tl.float32)
    angle_C = token * angle_row + channel_C
    real_C = channel_C < CHANNELS // 2
    cos1_C = tl.load(cos + angle_C, mask=real_C, other=1.0).to(tl.float32)
    cos2_C = tl.load(cos + angle_C + CHANNELS // 2, mask=real_C, other=1.0).to(tl.float32)
    sin1_C = tl.load(sin + angle_C, mask=real_C, other=0.0).to(tl.float32)
    sin2_C = tl.load(sin + angle_C + CHANNELS // 2, mask=real_C, other=0.0).to(tl.float32)
    turned1_HC = first_HC * cos1_C - second_HC * sin1_C
    turned2_HC = second_HC * cos2_C + first_HC * sin2_C
    form = query.dtype.element_ty
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
def gate(gate_up, output, channels, BLOCK: tl.constexpr):
    """Return SiLU of the first half times the second; grid [rows, blocks of channels]."""
    row = tl.program_id(0).to(tl.int64)
    channel_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_C = channel_C < channels
    gate_C = tl.load(gate_up + row * 2 * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    up_C = tl.load(gate_up + row * 2 * channels + channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    # Rounded in between, as two operations would do.
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
        # Weights come by once, the vector again and again: these must not drive it out of the caches.
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
