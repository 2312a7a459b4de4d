"""Triton kernels around a pass: where its tokens go, what a head reads, and which tokens are kept.

See `polydraft.backends.triton.slots` and `polydraft.backends.triton.head`. Imported only if Triton is installed. Each replaces
five to twenty small operations, each of which takes 1 to 2 µs in a captured round, whatever it does.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import let_next_start, wait_for_others


@triton.jit(
    do_not_specialize=[
        "tokens", "depths", "places", "lengths", "slot_positions", "size", "start", "last_position", "last_token", "window",
        "token_row", "depth_row", "place_row", "slot_row", "plane",
    ]
)  # fmt: skip
def place_tokens(
    tokens, depths, places, lengths, slot_positions, placed, size, start, last_position, last_token, window,
    token_row, depth_row, place_row, slot_row, plane,
    PLACES: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the slots of a block's tokens, and write their positions there; grid [B, blocks of tokens].

    `placed` are planes `[B, T]`: tokens clamped to the vocabulary, positions, slots and, with `CUT`, the first position that
    each token sees. With `PLACES`, `places` are the tokens' uncommitted places; otherwise these are consecutive from `start`.
    """
    row = tl.program_id(0).to(tl.int64)
    index_T = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_T = index_T < size
    length = tl.load(lengths + row)
    position_T = length + tl.load(depths + row * depth_row + index_T, mask=real_T, other=0)
    position_T = tl.minimum(position_T, last_position)
    slot_T = length + start + index_T
    if PLACES:
        slot_T = length + tl.load(places + row * place_row + index_T, mask=real_T, other=0)
    token_T = tl.load(tokens + row * token_row + index_T, mask=real_T, other=0)
    tl.store(slot_positions + row * slot_row + slot_T, position_T, mask=real_T)
    out_T = row * size + index_T
    tl.store(placed + out_T, tl.minimum(tl.maximum(token_T, 0), last_token), mask=real_T)
    tl.store(placed + plane + out_T, position_T, mask=real_T)
    tl.store(placed + 2 * plane + out_T, slot_T, mask=real_T)
    if CUT:
        tl.store(placed + 3 * plane + out_T, tl.maximum(position_T - window + 1, 0), mask=real_T)


