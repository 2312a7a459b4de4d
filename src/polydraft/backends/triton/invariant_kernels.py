"""Triton kernels whose sums have a fixed order: a token's bits do not depend on what is computed beside it.

`polydraft.backends.triton.invariant` explains why. Imported only if Triton is installed. Axes and *lines* as in
`polydraft.backends.triton.layer_kernels`; M counts outputs or lines, N rows or keys, and a *part* is the sum over one split.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import let_next_start, wait_for_others

_UNSEEN = tl.constexpr(-1e30)
"""The base of a line that has seen nothing: finite, so that differences are not NaN, and far below all scores."""


# The number of rows differs from tree to tree; and if it were specialised for 1, a single row would be read in another layout.
@triton.jit(do_not_specialize=["rows"])
def invariant_product(
    inputs, weight, bias, scales, output, rows, outputs, channels, width,
    PDL: tl.constexpr, SPLITS: tl.constexpr, APART: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Multiply rows by a weight, `width` channels per split; grid [blocks of rows, blocks of outputs, splits if apart].

    If splits are apart, each is a program of its own, and the next kernel adds up the parts; else one program does.
    A weight in int8 has a scale per row.
    """
    wait_for_others(PDL)
    output_M = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row_N = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # Outputs past the end read the last one again, which is cheaper than a mask, and are not stored. Rows past the end are
    # masked: with a single row, all programs would read the same few lines again and again, for 6 % of the time.
    weight_M1 = weight + tl.minimum(output_M, outputs - 1).to(tl.int64)[:, None] * channels
    inputs_N1 = inputs + row_N.to(tl.int64)[:, None] * channels
    real_N1 = (row_N < rows)[:, None]
    steps, steps_per_split = tl.cdiv(channels, BLOCK_CHANNELS), width // BLOCK_CHANNELS
    first, stop = 0, steps
    if APART:
        first = tl.program_id(2) * steps_per_split
        stop = tl.minimum(first + steps_per_split, steps)
    part_MN = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    total_MN = part_MN
    if BIAS:
        bias_M = tl.load(bias + tl.minimum(output_M, outputs - 1)).to(tl.float32)
        if APART:
            bias_M = tl.where(tl.program_id(2) == 0, bias_M, 0.0)
        total_MN += bias_M[:, None]
    for step in range(first, stop):
        channel_K = step * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        # Weights are read once, inputs again and again, so weights must not evict inputs from the caches.
        if EVEN:
            weight_MK = tl.load(weight_M1 + channel_K[None, :], eviction_policy="evict_first")
            inputs_NK = tl.load(inputs_N1 + channel_K[None, :], mask=real_N1, other=0.0)
        else:
            real_1K = (channel_K < channels)[None, :]
            weight_MK = tl.load(weight_M1 + channel_K[None, :], mask=real_1K, other=0.0, eviction_policy="evict_first")
            inputs_NK = tl.load(inputs_N1 + channel_K[None, :], mask=real_N1 & real_1K, other=0.0)
        if SCALED:
            weight_MK = weight_MK.to(inputs.dtype.element_ty)
        part_MN = tl.dot(weight_MK, tl.trans(inputs_NK), part_MN, input_precision=PRECISION)
        if SPLITS > 1 and not APART:  # noqa: SIM102 - a compile-time condition, unlike the next one
            if (step + 1) % steps_per_split == 0 or step + 1 == steps:
                if SCALED:
                    part_MN *= tl.load(scales + tl.minimum(output_M, outputs - 1))[:, None]
                total_MN += part_MN
                part_MN = tl.zeros_like(part_MN)
    let_next_start(PDL)
    if SPLITS == 1 or APART:
        if SCALED:
            part_MN *= tl.load(scales + tl.minimum(output_M, outputs - 1))[:, None]
        total_MN += part_MN
    place_N = row_N.to(tl.int64)
    if APART:
        place_N += tl.program_id(2).to(tl.int64) * rows
    place_NM = place_N[:, None] * outputs + output_M[None, :]
    real_NM = (row_N < rows)[:, None] & (output_M < outputs)[None, :]
    tl.store(output + place_NM, tl.trans(total_MN).to(output.dtype.element_ty), mask=real_NM)


