"""Triton kernels that draw the children of `hybrid`, behind `polydraft.backends.triton.draw_hybrid`.

Probabilities become whole numbers of 2**-48 here: their sums are exact, in any order and on any device, so that drawing and
verification agree to the bit on what a distribution's total is, and a number below the total always falls on a token that has
weight.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(2.0**48)
"""A probability of 1. Rounding to parts of it moves less than 1e-10 of the mass of 50,000 tokens; totals may be 2**14."""
BELOW_ONE = tl.constexpr(1 - 2.0**-53)
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def fixed(probs):
    """Return probabilities as whole numbers."""
    return (probs.to(tl.float64) * ONE + 0.5).to(tl.int64)


@triton.jit
def count_certain(weight_K, more_K, total, count, THRESHOLD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Count how many of the first weights pass the threshold one after the other, where something is left after them."""
    rank_K = tl.arange(0, BLOCK_K)
    left_K = count - rank_K
    rest_K = total - tl.cumsum(weight_K, 0) + weight_K
    wanted_K = rest_K.to(tl.float64) * tl.full([], THRESHOLD, tl.float64)
    likely_K = (weight_K.to(tl.float64) * left_K.to(tl.float64) >= wanted_K) & (left_K > 1) & more_K
    return tl.min(tl.where(likely_K, BLOCK_K, rank_K), 0)


@triton.jit(do_not_specialize=["columns", "blocks", "count"])
def rank_blocks(distribution, sums, keys, columns, blocks, count, distribution_row, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Add up blocks of each distribution and find the `count` largest of several blocks; grid [R, blocks / TILES].

    A key is a probability's bits, which are in the order of the numbers, above a column's, smaller ones first.
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
        key_C = tl.where(real_C, (bits_C << 32) | (-column_C + _LAST).to(tl.int64), -1)
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
        column_K = tl.where(rank_K < certain, -(key_K & _LAST).to(tl.int32) + _LAST, -1)
        # Whole numbers: of a block of certain tokens alone nothing is left.
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
    # Only a distribution that is not a number leads beyond its columns.
    drawn_K = tl.minimum(block_K * BLOCK + within_K, columns - 1)
    child_K = tl.where(rank_K < certain, column_K, tl.where(rest > 0, drawn_K, -1))
    tl.store(children + row * count + rank_K, child_K.to(tl.int64), mask=rank_K < count)


@triton.jit
def _weight(key_K):
    """Return the weights that keys stand for, 0 for none."""
    return fixed((tl.maximum(key_K, 0) >> 32).to(tl.int32).to(tl.float32, bitcast=True))
