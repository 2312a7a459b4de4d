"""Triton kernel of coupled tokens under top-k, top-p and min-p; launched by `drawing`. Imported only if Triton is installed.

Torch sorts the vocabulary at every node, which takes longer than a round of a small model. But whether one token is kept is
found in one pass: by the mass of the likelier ones. So a program takes the token with the largest noisy score; if that is ruled
out, so are all tokens that are no likelier, and the search goes on among the others. Mostly the first token is kept.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import LAST, NO_KEY, in_order, keys_of


@triton.jit
def _scores(scores, column_X, columns):
    """Return scores in float32; minus infinity past the end."""
    return tl.load(scores + column_X, mask=column_X < columns, other=float("-inf")).to(tl.float32)


@triton.jit
def _enough(order_X, highest, wanted):
    """Return the highest place in the order of scores from which on at least so many of these are."""
    low, high = tl.full([], -LAST, tl.int64), highest.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((order_X >= middle).to(tl.int32), 0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _kth(scores, room, columns, best_X, highest, k, BLOCK: tl.constexpr):
    """Return the place of the k-th largest score in their order; `room` is for the scores that it may be."""
    floor = tl.full([], -LAST, tl.int32)
    if k <= BLOCK:  # the best of each lane: k of these are k tokens, so the k-th largest token is no lower
        floor = _enough(in_order(best_X), highest, k)
    found = tl.full([], 0, tl.int32)
    for start in range(0, columns, BLOCK):
        column_X = start + tl.arange(0, BLOCK)
        score_X = _scores(scores, column_X, columns)
        likely_X = ((in_order(score_X) >= floor) & (column_X < columns)).to(tl.int32)
        count = tl.sum(likely_X, 0)
        if count > 0:
            tl.store(room + found + tl.cumsum(likely_X, 0) - 1, score_X, mask=likely_X > 0)
            found += count
    tl.debug_barrier()
    low, high = floor.to(tl.int64), highest.to(tl.int64)
    while low < high:
        middle, count_X = (low + high + 1) >> 1, tl.zeros([BLOCK], tl.int32)
        for start in range(0, found, BLOCK):
            place_X = start + tl.arange(0, BLOCK)
            count_X += ((in_order(_scores(room, place_X, found)) >= middle) & (place_X < found)).to(tl.int32)
        if tl.sum(count_X, 0) >= k:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["columns", "nodes", "scores_row", "scores_node"])
def keep_largest(
    noisy, scores, top_ks, top_ps, min_ps, room, kept, columns, nodes, scores_row, scores_node,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the token of the largest noisy score that its row's top-k, top-p and min-p keep; −1 for none; grid [B · G]."""
    item = tl.program_id(0).to(tl.int64)
    row, node = item // nodes, item % nodes
    scores += row * scores_row + node * scores_node
    noisy += item * columns
    best_X, broken_X = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        score_X = _scores(scores, start + tl.arange(0, BLOCK), columns)
        broken_X |= (score_X != score_X).to(tl.int32)
        best_X = tl.maximum(best_X, tl.where(score_X != score_X, float("-inf"), score_X))
    peak = tl.max(best_X, 0)
    column = tl.full([], -1, tl.int64)
    if (tl.max(broken_X, 0) == 0) & (tl.abs(peak) < float("inf")):  # else there is no distribution
        lowest, least = tl.full([], -LAST, tl.int32), tl.full([], float("-inf"), tl.float32)
        top_p = tl.full([], 1.0, tl.float64)
        if TOP_K:
            top_k = tl.load(top_ks + row)
            if top_k < columns:
                lowest = _kth(scores, room + item * columns, columns, best_X, in_order(peak), top_k, BLOCK)
        if TOP_P:
            top_p = tl.load(top_ps + row)
        if MIN_P:
            least = peak + tl.log(tl.load(min_ps + row))
        # Tokens come in the order of their scores; of equal ones, the last comes first. At first, all come before `order`.
        order, limit, searching = lowest - 1, tl.full([], 0.0, tl.float64), tl.full([], 1, tl.int1)
        while searching:
            key_X, mass_X = tl.full([BLOCK], NO_KEY, tl.int64), tl.zeros([BLOCK], tl.float64)
            for start in range(0, columns, BLOCK):
                column_X = start + tl.arange(0, BLOCK)
                score_X = _scores(scores, column_X, columns)
                order_X = in_order(score_X)
                before_X = ((order_X > order) | ((order_X == order) & (column_X > column))) & (column_X < columns)
                mass_X += tl.where(before_X, tl.exp(score_X - peak), 0.0).to(tl.float64)
                noisy_X = tl.load(noisy + column_X, mask=column_X < columns, other=float("-inf"))
                key_X = tl.maximum(key_X, keys_of(noisy_X, column_X, before_X & (score_X >= least)))
            key, mass = tl.max(key_X, 0), tl.sum(mass_X, 0)
            first = column < 0
            limit = tl.where(first, top_p * mass, limit)
            ruled_out = first | ((mass >= limit) & (key != NO_KEY))
            if ruled_out:
                column = LAST - (key & LAST)
                order = in_order(tl.load(scores + column).to(tl.float32))
            searching = ruled_out & (top_p < 1)
    tl.store(kept + item, column)
