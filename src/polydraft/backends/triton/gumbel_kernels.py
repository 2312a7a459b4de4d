"""Triton kernel of Gumbel noise; launched by `drawing`. Imported only if Triton is installed."""

import triton
import triton.language as tl

_MOST_UNIFORM = tl.constexpr(1 - 2**-24)
_SERIES_BELOW = tl.constexpr(2**-5)
"""Below this, −log(1 − u) is summed as a series, because 1 − u would round off most of u."""


@triton.jit
def _mixed_low(bits_X):
    """Mix the bits of 32-bit numbers."""
    bits_X = (bits_X ^ (bits_X >> 16)) * 0x7FEB352D
    bits_X = (bits_X ^ (bits_X >> 15)) * 0x846CA68B
    return bits_X ^ (bits_X >> 16)


@triton.jit
def _mixed(key):
    """Mix the bits of a 64-bit number with SplitMix64's finaliser."""
    key = (key ^ (key >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    key = (key ^ (key >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return key ^ (key >> 31)


@triton.jit(do_not_specialize=["columns", "nodes", "places", "scores_row", "scores_node"])
def perturb(
    scores, keys, positions, scales, tokens, noisy, columns, nodes, places, scores_row, scores_node,
    PARTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add scaled Gumbel noise to scores; `places` is the number of nodes, or 1 if they share a position; grid [B · G, blocks].

    `polydraft.sampling.gumbel` has the formula.
    """
    item, column_X = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, node, real_X = item // nodes, item % nodes, column_X < columns
    position = tl.load(positions + row * places + node % places).to(tl.uint64)
    key = _mixed(tl.load(keys + row).to(tl.uint64) + position * tl.full([], 0x9E3779B97F4A7C15, tl.uint64))
    score_X = tl.load(scores + row * scores_row + node * scores_node + column_X, mask=real_X, other=0.0)
    token_X = tl.load(tokens + column_X, mask=real_X, other=0) if PARTIAL else column_X
    bits_X = _mixed_low(token_X.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32))
    bits_X = _mixed_low(bits_X ^ (key >> 32).to(tl.uint32))
    uniform_X = tl.minimum((bits_X.to(tl.float32) + 0.5) * 2.0**-32, _MOST_UNIFORM)
    series_X = 1 / 3 + uniform_X * (0.25 + uniform_X * (0.2 + uniform_X * (1 / 6)))
    series_X = uniform_X * (1 + uniform_X * (0.5 + uniform_X * series_X))
    waiting_X = tl.where(uniform_X < _SERIES_BELOW, series_X, -tl.log(1 - uniform_X))
    noisy_X = score_X.to(tl.float32) - tl.load(scales + row) * tl.log(waiting_X)
    tl.store(noisy + item * columns + column_X, noisy_X, mask=real_X)
