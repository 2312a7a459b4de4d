"""Triton kernel of top-k, top-p and min-p; launched by `drawing`. Imported only if Triton is installed.

Torch sorts the vocabulary at every node, which takes longer than a round of a small model. Here a program goes through a node's
scores some forty times, mostly in the GPU's cache, and searches for the score at which the kept tokens end: the lowest one with
fewer than k tokens, or less than the wanted mass, above it.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import LAST, as_number, in_order


@triton.jit
def _weights(scores, column_X, columns, peak, floor, MASS: tl.constexpr):
    """Return the tokens' scores in order, and their weights: mass or 1; 0 below the floor and past the end."""
    score_X = tl.load(scores + column_X, mask=column_X < columns, other=float("-inf")).to(tl.float32)
    order_X = in_order(score_X)
    weight_X = tl.exp(score_X - peak) if MASS else tl.where(column_X < columns, 1.0, 0.0)
    return order_X, tl.where((order_X >= floor) & (column_X < columns), weight_X, 0.0).to(tl.float64)


@triton.jit
def _above(scores, columns, peak, floor, order, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weight of the tokens above a place in the order of scores."""
    sum_X = tl.zeros([BLOCK], tl.float64)
    for start in range(0, columns, BLOCK):
        order_X, weight_X = _weights(scores, start + tl.arange(0, BLOCK), columns, peak, floor, MASS)
        sum_X += tl.where(order_X > order, weight_X, 0.0)
    return tl.sum(sum_X, 0)


@triton.jit
def _edge(scores, columns, peak, floor, limit, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the lowest place in the order of scores above which tokens weigh less than the limit."""
    low, high = floor.to(tl.int64), in_order(peak).to(tl.int64)
    while low < high:  # each turn leaves a quarter
        first, middle, last = low + (high - low) // 4, low + (high - low) // 2, low + 3 * (high - low) // 4
        first_X, middle_X, last_X = _nothing(BLOCK), _nothing(BLOCK), _nothing(BLOCK)
        for start in range(0, columns, BLOCK):
            order_X, weight_X = _weights(scores, start + tl.arange(0, BLOCK), columns, peak, floor, MASS)
            first_X += tl.where(order_X > first, weight_X, 0.0)
            middle_X += tl.where(order_X > middle, weight_X, 0.0)
            last_X += tl.where(order_X > last, weight_X, 0.0)
        if tl.sum(first_X, 0) < limit:
            high = first
        elif tl.sum(middle_X, 0) < limit:
            low, high = first + 1, middle
        elif tl.sum(last_X, 0) < limit:
            low, high = middle + 1, last
        else:
            low = last + 1
    return high.to(tl.int32)


@triton.jit
def _nothing(BLOCK: tl.constexpr):
    return tl.zeros([BLOCK], tl.float64)


@triton.jit
def _place_of(scores, columns, edge, wanted, BLOCK: tl.constexpr):
    """Return the last column from which on at least so many tokens have the score of the edge."""
    low, high = tl.full([], 0, tl.int32), columns - 1
    while low < high:
        middle, count_X = (low + high + 1) // 2, tl.zeros([BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            column_X = start + tl.arange(0, BLOCK)
            score_X = tl.load(scores + column_X, mask=column_X < columns, other=float("-inf")).to(tl.float32)
            count_X += ((in_order(score_X) == edge) & (column_X >= middle) & (column_X < columns)).to(tl.int32)
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
    peak_X, broken_X = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column_X = start + tl.arange(0, BLOCK)
        score_X = tl.load(scores + column_X, mask=column_X < columns, other=float("-inf")).to(tl.float32)
        broken_X |= (score_X != score_X).to(tl.int32)
        peak_X = tl.maximum(peak_X, tl.where(score_X != score_X, float("-inf"), score_X))
    peak = tl.max(peak_X, 0)
    # Rows without a distribution stay as they are, for the walk to report.
    sound = (tl.max(broken_X, 0) == 0) & (tl.abs(peak) < float("inf"))
    edge, place = tl.full([], -LAST, tl.int32), tl.full([], 0, tl.int32)
    if sound:
        if TOP_K:
            top_k = tl.load(top_ks + row)
            if top_k < columns:
                edge = _edge(scores, columns, peak, edge, top_k.to(tl.float64), False, BLOCK)
        if TOP_P:
            top_p = tl.load(top_ps + row)
            if top_p < 1:
                floor = edge
                wanted = top_p * _above(scores, columns, peak, floor, tl.full([], -LAST - 1, tl.int32), True, BLOCK)
                edge = _edge(scores, columns, peak, floor, wanted, True, BLOCK)
                above = _above(scores, columns, peak, floor, edge, True, BLOCK)
                count = _above(scores, columns, peak, edge, edge - 1, False, BLOCK)
                count -= _above(scores, columns, peak, edge, edge, False, BLOCK)
                # Of equal scores at the edge the last ones stay.
                share = tl.exp(as_number(edge) - peak).to(tl.float64)
                needed = tl.maximum(tl.ceil((wanted - above) / share), 1.0)
                if needed < count:
                    place = _place_of(scores, columns, edge, needed, BLOCK)
    least = tl.full([], float("-inf"), tl.float32)
    if MIN_P:
        least = peak + tl.log(tl.load(min_ps + row))
    for start in range(0, columns, BLOCK):
        column_X = start + tl.arange(0, BLOCK)
        score_X = tl.load(scores + column_X, mask=column_X < columns, other=float("-inf")).to(tl.float32)
        order_X = in_order(score_X)
        keeps_X = ((order_X > edge) | ((order_X == edge) & (column_X >= place))) & (score_X >= least)
        tl.store(kept + column_X, tl.where(keeps_X | ~sound, score_X, float("-inf")), mask=column_X < columns)
