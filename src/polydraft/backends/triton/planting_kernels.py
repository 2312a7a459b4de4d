"""Triton kernels that write children into a tree; launched by `planting`. Imported only where Triton is there.

Columns of the draft's distributions become tokens on the way: through a table where the draft knows a part of them.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.order import in_order

LAST = tl.constexpr(2**31 - 1)
NO_KEY = tl.constexpr(1 - 2**63)
"""Stands for no column; below the key of every number, and no number itself."""


@triton.jit
def as_number(order):
    """Return the numbers at places in the order of numbers."""
    return tl.where(order < 0, order ^ LAST, order).to(tl.float32, bitcast=True)


@triton.jit
def number_of(key):
    """Return the numbers that keys stand for."""
    return as_number((key >> 32).to(tl.int32))


@triton.jit
def keys_of(number_C, column_C, real_C):
    """Return the keys of some numbers, the larger for the larger one, and of equal ones for the first column.

    A key is a number's place in the order of numbers above its column's, smaller ones first.
    """
    return tl.where(real_C, (in_order(number_C).to(tl.int64) << 32) | (-column_C + LAST).to(tl.int64), NO_KEY)


@triton.jit
def tokens_of(vocabulary, column_X, real_X, PARTIAL: tl.constexpr):
    """Return the tokens of some columns; -1 for those that are not real."""
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
    """Write the largest of all parts into their nodes, largest first; grid [R].

    Those that are not less than `NATS` below the largest are no children, and so are all where that is not finite: infinity
    does not exceed itself, and no comparison holds for what is not a number.
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
    """Write columns into their nodes, of which 0 is none; grid [B, blocks of columns]."""
    row, place_X = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_X = tl.load(columns + row * columns_row + place_X, mask=place_X < count, other=-1)
    node_X = tl.load(nodes + place_X, mask=place_X < count, other=0)
    token_X = tokens_of(vocabulary, column_X, column_X >= 0, PARTIAL)
    tl.store(tokens + row * tokens_row + node_X, token_X, mask=node_X > 0)