@triton.jit(do_not_specialize=["slot_positions", "lengths", "places", "count", "place_row", "slot_row"])
def move_slots(
    keys, values, slot_positions, lengths, places, count, channels, place_row, slot_row,
    key_layer, key_row, key_head, key_slot, value_layer, value_row, value_head, value_slot,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Move some uncommitted tokens to the first uncommitted places, in this order; grid [layers, B, key heads]."""
    layer, row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    rank_D, channel_C = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    real_D = rank_D < count
    real_DC = real_D[:, None] & (channel_C < channels)[None, :]
    length = tl.load(lengths + row)
    source_D = length + tl.load(places + row * place_row + rank_D, mask=real_D, other=0)
    target_D = length + rank_D
    key = keys + layer * key_layer + row * key_row + head * key_head
    value = values + layer * value_layer + row * value_row + head * value_head
    key_DC = tl.load(key + source_D[:, None] * key_slot + channel_C[None, :], mask=real_DC)
    value_DC = tl.load(value + source_D[:, None] * value_slot + channel_C[None, :], mask=real_DC)
    tl.debug_barrier()  # a thread may overwrite a slot that another one reads
    tl.store(key + target_D[:, None] * key_slot + channel_C[None, :], key_DC, mask=real_DC)
    tl.store(value + target_D[:, None] * value_slot + channel_C[None, :], value_DC, mask=real_DC)
    if (layer == 0) & (head == 0):
        tl.store(slot_positions + row * slot_row + target_D, target_D, mask=real_D)


@triton.jit
def _normed(value_C, weight_C, channels, epsilon):
    """Return the root-mean-square norm of some channels times weights, in float32."""
    return value_C * tl.rsqrt(tl.sum(value_C * value_C, 0) / channels + epsilon) * weight_C


@triton.jit(do_not_specialize=["features", "features_row"])
def norm_parts(features, weights, normed, epsilon, channels, features_row, BLOCK: tl.constexpr):
    """Take the norm of each part of some features separately; grid [rows, parts]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel_C = tl.arange(0, BLOCK)
    real_C = channel_C < channels
    value_C = tl.load(features + row * features_row + part * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    weight_C = tl.load(weights + part * channels + channel_C, mask=real_C, other=0.0).to(tl.float32)
    out_C = (row * tl.num_programs(1) + part) * channels + channel_C
    tl.store(normed + out_C, _normed(value_C, weight_C, channels, epsilon).to(normed.dtype.element_ty), mask=real_C)


@triton.jit(do_not_specialize=["size", "parents", "parent_row", "above_row"])
def enter_head(
    features, tokens, parents, embedding, feature_weight, token_weight, pair, epsilon, channels, size,
    above_row, above_token, parent_row, embedding_row,
    PDL: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the normed features and the normed token embeddings next to each other; grid [B · T, 2].

    With `CHOSEN`, `parents` says which of a row's features each token follows.
    """
    wait_for_others(PDL)
    let_next_start(PDL)
    entry = tl.program_id(0).to(tl.int64)
    row, place = entry // size, entry % size
    channel_C = tl.arange(0, BLOCK)
    real_C = channel_C < channels
    if tl.program_id(1) == 0:
        if CHOSEN:
            place = tl.load(parents + row * parent_row + place)
        source = row * above_row + place * above_token
        value_C = tl.load(features + source + channel_C, mask=real_C, other=0.0).to(tl.float32)
        weight_C = tl.load(feature_weight + channel_C, mask=real_C, other=0.0).to(tl.float32)
    else:
        token = tl.load(tokens + entry)
        value_C = tl.load(embedding + token * embedding_row + channel_C, mask=real_C, other=0.0).to(tl.float32)
        weight_C = tl.load(token_weight + channel_C, mask=real_C, other=0.0).to(tl.float32)
    out_C = (2 * entry + tl.program_id(1)) * channels + channel_C
    tl.store(pair + out_C, _normed(value_C, weight_C, channels, epsilon).to(pair.dtype.element_ty), mask=real_C)


@triton.jit(do_not_specialize=["fresh", "lengths", "outputs_row"])
def take_roots(outputs, fresh, lengths, roots, channels, outputs_row, BLOCK: tl.constexpr):
    """Commit each row's `fresh` entries except the last, and return the output of the last; grid [B]."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.maximum(tl.load(fresh + row) - 1, 0)
    channel_C = tl.arange(0, BLOCK)
    real_C = channel_C < channels
    output_C = tl.load(outputs + row * outputs_row + before * channels + channel_C, mask=real_C)
    tl.store(roots + row * channels + channel_C, output_C, mask=real_C)
    tl.store(lengths + row, tl.load(lengths + row) + before)


@triton.jit(do_not_specialize=["tokens", "path", "keep", "lengths", "width", "tokens_row", "path_row", "features_row"])
def keep_entries(
    tokens, path, keep, features, lengths, kept_tokens, kept_features, fresh, width, channels,
    tokens_row, path_row, features_row, features_node,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Commit the root's entry, and store the entries after it with the target's features; grid [B, width]."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    node = tl.load(path + row * path_row + place)
    out = row * width + place
    tl.store(kept_tokens + out, tl.load(tokens + row * tokens_row + place))
    for first in range(0, channels, BLOCK):
        channel_C = first + tl.arange(0, BLOCK)
        real_C = channel_C < channels
        feature_C = tl.load(features + row * features_row + node * features_node + channel_C, mask=real_C)
        tl.store(kept_features + out * channels + channel_C, feature_C, mask=real_C)
    if place == 0:
        count = tl.load(keep + row)
        tl.store(fresh + row, count)
        tl.store(lengths + row, tl.load(lengths + row) + tl.minimum(count, 1))