@triton.jit
def _power(exponent):
    """Return 2 to a whole number from -126 to 0, exactly, and 0 below; lines that have seen nothing may have larger numbers."""
    return ((tl.minimum(tl.maximum(exponent, -127.0), 0.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _absorb_steadily(queries_MC, seen_MN, keys_NC, values_NC, base_M, sum_MX, mixed_MC, scale, PRECISION: tl.constexpr):
    """Take a block of keys into the running softmax, in base 2, with whole numbers as bases.

    Raising a base multiplies the sums by a power of two, which is exact, so it does not matter when that happens. Weights are
    summed by a product with ones, because that has a product's order, whatever the layout of the block.
    """
    scores_MN = tl.dot(queries_MC, tl.trans(keys_NC), input_precision=PRECISION) * scale
    whole_MN = tl.floor(scores_MN)
    new_base_M = tl.maximum(base_M, tl.max(tl.where(seen_MN, whole_MN, _UNSEEN), 1))
    weights_MN = tl.where(seen_MN, tl.exp2(scores_MN - whole_MN) * _power(whole_MN - new_base_M[:, None]), 0.0)
    weights_MN = weights_MN.to(values_NC.dtype)
    shrink_M1 = _power(base_M - new_base_M)[:, None]
    ones_NX = tl.full((keys_NC.shape[0], sum_MX.shape[1]), 1.0, values_NC.dtype)
    sum_MX = tl.dot(weights_MN, ones_NX, sum_MX * shrink_M1, input_precision=PRECISION)
    mixed_MC = tl.dot(weights_MN, values_NC, mixed_MC * shrink_M1, input_precision=PRECISION)
    return new_base_M, sum_MX, mixed_MC


@triton.jit
def _fold(base_M, sum_M, mixed_MC, part_base_M, part_sum_M, part_MC):
    """Add a part to the total of those before it."""
    new_base_M = tl.maximum(base_M, part_base_M)
    shrink_M, part_shrink_M = _power(base_M - new_base_M), _power(part_base_M - new_base_M)
    sum_M = sum_M * shrink_M + part_sum_M * part_shrink_M
    mixed_MC = mixed_MC * shrink_M[:, None] + part_MC * part_shrink_M[:, None]
    return new_base_M, sum_M, mixed_MC


# As for `polydraft.backends.triton.layer_kernels.attend`: arguments that differ from tree to tree are not specialised.
@triton.jit(do_not_specialize=["lengths", "starts", "rows", "bases", "sums", "size", "splits", "parts"])
def invariant_attend(
    query, key, value, lengths, starts, rows, output, mixed, bases, sums, scale, size, splits, parts,
    query_row, query_head, query_token, key_row, key_head, key_slot, value_row, value_head, value_slot,
    output_row, output_token, output_head,
    PDL: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr, AT_ONCE: tl.constexpr,
    CUT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_LINES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Attend from one block of lines to slots in the order of positions; grid [splits, key heads x blocks, B].

    In a causal block these are all that a line sees; in a tree, committed text up to the last multiple of `TAIL`. With
    `AT_ONCE`, one program goes through all splits: a causal block is then done; for a tree, part 0 is the total, and part 1 the
    last, unfinished split. With `SOME`, `rows` are the queries' rows in the storage.
    """
    wait_for_others(PDL)
    row = tl.program_id(2).to(tl.int64)
    lines = size * GROUP
    blocks = tl.cdiv(lines, BLOCK_LINES)
    head = tl.program_id(1) // blocks
    length = tl.load(lengths + row).to(tl.int32)
    line_M = (tl.program_id(1) % blocks) * BLOCK_LINES + tl.arange(0, BLOCK_LINES)
    token_M, query_head_M = line_M // GROUP, head * GROUP + line_M % GROUP
    real_M = line_M < lines
    last_M = length + token_M
    stop = length // TAIL * TAIL
    if CAUSAL:
        stop = length + tl.minimum(tl.max(token_M, 0) + 1, size)
    first_split, stop_split = tl.program_id(0), tl.program_id(0) + 1
    if AT_ONCE:
        first_split, stop_split = 0, tl.cdiv(stop, SPLIT)
    elif first_split * SPLIT >= stop:
        return

    channel_C, key_N = tl.arange(0, BLOCK_CHANNELS), tl.arange(0, BLOCK_KEYS)
    real_C = channel_C < CHANNELS
    wide_head = head.to(tl.int64)
    stored = row
    if SOME:
        stored = tl.load(rows + row)
    key += stored * key_row + wide_head * key_head
    value += stored * value_row + wide_head * value_head
    query_MC = row * query_row + query_head_M[:, None] * query_head + token_M[:, None] * query_token + channel_C[None, :]
    queries_MC = tl.load(query + query_MC, mask=real_M[:, None] & real_C[None, :], other=0.0)
    start_M = tl.zeros([BLOCK_LINES], tl.int32)
    if CUT:
        start_M = tl.load(starts + row * size + token_M, mask=real_M, other=0).to(tl.int32)
    base_M = tl.full([BLOCK_LINES], _UNSEEN, tl.float32)
    sum_MX = tl.zeros([BLOCK_LINES, 16], tl.float32)
    mixed_MC = tl.zeros([BLOCK_LINES, BLOCK_CHANNELS], tl.float32)
    total_base_M, total_sum_M, total_MC = base_M, tl.zeros([BLOCK_LINES], tl.float32), mixed_MC
    for split in range(first_split, stop_split):
        if AT_ONCE:
            total_base_M, total_sum_M, total_MC = _fold(
                total_base_M, total_sum_M, total_MC, base_M, tl.max(sum_MX, 1), mixed_MC
            )
            base_M = tl.full([BLOCK_LINES], _UNSEEN, tl.float32)
            sum_MX, mixed_MC = tl.zeros_like(sum_MX), tl.zeros_like(mixed_MC)
        for first in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, stop), BLOCK_KEYS):
            slot_N = first + key_N
            real_N = slot_N < stop
            real_NC = real_N[:, None] & real_C[None, :]
            keys_NC = tl.load(key + slot_N[:, None].to(tl.int64) * key_slot + channel_C[None, :], mask=real_NC, other=0.0)
            values_NC = tl.load(value + slot_N[:, None].to(tl.int64) * value_slot + channel_C[None, :], mask=real_NC, other=0.0)
            seen_MN = real_N[None, :] & (slot_N[None, :] >= start_M[:, None])
            if CAUSAL:
                seen_MN &= slot_N[None, :] <= last_M[:, None]
            base_M, sum_MX, mixed_MC = _absorb_steadily(
                queries_MC, seen_MN, keys_NC, values_NC, base_M, sum_MX, mixed_MC, scale, PRECISION
            )

    let_next_start(PDL)
    real_MC = real_M[:, None] & real_C[None, :]
    sum_M = tl.max(sum_MX, 1)
    if AT_ONCE and CAUSAL:
        base_M, sum_M, mixed_MC = _fold(total_base_M, total_sum_M, total_MC, base_M, sum_M, mixed_MC)
        output_MC = token_M[:, None] * output_token + query_head_M[:, None] * output_head + channel_C[None, :]
        result_MC = mixed_MC / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        tl.store(output + row * output_row + output_MC, result_MC.to(output.dtype.element_ty), mask=real_MC)
    else:
        part_M = (row * (tl.num_programs(1) // blocks) + head) * parts * lines + line_M
        if AT_ONCE:
            # The tail continues an unfinished split; a finished one belongs to the total.
            if stop % SPLIT == 0:
                total_base_M, total_sum_M, total_MC = _fold(total_base_M, total_sum_M, total_MC, base_M, sum_M, mixed_MC)
            tl.store(bases + part_M, total_base_M, mask=real_M)
            tl.store(sums + part_M, total_sum_M, mask=real_M)
            tl.store(mixed + part_M[:, None] * CHANNELS + channel_C[None, :], total_MC, mask=real_MC)
            part_M += lines
        else:
            part_M += tl.program_id(0) * lines
        tl.store(bases + part_M, base_M, mask=real_M)
        tl.store(sums + part_M, sum_M, mask=real_M)
        tl.store(mixed + part_M[:, None] * CHANNELS + channel_C[None, :], mixed_MC, mask=real_MC)


@triton.jit
def _repeated_M(values_L, REPEAT: tl.constexpr):
    lines: tl.constexpr = values_L.shape[0]
    return tl.reshape(tl.broadcast_to(values_L[:, None], (lines, REPEAT)), (lines * REPEAT,))


@triton.jit
def _repeated_CM(values_LC, REPEAT: tl.constexpr):
    lines: tl.constexpr = values_LC.shape[0]
    channels: tl.constexpr = values_LC.shape[1]
    return tl.reshape(tl.broadcast_to(tl.trans(values_LC)[:, :, None], (channels, lines, REPEAT)), (channels, lines * REPEAT))


@triton.jit
def _once_L(values_M, REPEAT: tl.constexpr):
    """Undo `_repeated_M`: the largest of equal numbers is any of them, to the bit."""
    lines: tl.constexpr = values_M.shape[0] // REPEAT
    return tl.max(tl.reshape(values_M, (lines, REPEAT)), 1)


@triton.jit
def _once_LC(values_CM, REPEAT: tl.constexpr):
    channels: tl.constexpr = values_CM.shape[0]
    lines: tl.constexpr = values_CM.shape[1] // REPEAT
    return tl.trans(tl.max(tl.reshape(values_CM, (channels, lines, REPEAT)), 2))


@triton.jit
def _gather(slots, key, value, channel_C, key_slot, value_slot, CHANNELS: tl.constexpr, TAIL: tl.constexpr):
    """Load keys and values of one group of a token's tail, and say which of them the token sees."""
    slot_N = tl.load(slots + tl.arange(0, TAIL))
    seen_N = slot_N >= 0
    real_NC = seen_N[:, None] & (channel_C < CHANNELS)[None, :]
    keys_NC = tl.load(key + slot_N[:, None].to(tl.int64) * key_slot + channel_C[None, :], mask=real_NC, other=0.0)
    values_NC = tl.load(value + slot_N[:, None].to(tl.int64) * value_slot + channel_C[None, :], mask=real_NC, other=0.0)
    return keys_NC, values_NC, seen_N


@triton.jit
def _absorb_group(queries_MC, seen_N, keys_NC, values_NC, base_M, sum_XM, mixed_CM, scale, PRECISION: tl.constexpr):
    """Do what `_absorb_steadily` does with lines as columns: matrix units take as few as eight columns, but sixteen rows."""
    scores_NM = tl.dot(keys_NC, tl.trans(queries_MC), input_precision=PRECISION) * scale
    whole_NM = tl.floor(scores_NM)
    new_base_M = tl.maximum(base_M, tl.max(tl.where(seen_N[:, None], whole_NM, _UNSEEN), 0))
    weights_NM = tl.where(seen_N[:, None], tl.exp2(scores_NM - whole_NM) * _power(whole_NM - new_base_M[None, :]), 0.0)
    weights_NM = weights_NM.to(values_NC.dtype)
    shrink_1M = _power(base_M - new_base_M)[None, :]
    ones_XN = tl.full((sum_XM.shape[0], keys_NC.shape[0]), 1.0, values_NC.dtype)
    sum_XM = tl.dot(ones_XN, weights_NM, sum_XM * shrink_1M, input_precision=PRECISION)
    mixed_CM = tl.dot(tl.trans(values_NC), weights_NM, mixed_CM * shrink_1M, input_precision=PRECISION)
    return new_base_M, sum_XM, mixed_CM


@triton.jit(do_not_specialize=["lengths", "positions", "bases", "sums", "slots", "size", "width", "parts"])
def invariant_join(
    query, key, value, lengths, positions, slots, output, mixed, bases, sums, scale, size, width, parts,
    query_row, query_head, query_token, key_row, key_head, key_slot, value_row, value_head, value_slot,
    output_row, output_token, output_head,
    PDL: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, CAUSAL: tl.constexpr, AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr, LINES: tl.constexpr, REPEAT: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    SPLIT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one token and, in a tree, attend to the rest of its path, by position; grid [T, key heads, B].

    Matrix units take eight columns, so each of a token's `LINES` lines is repeated `REPEAT` times. Totals have each line once,
    because the number of registers limits how many programs can hide each other's latency.
    """
    wait_for_others(PDL)
    let_next_start(PDL)
    token, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    member_L, channel_C = tl.arange(0, LINES), tl.arange(0, BLOCK_CHANNELS)
    real_L, real_C = member_L < GROUP, channel_C < CHANNELS
    real_LC = real_L[:, None] & real_C[None, :]
    lines = size * GROUP
    first_part_L = (row * tl.num_programs(1) + head) * parts * lines + token * GROUP + member_L
    # Number of complete parts, and where the tail begins.
    done, limit = tl.cdiv(length + token + 1, SPLIT), 0
    if not CAUSAL:
        limit = length // TAIL * TAIL
        done = limit // SPLIT
    if AT_ONCE:
        done = parts - 1  # 1, but not as a constant: see the loop over parts
    if not CAUSAL:
        # Loaded early, so that all the first group needs is on its way while the parts are added up.
        last = tl.load(positions + row * size + token).to(tl.int32)
        key += row * key_row + head.to(tl.int64) * key_head
        value += row * value_row + head.to(tl.int64) * value_head
        slots += (row * size + token) * width
        keys_NC, values_NC, seen_N = _gather(slots, key, value, channel_C, key_slot, value_slot, CHANNELS, TAIL)
        member_M = tl.arange(0, LINES * REPEAT) // REPEAT
        query_MC = (head * GROUP + member_M)[:, None] * query_head + token * query_token + channel_C[None, :]
        real_MC = (member_M < GROUP)[:, None] & real_C[None, :]
        queries_MC = tl.load(query + row * query_row + query_MC, mask=real_MC, other=0.0)
        # The split that is not complete goes on where `invariant_attend` left it.
        begun_L = real_L & (limit % SPLIT + tl.zeros_like(member_L) > 0)  # newer interpreters take no scalar as a mask
        begun_part_L = first_part_L + done * lines
        begun_base_L = tl.load(bases + begun_part_L, mask=begun_L, other=_UNSEEN)
        begun_sum_L = tl.load(sums + begun_part_L, mask=begun_L, other=0.0)
        place_LC = begun_part_L[:, None] * CHANNELS + channel_C[None, :]
        begun_LC = tl.load(mixed + place_LC, mask=begun_L[:, None] & real_C[None, :], other=0.0)
    base_L = tl.full([LINES], _UNSEEN, tl.float32)
    sum_L = tl.zeros([LINES], tl.float32)
    total_LC = tl.zeros([LINES, BLOCK_CHANNELS], tl.float32)
    # Prefetches two parts. A staged loop also keeps Triton from waiting for each of the loads above in turn before it.
    for part in tl.range(done, num_stages=3):
        part_L = first_part_L + part * lines
        part_base_L = tl.load(bases + part_L, mask=real_L, other=_UNSEEN)
        part_sum_L = tl.load(sums + part_L, mask=real_L, other=0.0)
        part_LC = tl.load(mixed + part_L[:, None] * CHANNELS + channel_C[None, :], mask=real_LC, other=0.0)
        base_L, sum_L, total_LC = _fold(base_L, sum_L, total_LC, part_base_L, part_sum_L, part_LC)
    if not CAUSAL:
        base_M = _repeated_M(begun_base_L, REPEAT)
        sum_XM = _repeated_M(begun_sum_L, REPEAT)[None, :] + tl.zeros([16, LINES * REPEAT], tl.float32)
        mixed_CM = _repeated_CM(begun_LC, REPEAT)
        base_M, sum_XM, mixed_CM = _absorb_group(
            queries_MC, seen_N, keys_NC, values_NC, base_M, sum_XM, mixed_CM, scale, PRECISION
        )
        # Few tails are longer than a group, and prefetching for them would cost registers for all others.
        for first in tl.range(limit + TAIL, last + 1, TAIL, num_stages=1):
            if first % SPLIT == 0:
                part_sum_L, part_LC = _once_L(tl.max(sum_XM, 0), REPEAT), _once_LC(mixed_CM, REPEAT)
                base_L, sum_L, total_LC = _fold(base_L, sum_L, total_LC, _once_L(base_M, REPEAT), part_sum_L, part_LC)
                base_M = tl.full([LINES * REPEAT], _UNSEEN, tl.float32)
                sum_XM, mixed_CM = tl.zeros_like(sum_XM), tl.zeros_like(mixed_CM)
            keys_NC, values_NC, seen_N = _gather(
                slots + (first - limit), key, value, channel_C, key_slot, value_slot, CHANNELS, TAIL
            )
            queries_MC = tl.load(query + row * query_row + query_MC, mask=real_MC, other=0.0)
            base_M, sum_XM, mixed_CM = _absorb_group(
                queries_MC, seen_N, keys_NC, values_NC, base_M, sum_XM, mixed_CM, scale, PRECISION
            )
        part_sum_L, part_LC = _once_L(tl.max(sum_XM, 0), REPEAT), _once_LC(mixed_CM, REPEAT)
        base_L, sum_L, total_LC = _fold(base_L, sum_L, total_LC, _once_L(base_M, REPEAT), part_sum_L, part_LC)
    result_LC = total_LC / tl.where(sum_L == 0.0, 1.0, sum_L)[:, None]
    output_LC = (head * GROUP + member_L)[:, None] * output_head + token * output_token + channel_C[None, :]
    tl.store(output + row * output_row + output_LC, result_LC.to(output.dtype.element_ty), mask=real_LC)


# Pointers into storage, and strides of masks that are cut out of others, differ from tree to tree.
@triton.jit(
    do_not_specialize=[
        "visible", "lengths", "starts", "positions", "slot_positions", "size", "places", "width", "visible_row",
        "visible_token",
    ]
)  # fmt: skip
def list_tails(
    visible, lengths, starts, positions, slot_positions, slots, size, places, capacity, width,
    visible_row, visible_token, visible_place,
    CUT: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """List the slots that a token sees by position, from the first group of committed text that is not full; grid [T, B].

    For positions that it does not see, the slot is -1.
    """
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    last = tl.load(positions + row * size + token)
    limit, start = length // TAIL * TAIL, 0
    if CUT:
        start = tl.load(starts + row * size + token)
    place_U = tl.arange(0, BLOCK)
    real_U = place_U < places
    visible_U = tl.load(visible + row * visible_row + token * visible_token + place_U * visible_place, mask=real_U, other=0)
    position_U = tl.load(slot_positions + row * capacity + length + place_U, mask=real_U, other=0)
    slots += (row * size + token) * width
    entry_X = tl.arange(0, BLOCK_WIDTH)
    position_X = limit + entry_X
    committed_X = (position_X < length) & (position_X <= last) & (position_X >= start)
    tl.store(slots + entry_X, tl.where(committed_X, position_X, -1).to(tl.int32), mask=entry_X < width)
    tl.debug_barrier()  # the next store overwrites what other threads may have written
    listed_U = real_U & (visible_U != 0) & (position_U >= length) & (position_U <= last) & (position_U >= start)
    tl.store(slots + (position_U - limit), (length + place_U).to(tl.int32), mask=listed_U & (position_U - limit < width))
