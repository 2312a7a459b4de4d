"""Triton kernels that draw children and write them into a tree; launched by `drawing`. Imported only if Triton is installed.

`soften` turns logits into probabilities, `rank_blocks` and `draw_children` draw the children of `hybrid`, and `plant_columns`
writes them into their nodes; `rank_parts` and `plant_largest` write the likeliest tokens without drawing. Columns of the
draft's distributions become tokens on the way, through a table if the draft knows only some tokens.

For drawing, probabilities become whole multiples of 2**-48: their sums are exact in any order and on any device, so drawing and
verification agree to the bit on a distribution's total, and a number below the total always falls on a token with weight.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import LAST, NO_KEY, keys_of, number_of

ONE = tl.constexpr(2.0**48)
"""A probability of 1. Rounding to its parts moves less than 1e-10 of the mass of 50,000 tokens; totals may reach 2**14."""
BELOW_ONE = tl.constexpr(1 - 2.0**-53)


@triton.jit
def _scores(logits, column_C, columns, temperature, TEMPERED: tl.constexpr):
    """Return logits over the temperature, in float32; minus infinity past the end."""
    score_C = tl.load(logits + column_C, mask=column_C < columns, other=float("-inf")).to(tl.float32)
    return score_C / temperature if TEMPERED else score_C


@triton.jit
def _begin(logits, temperatures, place, nodes, logits_row, logits_node, TEMPERED: tl.constexpr):
    """Return the address of a node's logits, and its temperature."""
    row = place // nodes
    temperature = 1.0
    if TEMPERED:
        temperature = tl.load(temperatures + row)
    return logits + row * logits_row + (place % nodes) * logits_node, temperature


@triton.jit(do_not_specialize=["nodes"])
def soften(
    logits, temperatures, probs, nodes, columns, logits_row, logits_node, TEMPERED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Take the softmax of each node's logits, if a program can hold them all; grid [B · G]."""
    place = tl.program_id(0).to(tl.int64)
    logits, temperature = _begin(logits, temperatures, place, nodes, logits_row, logits_node, TEMPERED)
    column_C = tl.arange(0, BLOCK)
    score_C = _scores(logits, column_C, columns, temperature, TEMPERED)
    weight_C = tl.exp(score_C - tl.max(score_C, 0))
    tl.store(probs + place * columns + column_C, weight_C / tl.sum(weight_C, 0), mask=column_C < columns)


@triton.jit(do_not_specialize=["nodes"])
def weigh_parts(
    logits, temperatures, peaks, sums, nodes, columns, logits_row, logits_node, TEMPERED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the peak of each part of a node's logits, and the sum of weights relative to it; grid [B · G, parts]."""
    place = tl.program_id(0).to(tl.int64)
    logits, temperature = _begin(logits, temperatures, place, nodes, logits_row, logits_node, TEMPERED)
    score_C = _scores(logits, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), columns, temperature, TEMPERED)
    peak = tl.max(score_C, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)  # a part of minus infinities weighs nothing
    part = place * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + part, peak)
    tl.store(sums + part, tl.sum(tl.exp(score_C - base), 0))


