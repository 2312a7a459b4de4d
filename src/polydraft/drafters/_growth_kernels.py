"""Triton kernels of dynamic trees at temperature 0; see `polydraft.drafters.fused_growth`. Imported only where Triton is there.

`rank_and_sum` finds the likeliest tokens of each part of the vocabulary, `grow_level` the candidates of a level and which of
them go on, `choose_candidates` those of all levels that make the tree, `plant_chosen` writes its tables.

Candidates of all levels stand side by side, level by level, the best of a level first: so the front of a level is its
beginning. Of each, a table of facts has the token, the number of its parent in the front above, and how many of that one's
children come before it.
"""

import triton
import triton.language as tl

from polydraft.drafters._kernels import _LAST, _NONE, _keys_of, _number, _tokens_of

_FIXED_POINT = tl.constexpr(2.0**32)
"""As in `polydraft.schemes.arrays.total`."""


@triton.jit(do_not_specialize=["count", "nodes"])
def rank_and_sum(logits, temperatures, keys, sums, columns, count, nodes, logits_row, BLOCK: tl.constexpr):
    """Find the `count` largest logits of each part of a node's, and add up its weights; grid [B · nodes, parts].

    A weight is the exponential of what a logit lacks to the largest of its part.
    """
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column_C = part * BLOCK + tl.arange(0, BLOCK)
    real_C = column_C < columns
    number_C = tl.load(logits + place * logits_row + column_C, mask=real_C, other=float("-inf")).to(tl.float32)
    key_C = _keys_of(number_C, column_C, real_C)
    largest, temperature = _number(tl.max(key_C, 0)), tl.load(temperatures + place // nodes)
    weight_C = tl.where(number_C > float("-inf"), tl.exp((number_C - largest) / temperature), 0.0)
    place = place * tl.num_programs(1) + part
    tl.store(sums + place, tl.sum(weight_C, 0))
    for rank in range(count):
        best = tl.max(key_C, 0)
        tl.store(keys + place * count + rank, best)
        key_C = tl.where(key_C == best, _NONE, key_C)


@triton.jit(
    do_not_specialize=[
        "level", "width", "parts", "count", "total", "earlier", "start", "room", "front", "seen", "facts_part",
    ]
)  # fmt: skip
def grow_level(
    keys, sums, temperatures, allowed, vocabulary, facts, scores, above, visible,
    level, width, parts, count, total, earlier, start, room, front, seen, facts_part,
    STEP: tl.constexpr, PARTIAL: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Write the `room` best children of `width` nodes, and what the `front` best of them see; grid [B].

    Nodes without a law, whose largest logit is not finite, have no children, and neither have those of rows that have reached
    the levels that they are allowed.
    """
    row = tl.program_id(0).to(tl.int64)
    node_W, rank_K, part_P = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P)
    real_W, temperature = node_W < width, tl.load(temperatures + row)
    real_WP = real_W[:, None] & (part_P < parts)[None, :]
    place_WP = (row * width + node_W)[:, None] * parts + part_P[None, :]
    head_WP = tl.load(keys + place_WP * count, mask=real_WP, other=_NONE)
    largest_W, sum_WP = _number(tl.max(head_WP, 1)), tl.load(sums + place_WP, mask=real_WP, other=0.0)
    weight_WP = sum_WP * tl.exp((_number(head_WP) - largest_W[:, None]) / temperature)
    mass_W = tl.sum(tl.where(sum_WP > 0, weight_WP, 0.0), 1)
    # The parts' keys fall: the largest of those left is the first of one part.
    key_WK, taken_WP = tl.full([BLOCK_W, BLOCK_K], _NONE, tl.int64), tl.zeros([BLOCK_W, BLOCK_P], tl.int32)
    for rank in range(count):
        best_W = tl.max(head_WP, 1)
        key_WK = tl.where(rank_K[None, :] == rank, best_W[:, None], key_WK)
        won_WP = head_WP == best_W[:, None]
        taken_WP += won_WP.to(tl.int32)
        next_WP = tl.load(keys + place_WP * count + taken_WP, mask=real_WP & won_WP & (taken_WP < count), other=_NONE)
        head_WP = tl.where(won_WP, next_WP, head_WP)

    number_WK = _number(key_WK)
    parent_W = tl.load(scores + row * total + earlier + node_W, mask=real_W & (level > 0), other=0.0)
    chance_WK = (number_WK - largest_W[:, None]) / temperature - tl.log(mass_W)[:, None]
    score_WK = parent_W[:, None] + chance_WK - STEP
    # Where the largest logit is not finite all are infinitely far from it, or not a number, for which no comparison holds.
    score_WK = tl.where(score_WK > float("-inf"), score_WK, float("-inf"))
    score_WK = tl.where(tl.load(allowed + row) > level, score_WK, float("-inf"))
    column_WK = -(key_WK & _LAST).to(tl.int32) + _LAST
    token_WK = _tokens_of(vocabulary, column_WK, score_WK > float("-inf"), PARTIAL)

    # How many are better is where a candidate goes: all of those that are asked for come before what only fills the table.
    own_WK = node_W[:, None] * BLOCK_K + rank_K[None, :]
    order_WK = _keys_of(score_WK, own_WK, real_W[:, None] & (rank_K < count)[None, :])
    order_X = tl.reshape(order_WK, [BLOCK_W * BLOCK_K])
    own_X = tl.arange(0, BLOCK_W * BLOCK_K)
    rank_X = tl.sum((order_X[None, :] > order_X[:, None]).to(tl.int32), 1)
    place_X, kept_X = row * total + start + rank_X, rank_X < room
    tl.store(scores + place_X, tl.reshape(score_WK, [BLOCK_W * BLOCK_K]), mask=kept_X)
    tl.store(facts + place_X, tl.reshape(token_WK, [BLOCK_W * BLOCK_K]), mask=kept_X)
    tl.store(facts + facts_part + place_X, (own_X // BLOCK_K).to(tl.int64), mask=kept_X)
    tl.store(facts + 2 * facts_part + place_X, (own_X % BLOCK_K).to(tl.int64), mask=kept_X)

    # As its parent, and itself.
    front_F, place_U = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_U)
    parent_F = tl.sum(tl.where(rank_X[None, :] == front_F[:, None], (own_X // BLOCK_K)[None, :], 0), 1)
    earlier_FU = (front_F < front)[:, None] & (place_U < seen)[None, :]
    seen_FU = tl.load(
        above + (row * width + parent_F)[:, None] * seen + place_U[None, :], mask=earlier_FU & (level > 0), other=1
    )  # fmt: skip
    seen_FU = tl.where(earlier_FU, seen_FU, ((place_U - seen)[None, :] == front_F[:, None]).to(seen_FU.dtype))
    real_FU = (front_F < front)[:, None] & (place_U < seen + front)[None, :]
    tl.store(visible + (row * front + front_F)[:, None] * (seen + front) + place_U[None, :], seen_FU, mask=real_FU)


@triton.jit
def _level_of(candidate_X, starts, levels):
    """Return the levels in which candidates stand, the first one's number being 0."""
    level_X = tl.zeros_like(candidate_X)
    for number in range(1, levels):
        level_X += (candidate_X >= tl.load(starts + number)).to(level_X.dtype)
    return level_X


@triton.jit(do_not_specialize=["levels", "total", "nodes", "entries", "depth"])
def choose_candidates(
    scores, starts, allowed, wanted, numbers, chosen, table, expected, counts, reached, found,
    levels, total, nodes, entries, depth,
    BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Give the best candidates of a row numbers as nodes, from 1 on in the order in which they stand; 0 to others; grid [B].

    Parents have better scores than their children and stand before them. Writes which candidate each node is, −1 for none, what
    the levels promise, and empties the `entries` of the table of children.
    """
    row = tl.program_id(0).to(tl.int64)
    candidate_C, node_N = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    scores += row * total
    score_C = tl.load(scores + candidate_C, mask=candidate_C < total, other=float("-inf"))
    ahead_CJ = tl.zeros([BLOCK_C, BLOCK_J], tl.int32)
    for first in range(0, total, BLOCK_J):
        other_J = first + tl.arange(0, BLOCK_J)
        score_J = tl.load(scores + other_J, mask=other_J < total, other=float("-inf"))
        better_CJ = score_J[None, :] > score_C[:, None]
        elder_CJ = (score_J[None, :] == score_C[:, None]) & (other_J[None, :] < candidate_C[:, None])
        ahead_CJ += (better_CJ | elder_CJ).to(tl.int32)
    rank_C = tl.sum(ahead_CJ, 1)
    real_C = score_C > float("-inf")
    count = tl.minimum(tl.minimum(tl.load(wanted + row), nodes) - 1, tl.sum(real_C.to(tl.int64), 0))
    keep_C = real_C & (rank_C < count)
    node_C = tl.where(keep_C, tl.cumsum(keep_C.to(tl.int32), 0), 0)
    tl.store(numbers + row * total + candidate_C, node_C.to(tl.int64), mask=candidate_C < total)
    tl.store(chosen + row * nodes + node_C, candidate_C.to(tl.int64), mask=keep_C)
    none_N = (node_N < nodes) & ((node_N == 0) | (node_N > count))
    tl.store(chosen + row * nodes + node_N, tl.full([BLOCK_N], -1, tl.int64), mask=none_N)
    for first in range(0, entries, BLOCK_X):
        entry_X = first + tl.arange(0, BLOCK_X)
        tl.store(table + row * entries + entry_X, tl.zeros([BLOCK_X], tl.int64), mask=entry_X < entries)

    chance_C = (tl.exp(score_C).to(tl.float64) * _FIXED_POINT + 0.5).to(tl.int64)
    chance_C = tl.where(keep_C, chance_C, 0)
    level_C = _level_of(candidate_C, starts, levels)
    for level in range(depth):
        promise = tl.sum(tl.where(level_C == level, chance_C, 0), 0)
        tl.store(found + row * depth + level, promise.to(tl.float64) / _FIXED_POINT)
    tl.store(expected + row, tl.sum(chance_C, 0).to(tl.float64) / _FIXED_POINT)
    tl.store(counts + row, count)
    tl.store(reached + row, tl.minimum(tl.load(allowed + row), levels))


@triton.jit(do_not_specialize=["levels", "total", "nodes", "width", "last", "facts_part", "roots_row"])
def plant_chosen(
    facts, numbers, chosen, starts, firsts, roots, tokens, depths, places, ancestors, table,
    levels, total, nodes, width, last, facts_part, roots_row, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write what a tree says of its nodes, and where the draft has them; grid [B, blocks of nodes].

    `firsts` are the places at which the passes of all depths begin, `last` is the last that there is.
    """
    row, node_T = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    facts += row * total
    inside_T, out_T = node_T < nodes, row * nodes + node_T
    candidate_T = tl.load(chosen + out_T, mask=inside_T, other=-1)
    kept_T, candidate_T = candidate_T >= 0, tl.maximum(candidate_T, 0)
    level_T = _level_of(candidate_T, starts, levels)
    token_T = tl.load(facts + candidate_T, mask=kept_T, other=-1)
    token_T = tl.where(node_T == 0, tl.load(roots + row * roots_row), token_T)
    depth_T = tl.where(kept_T, level_T + 1, 0)
    tl.store(tokens + out_T, token_T, mask=inside_T)
    tl.store(depths + out_T, depth_T, mask=inside_T)

    inner_T = kept_T & (depth_T < levels)
    slot_T = candidate_T - tl.load(starts + level_T)
    first_T = tl.load(firsts + depth_T)
    slot_T = tl.where(inner_T & (slot_T < tl.load(firsts + depth_T + 1, mask=inner_T, other=0) - first_T), slot_T, 0)
    tl.store(places + out_T, tl.minimum(first_T + slot_T, last), mask=inside_T)

    node_N, parent_T = tl.arange(0, BLOCK_N), tl.zeros_like(depth_T)
    sees_TN = (node_N[None, :] == node_T[:, None]) | (node_N == 0)[None, :]
    rank_T = tl.load(facts + 2 * facts_part + candidate_T, mask=kept_T, other=0)
    slot_T = tl.load(facts + facts_part + candidate_T, mask=kept_T, other=0)
    for step in range(1, levels):
        goes_T = kept_T & (level_T >= step)
        above_T = tl.load(starts + level_T - step, mask=goes_T, other=0) + slot_T
        above_node_T = tl.load(numbers + row * total + above_T, mask=goes_T, other=0)
        parent_T = tl.where(step == 1, above_node_T, parent_T)
        sees_TN = sees_TN | (node_N[None, :] == above_node_T[:, None])
        slot_T = tl.load(facts + facts_part + above_T, mask=goes_T, other=0)
    real_TN = inside_T[:, None] & (node_N < nodes)[None, :]
    tl.store(ancestors + out_T[:, None] * nodes + node_N[None, :], sees_TN.to(tl.uint8), mask=real_TN)
    tl.store(table + (row * nodes + parent_T) * width + rank_T, node_T.to(tl.int64), mask=kept_T)
