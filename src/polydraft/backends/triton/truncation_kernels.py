"""Triton kernel of top-k, top-p and min-p; launched by `drawing`. Imported only if Triton is installed.

Torch sorts the vocabulary at every node, which takes longer than a round of a small model. Here a program collects the few
scores of a node at which the kept tokens may end, and searches for that end among them: the lowest score with fewer than k
tokens, or less than the wanted mass, above it.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import LAST, as_number, in_order


@triton.jit
def _scores(scores, column_X, columns):
    """Return scores in float32; minus infinity past the end."""
    return tl.load(scores + column_X, mask=column_X < columns, other=float("-inf")).to(tl.float32)


@triton.jit
def _above(scores, columns, peak, floor, order, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass, or the number, of tokens above a place in the order of scores; those below the floor do not count."""
    sum_X = tl.zeros([BLOCK], tl.float64)
    for start in range(0, columns, BLOCK):
        column_X = start + tl.arange(0, BLOCK)
        score_X = _scores(scores, column_X, columns)
        order_X = in_order(score_X)
        weight_X = tl.exp(score_X - peak) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        counts_X = (order_X > order) & (order_X >= floor) & (column_X < columns)
        sum_X += tl.where(counts_X, weight_X, 0.0).to(tl.float64)
    return tl.sum(sum_X, 0)


@triton.jit
def _edge(scores, columns, peak, floor, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the lowest place in the order of scores above which tokens weigh less than the limit."""
    low, high = floor.to(tl.int64), in_order(peak).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if _above(scores, columns, peak, floor, middle, MASS, BLOCK) < limit:
            high = middle
        else:
            low = middle + 1
    return high.to(tl.int32)


@triton.jit
def _enough(order_X, peak, wanted):
    """Return the highest place in the order of scores from which on at least so many of these are."""
    low, high = tl.full([], -LAST, tl.int64), in_order(peak).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((order_X >= middle).to(tl.int32), 0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _last_ones(scores, columns, edge, wanted, BLOCK: tl.constexpr):
    """Return the last column from which on at least so many tokens have the score of the edge."""
    low, high = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64) + columns - 1
    while low < high:
        middle, count_X = (low + high + 1) >> 1, tl.zeros([BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            column_X = start + tl.arange(0, BLOCK)
            equal_X = in_order(_scores(scores, column_X, columns)) == edge
            count_X += (equal_X & (column_X >= middle) & (column_X < columns)).to(tl.int32)
        if tl.sum(count_X, 0) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["columns", "nodes", "scores_row", "scores_node"])
def truncate(
    scores, top_ks, top_ps, min_ps, kept, columns, nodes, scores_row, scores_node,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scores, or minus infinity for tokens that their row's top-k, top-p or min-p rules out; grid [B · G]."""
    item = tl.program_id(0).to(tl.int64)
    row, node = item // nodes, item % nodes
    scores += row * scores_row + node * scores_node
    kept += item * columns
    best_X, broken_X = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        score_X = _scores(scores, start + tl.arange(0, BLOCK), columns)
        broken_X |= (score_X != score_X).to(tl.int32)
        best_X = tl.maximum(best_X, tl.where(score_X != score_X, float("-inf"), score_X))
    peak = tl.max(best_X, 0)
    # Nodes without a distribution stay as they are, for the walk to report.
    sound = (tl.max(broken_X, 0) == 0) & (tl.abs(peak) < float("inf"))
    top_k, top_p = tl.full([], LAST, tl.int64), tl.full([], 1.0, tl.float64)
    if TOP_K:
        top_k = tl.load(top_ks + row)
    if TOP_P:
        top_p = tl.load(top_ps + row)
    edge, place = tl.full([], -LAST, tl.int32), tl.full([], 0, tl.int64)
    if sound & ((top_k < columns) | (top_p < 1)):
        floor, total = edge, tl.full([], 0.0, tl.float64)
        if top_k < columns:
            if top_k <= BLOCK:  # the best of each lane: k of these are k tokens, so the k-th largest token is no lower
                floor = _enough(in_order(best_X), peak, top_k)
        else:  # all tokens below this weigh less than what top-p leaves out
            least = peak - tl.log(columns / (1 - top_p)).to(tl.float32) - 1
            floor = in_order(least)
        found, total_X = tl.full([], 0, tl.int32), tl.zeros([BLOCK], tl.float64)
        for start in range(0, columns, BLOCK):
            column_X = start + tl.arange(0, BLOCK)
            score_X = _scores(scores, column_X, columns)
            total_X += tl.exp(score_X - peak).to(tl.float64)
            likely_X = ((in_order(score_X) >= floor) & (column_X < columns)).to(tl.int32)
            tl.store(kept + found + tl.cumsum(likely_X, 0) - 1, score_X, mask=likely_X > 0)  # overwritten below
            found += tl.sum(likely_X, 0)
        tl.debug_barrier()
        total = tl.sum(total_X, 0)
        if top_k < columns:
            edge = _edge(kept, found, peak, floor, top_k.to(tl.float64), False, BLOCK)
            total = _above(kept, found, peak, edge, tl.full([], -LAST - 1, tl.int64), True, BLOCK)
        if top_p < 1:
            floor, wanted = tl.maximum(floor, edge), top_p * total
            edge = _edge(kept, found, peak, floor, wanted, True, BLOCK)
            count = _above(kept, found, peak, edge, edge - 1, False, BLOCK)
            count -= _above(kept, found, peak, edge, edge, False, BLOCK)
            # Of equal scores at the edge the last ones stay.
            missing = wanted - _above(kept, found, peak, floor, edge, True, BLOCK)
            needed = tl.maximum(tl.ceil(missing / tl.exp(as_number(edge) - peak).to(tl.float64)), 1.0)
            if needed < count:
                place = _last_ones(scores, columns, edge, needed, BLOCK)
        tl.debug_barrier()
    least = tl.full([], float("-inf"), tl.float32)
    if MIN_P:
        least = peak + tl.log(tl.load(min_ps + row))
    for start in range(0, columns, BLOCK):
        column_X = start + tl.arange(0, BLOCK)
        score_X = _scores(scores, column_X, columns)
        order_X = in_order(score_X)
        keeps_X = ((order_X > edge) | ((order_X == edge) & (column_X >= place))) & (score_X >= least)
        tl.store(kept + column_X, tl.where(keeps_X | ~sound, score_X, float("-inf")), mask=column_X < columns)