@triton.jit(do_not_specialize=["nodes"])
def soften_parts(
    logits, temperatures, peaks, sums, probs, nodes, columns, logits_row, logits_node,
    TEMPERED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Take the softmax of each node's logits, part by part; grid [B · G, parts]."""
    place, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    logits, temperature = _begin(logits, temperatures, place, nodes, logits_row, logits_node, TEMPERED)
    part_M = tl.arange(0, BLOCK_M)
    peak_M = tl.load(peaks + place * parts + part_M, mask=part_M < parts, other=float("-inf"))
    sum_M = tl.load(sums + place * parts + part_M, mask=part_M < parts, other=0.0)
    peak = tl.max(peak_M, 0)
    total = tl.sum(sum_M * tl.exp(peak_M - peak), 0)
    column_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight_C = tl.exp(_scores(logits, column_C, columns, temperature, TEMPERED) - peak)
    tl.store(probs + place * columns + column_C, weight_C / total, mask=column_C < columns)


@triton.jit
def fixed(probs):
    """Return probabilities as whole numbers."""
    return (probs.to(tl.float64) * ONE + 0.5).to(tl.int64)


@triton.jit
def count_certain(weight_K, more_K, total, count, THRESHOLD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Count how many of the first weights pass the threshold in a row and leave something after them."""
    rank_K = tl.arange(0, BLOCK_K)
    left_K = count - rank_K
    rest_K = total - tl.cumsum(weight_K, 0) + weight_K
    wanted_K = rest_K.to(tl.float64) * tl.full([], THRESHOLD, tl.float64)
    likely_K = (weight_K.to(tl.float64) * left_K.to(tl.float64) >= wanted_K) & (left_K > 1) & more_K
    return tl.min(tl.where(likely_K, BLOCK_K, rank_K), 0)


@triton.jit(do_not_specialize=["columns", "blocks", "count"])
def rank_blocks(distribution, sums, keys, columns, blocks, count, distribution_row, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Add up blocks of each distribution, and find the `count` largest entries of several blocks; grid [R, blocks / TILES].

    A key has a probability's bits, which sort like the numbers, above a column's, with smaller columns first.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column_C = part * (TILES * BLOCK) + tl.arange(0, TILES * BLOCK)
    real_C = column_C < columns
    probs_C = tl.load(distribution + row * distribution_row + column_C, mask=real_C, other=0.0)
    block_M = part * TILES + tl.arange(0, TILES)
    sum_M = tl.sum(tl.reshape(fixed(probs_C), (TILES, BLOCK)), 1)
    tl.store(sums + row * blocks + block_M, sum_M, mask=block_M < blocks)
    if count > 1:
        bits_C = probs_C.to(tl.int32, bitcast=True).to(tl.int64)
        key_C = tl.where(real_C, (bits_C << 32) | (-column_C + LAST).to(tl.int64), -1)
        place = (row * tl.num_programs(1) + part) * count
        for rank in range(count):
            best = tl.max(key_C, 0)
            tl.store(keys + place + rank, best)
            key_C = tl.where(key_C == best, -1, key_C)


@triton.jit(do_not_specialize=["columns", "blocks", "count", "parts", "uniform_row"])
def draw_children(
    distribution, sums, keys, uniforms, children, columns, blocks, count, parts, distribution_row, uniform_row,
    THRESHOLD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Take the certain children from the largest of all parts, draw the others from the rest; grid [R]."""
    row = tl.program_id(0).to(tl.int64)
    rank_K, block_M = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    sum_M = tl.load(sums + row * blocks + block_M, mask=block_M < blocks, other=0)
    column_K, certain = tl.full([BLOCK_K], -1, tl.int32), 0
    if count > 1:
        key_X = tl.arange(0, BLOCK_X)
        key_X = tl.load(keys + row * parts * count + key_X, mask=key_X < parts * count, other=-1)
        key_K, next_K = tl.full([BLOCK_K], -1, tl.int64), tl.full([BLOCK_K], -1, tl.int64)
        for rank in range(count):
            best = tl.max(key_X, 0)
            key_X = tl.where(key_X == best, -1, key_X)
            key_K = tl.where(rank_K == rank, best, key_K)
            next_K = tl.where(rank_K == rank - 1, best, next_K)
        weight_K = _weight(key_K)
        certain = count_certain(weight_K, _weight(next_K) > 0, tl.sum(sum_M, 0), count, THRESHOLD, BLOCK_K)
        column_K = tl.where(rank_K < certain, -(key_K & LAST).to(tl.int32) + LAST, -1)
        # Exact, because these are whole numbers: a block with only certain tokens has nothing left.
        inside_KM = (column_K[:, None] // BLOCK == block_M[None, :]) & (column_K >= 0)[:, None]
        sum_M -= tl.sum(tl.where(inside_KM, weight_K[:, None], 0), 0)
    rest = tl.sum(sum_M, 0)
    uniform_K = tl.load(uniforms + row * uniform_row + rank_K, mask=rank_K < count, other=0.0)
    mark_K = (tl.minimum(uniform_K, BELOW_ONE) * rest.to(tl.float64)).to(tl.int64)
    passed_KM = tl.cumsum(sum_M, 0)[None, :] <= mark_K[:, None]
    block_K = tl.minimum(tl.sum(passed_KM.to(tl.int32), 1), blocks - 1)
    mark_K -= tl.sum(tl.where(block_M[None, :] < block_K[:, None], sum_M[None, :], 0), 1)
    column_KC = block_K[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real_KC = (column_KC < columns) & (rank_K < count)[:, None]
    for rank in range(certain):
        real_KC &= column_KC != tl.sum(tl.where(rank_K == rank, column_K, 0), 0)
    weight_KC = fixed(tl.load(distribution + row * distribution_row + column_KC, mask=real_KC, other=0.0))
    within_K = tl.sum((tl.cumsum(weight_KC, 1) <= mark_K[:, None]).to(tl.int32), 1)
    # Only a NaN distribution leads beyond its columns.
    drawn_K = tl.minimum(block_K * BLOCK + within_K, columns - 1)
    child_K = tl.where(rank_K < certain, column_K, tl.where(rest > 0, drawn_K, -1))
    tl.store(children + row * count + rank_K, child_K.to(tl.int64), mask=rank_K < count)


@triton.jit
def _weight(key_K):
    """Return the weights of keys; 0 for no key."""
    return fixed((tl.maximum(key_K, 0) >> 32).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def tokens_of(vocabulary, column_X, real_X, PARTIAL: tl.constexpr):
    """Return the tokens of some columns; -1 for columns that are not real."""
    token_X = column_X.to(tl.int64)
    if PARTIAL:
        token_X = tl.load(vocabulary + column_X, mask=real_X, other=-1)
    return tl.where(real_X, token_X, -1)


@triton.jit(do_not_specialize=["count"])
def rank_parts(logits, keys, columns, count, logits_row, BLOCK: tl.constexpr):
    """Find the `count` largest logits of each part of a row; grid [R, parts]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column_C = part * BLOCK + tl.arange(0, BLOCK)
    real_C = column_C < columns
    number_C = tl.load(logits + row * logits_row + column_C, mask=real_C, other=0.0).to(tl.float32)
    key_C = keys_of(number_C, column_C, real_C)
    place = (row * tl.num_programs(1) + part) * count
    for rank in range(count):
        best = tl.max(key_C, 0)
        tl.store(keys + place + rank, best)
        key_C = tl.where(key_C == best, NO_KEY, key_C)


@triton.jit(do_not_specialize=["distributions", "parts", "count", "tokens_row"])
def plant_largest(
    keys, nodes, vocabulary, tokens, distributions, parts, count, tokens_row,
    NATS: tl.constexpr, PARTIAL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Write the largest logits of all parts into their nodes, largest first; grid [R].

    Logits `NATS` or more below the largest give no children. If the largest is not finite, there are none at all: infinity does
    not exceed itself, and comparisons with NaN are false.
    """
    place = tl.program_id(0).to(tl.int64)
    row, distribution = place // distributions, place % distributions
    rank_K, key_X = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_X)
    key_X = tl.load(keys + place * parts * count + key_X, mask=key_X < parts * count, other=NO_KEY)
    least = number_of(tl.max(key_X, 0)) - NATS
    key_K = tl.full([BLOCK_K], NO_KEY, tl.int64)
    for rank in range(count):
        best = tl.max(key_X, 0)
        key_X = tl.where(key_X == best, NO_KEY, key_X)
        key_K = tl.where(rank_K == rank, best, key_K)
    column_K = -(key_K & LAST).to(tl.int32) + LAST
    token_K = tokens_of(vocabulary, column_K, number_of(key_K) > least, PARTIAL)
    node_K = tl.load(nodes + distribution * count + rank_K, mask=rank_K < count, other=0)
    tl.store(tokens + row * tokens_row + node_K, token_K, mask=node_K > 0)


@triton.jit(do_not_specialize=["count", "columns_row", "tokens_row"])
def plant_columns(
    columns, nodes, vocabulary, tokens, count, columns_row, tokens_row, PARTIAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Write columns into their nodes; node 0 means none; grid [B, blocks of columns]."""
    row, place_X = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_X = tl.load(columns + row * columns_row + place_X, mask=place_X < count, other=-1)
    node_X = tl.load(nodes + place_X, mask=place_X < count, other=0)
    token_X = tokens_of(vocabulary, column_X, column_X >= 0, PARTIAL)
    tl.store(tokens + row * tokens_row + node_X, token_X, mask=node_X > 0)
