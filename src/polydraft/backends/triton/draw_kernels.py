"""Triton kernels that write children into a tree; launched by `drawing`. Imported only if Triton is installed.

`soften` turns logits into probabilities, from which children are drawn, and `plant_columns` writes them into their nodes;
`rank_parts` and `plant_largest` write the likeliest tokens without drawing. Columns of the draft's distributions become tokens
on the way, through a table if the draft knows only some tokens.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import LAST, NO_KEY, keys_of, number_of


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
