"""Triton kernels for dynamic trees of the likeliest tokens; launched by `growth`. Imported only if Triton is installed.

`rank_and_sum` finds the likeliest tokens of each part of the vocabulary, `grow_level` the candidates of a level and which of
them get children, `choose_candidates` the candidates of all levels that make the tree; `plant_chosen` writes its tables.

Candidates are stored level by level, the best of a level first, so the front of a level is its beginning. For each candidate, a
table of facts has its token, its parent's index in the front above, and how many of the parent's children come before it.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.draw_kernels import tokens_of
from polydraft.backends.triton.keys import LAST, NO_KEY, as_number, in_order, keys_of, number_of

_PLACES = tl.constexpr(2**13 - 1)
"""Low bits that are the same in all half-precision numbers of one sign once they are float32, so they can hold a place."""
_NOTHING = tl.constexpr(-(2**31))
"""`NO_KEY` in 32 bits."""


@triton.jit
def _with_places(order_X, place_X, NARROW: tl.constexpr):
    """Return keys that sort like the numbers, equal ones by place, first place largest; in 32 bits for half precision.

    A warp finds the largest 32-bit key with one instruction.
    """
    if NARROW:
        key_X = (order_X & ~_PLACES) | (-place_X + _PLACES)
    else:
        key_X = (order_X.to(tl.int64) << 32) | (-place_X + _PLACES).to(tl.int64)
    return key_X


@triton.jit
def _order_in(key_X, NARROW: tl.constexpr):
    """Return the numbers in keys, as whole numbers in their order."""
    return tl.where(key_X < 0, key_X | _PLACES, key_X & ~_PLACES) if NARROW else (key_X >> 32).to(tl.int32)


@triton.jit
def _largest(key_SEL, count, none, BLOCK_K: tl.constexpr):
    """Return the `count` largest keys of each strip S, largest first, padded with `none`.

    L is the lanes of a warp. If there are as many warps as strips, each warp has its own strip and none waits for another: the
    compiler spreads the first axis over warps and keeps the second in registers, as long as threads load single numbers.
    """
    rank_K, best_S = tl.arange(0, BLOCK_K), tl.max(tl.max(key_SEL, 1), 1)
    key_SK = tl.where(rank_K[None, :] == 0, best_S[:, None], none)
    for rank in range(1, count):
        key_SEL = tl.where(key_SEL == best_S[:, None, None], none, key_SEL)
        best_S = tl.max(tl.max(key_SEL, 1), 1)
        key_SK = tl.where(rank_K[None, :] == rank, best_S[:, None], key_SK)
    return key_SK


# If a row's length were specialised, threads would load several adjacent numbers, and a warp would have pieces of many strips.
@triton.jit(do_not_specialize=["columns", "count", "nodes", "logits_row", "tops_part"])
def rank_and_sum(
    logits, temperatures, keys, tops, columns, count, nodes, logits_row, tops_part,
    NARROW: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Find the `count` largest of each part of a node's logits, and add up the weights of its strips; grid [B · nodes, parts].

    A weight is the exponential of a logit minus its strip's top, the largest; sums are written after all tops.
    """
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    strip_S, lane_L = tl.arange(0, BLOCK_S), tl.arange(0, 32)
    inner_SEL = (strip_S[:, None, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :, None]) * 32 + lane_L[None, None, :]
    first = part * (BLOCK_E * BLOCK_S * 32)
    real_SEL = first + inner_SEL < columns
    number_SEL = tl.load(logits + place * logits_row + first + inner_SEL, mask=real_SEL, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + place // nodes)
    key_SEL = _with_places(in_order(number_SEL), inner_SEL, NARROW)
    none = tl.full([], _NOTHING if NARROW else NO_KEY, key_SEL.dtype)
    key_SEL = tl.where(real_SEL, key_SEL, none)
    top_S = as_number(_order_in(tl.max(tl.max(key_SEL, 1), 1), NARROW))
    weight_SEL = tl.exp((number_SEL - top_S[:, None, None]) / temperature)
    weight_SEL = tl.where(number_SEL > float("-inf"), weight_SEL, 0.0)
    place = place * tl.num_programs(1) + part
    two_S2 = tl.join(top_S, tl.sum(tl.sum(weight_SEL, 1), 1))
    tl.store(tops + (place * BLOCK_S + strip_S)[:, None] + tl.arange(0, 2)[None, :] * tops_part, two_S2)

    key_SK, rank_1X = _largest(key_SEL, count, none, BLOCK_K), tl.arange(0, BLOCK_S * BLOCK_K)[None, :]
    if BLOCK_S > 1:
        # A key's place is the number of better ones. Missing keys are below all numbers, but made distinct to have ranks.
        own_SK = strip_S[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        key_SK = tl.where(key_SK == none, none + own_SK, key_SK)
    key_X = tl.reshape(key_SK, [BLOCK_S * BLOCK_K])
    key_1X = key_X[None, :]
    if BLOCK_S > 1:
        rank_1X = tl.sum((key_X[:, None] > key_1X).to(tl.int32), 0, keep_dims=True)
    column_1X = -(key_1X & _PLACES).to(tl.int32) + _PLACES + first
    found_1X = (_order_in(key_1X, NARROW).to(tl.int64) << 32) | (-column_1X + LAST).to(tl.int64)
    tl.store(keys + place * count + rank_1X, tl.where(key_1X < none + _PLACES, NO_KEY, found_1X), mask=rank_1X < count)


@triton.jit(
    do_not_specialize=[
        "level", "width", "entries", "strips", "count", "total", "earlier", "start", "room", "front", "seen", "facts_part",
    ]
)  # fmt: skip
def grow_level(
    keys, tops, sums, temperatures, vocabulary, facts, scores, above, visible,
    level, width, entries, strips, count, total, earlier, start, room, front, seen, facts_part,
    STEP: tl.constexpr, PARTIAL: tl.constexpr, NARROW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Write the `room` best children of `width` nodes, and what the `front` best of them see; grid [B].

    Nodes whose largest logit is not finite have no children. Each node has `entries` keys, and `strips` of logits.
    """
    row = tl.program_id(0).to(tl.int64)
    node_W, rank_K, lane_L = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_K), tl.arange(0, 32)
    real_W = node_W < width
    # All loads come first: each wait for memory takes as long as everything else. Each warp has a node, as in `_largest`.
    temperature = tl.load(temperatures + row)
    parent_W = tl.load(scores + row * total + earlier + node_W, mask=real_W & (level > 0), other=0.0)
    strip_1SL = tl.arange(0, BLOCK_S)[None, :, None] * 32 + lane_L[None, None, :]
    strip_WSL = (row * width + node_W)[:, None, None] * strips + strip_1SL
    real_WSL = real_W[:, None, None] & (strip_1SL < strips)
    top_WSL = tl.load(tops + strip_WSL, mask=real_WSL, other=float("-inf"))
    sum_WSL = tl.load(sums + strip_WSL, mask=real_WSL, other=0.0)
    entry_1EL = tl.arange(0, BLOCK_E)[None, :, None] * 32 + lane_L[None, None, :]
    first_W = (row * width + node_W) * entries
    real_WEL = real_W[:, None, None] & (entry_1EL < entries)
    found_WEL = tl.load(keys + first_W[:, None, None] + entry_1EL, mask=real_WEL, other=NO_KEY)
    order_WEL = (found_WEL >> 32).to(tl.int32)
    # Equal numbers of different parts come in the order of their columns, so an entry's place can serve as its key's.
    key_WEL = _with_places(order_WEL, entry_1EL, NARROW)
    none = tl.full([], _NOTHING if NARROW else NO_KEY, key_WEL.dtype)
    best_WK = _largest(key_WEL, count, none, BLOCK_K)
    entry_WK = -(best_WK & _PLACES).to(tl.int32) + _PLACES
    real_WK = real_W[:, None] & (rank_K < count)[None, :]
    key_WK = tl.load(keys + first_W[:, None] + entry_WK, mask=real_WK & (entry_WK < entries), other=NO_KEY)
    column_WK = -(key_WK & LAST).to(tl.int32) + LAST
    token_WK = tokens_of(vocabulary, column_WK, key_WK != NO_KEY, PARTIAL)
    largest_W = as_number(tl.max(tl.max(order_WEL, 1), 1))
    weight_WSL = sum_WSL * tl.exp((top_WSL - largest_W[:, None, None]) / temperature)
    mass_W = tl.sum(tl.sum(tl.where(sum_WSL > 0, weight_WSL, 0.0), 1), 1)

    number_WK = number_of(key_WK)
    chance_WK = (number_WK - largest_W[:, None]) / temperature - tl.log(mass_W)[:, None]
    score_WK = parent_W[:, None] + chance_WK - STEP
    # If the largest logit is not finite, all scores are −∞ or NaN, and comparisons with NaN are false.
    score_WK = tl.where(score_WK > float("-inf"), score_WK, float("-inf"))
    token_WK = tl.where(score_WK > float("-inf"), token_WK, -1)

    # A candidate's place is the number of better ones; padding comes last.
    own_WK = node_W[:, None] * BLOCK_K + rank_K[None, :]
    order_X = tl.reshape(keys_of(score_WK, own_WK, real_WK), [BLOCK_W * BLOCK_K])
    own_X = tl.arange(0, BLOCK_W * BLOCK_K)
    rank_X = tl.sum((order_X[:, None] > order_X[None, :]).to(tl.int32), 0)

    # A node sees what its parent sees, and itself.
    front_F, place_U = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_U)
    parent_F = tl.sum(tl.where(rank_X[None, :] == front_F[:, None], (own_X // BLOCK_K)[None, :], 0), 1)
    earlier_FU = (front_F < front)[:, None] & (place_U < seen)[None, :]
    seen_FU = tl.load(
        above + (row * width + parent_F)[:, None] * seen + place_U[None, :], mask=earlier_FU & (level > 0), other=1
    )  # fmt: skip

    place_X, kept_X = row * total + start + rank_X, rank_X < room
    tl.store(scores + place_X, tl.reshape(score_WK, [BLOCK_W * BLOCK_K]), mask=kept_X)
    tl.store(facts + place_X, tl.reshape(token_WK, [BLOCK_W * BLOCK_K]), mask=kept_X)
    tl.store(facts + facts_part + place_X, (own_X // BLOCK_K).to(tl.int64), mask=kept_X)
    tl.store(facts + 2 * facts_part + place_X, (own_X % BLOCK_K).to(tl.int64), mask=kept_X)

    seen_FU = tl.where(earlier_FU, seen_FU, ((place_U - seen)[None, :] == front_F[:, None]).to(seen_FU.dtype))
    real_FU = (front_F < front)[:, None] & (place_U < seen + front)[None, :]
    tl.store(visible + (row * front + front_F)[:, None] * (seen + front) + place_U[None, :], seen_FU, mask=real_FU)


@triton.jit
def _level_of(candidate_X, starts, levels):
    """Return the candidates' levels, from 0."""
    level_X = tl.zeros_like(candidate_X)
    for number in range(1, levels):
        level_X += (candidate_X >= tl.load(starts + number)).to(level_X.dtype)
    return level_X


@triton.jit
def _threshold(key_C, total, count):
    """Return a key that exactly `count` of the `total` real keys reach, by bisection; all keys are different."""
    order_C = (key_C >> 32).to(tl.int32)
    lowest = tl.min(tl.where(key_C == NO_KEY, LAST, order_C), 0).to(tl.int64) << 32
    highest = (tl.max(order_C, 0).to(tl.int64) + 1) << 32
    key, reaching = lowest, total
    while reaching != count:
        lowest, highest = tl.where(reaching > count, key, lowest), tl.where(reaching > count, highest, key)
        key = (lowest >> 1) + (highest >> 1) + (lowest & highest & 1)
        reaching = tl.sum((key_C >= key).to(tl.int32), 0)
    return key


@triton.jit(do_not_specialize=["levels", "total", "nodes", "entries"])
def choose_candidates(
    scores, starts, numbers, chosen, table, levels, total, nodes, entries,
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Give a row's best candidates the numbers 1, 2, ... as nodes, in their order, and all others 0; grid [B].

    Parents have better scores than their children and come before them, and the kept candidates of a level are its first ones.
    Writes which candidate each node is, −1 for none, and clears the `entries` of the table of children.
    """
    row = tl.program_id(0).to(tl.int64)
    level_L, place_P, node_N = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    start_L = tl.load(starts + level_L, mask=level_L < levels, other=0)
    stop_L = tl.load(starts + level_L + 1, mask=level_L < levels, other=0)
    for first in range(0, entries, BLOCK_X):
        entry_X = first + tl.arange(0, BLOCK_X)
        tl.store(table + row * entries + entry_X, tl.zeros([BLOCK_X], tl.int64), mask=entry_X < entries)

    candidate_LP = start_L[:, None] + place_P[None, :]
    inside_LP = candidate_LP < stop_L[:, None]
    score_LP = tl.load(scores + row * total + candidate_LP, mask=inside_LP, other=float("-inf"))
    real_LP = score_LP > float("-inf")
    key_LP = keys_of(score_LP, candidate_LP.to(tl.int32), real_LP)
    key_C = tl.reshape(key_LP, [BLOCK_L * BLOCK_P])
    all_real = tl.sum((key_C > NO_KEY).to(tl.int32), 0)
    count = tl.minimum(nodes - 1, all_real)
    keep_LP = real_LP & (key_LP >= _threshold(key_C, all_real, count))
    kept_L = tl.sum(keep_LP.to(tl.int32), 1)
    node_LP = tl.where(keep_LP, (tl.cumsum(kept_L, 0) - kept_L)[:, None] + place_P[None, :] + 1, 0)
    tl.store(numbers + row * total + candidate_LP, node_LP.to(tl.int64), mask=inside_LP)
    tl.store(chosen + row * nodes + node_LP, candidate_LP, mask=keep_LP)
    none_N = (node_N < nodes) & ((node_N == 0) | (node_N > count))
    tl.store(chosen + row * nodes + node_N, tl.full([BLOCK_N], -1, tl.int64), mask=none_N)


@triton.jit(do_not_specialize=["levels", "total", "nodes", "width", "last", "facts_part", "roots_row"])
def plant_chosen(
    facts, numbers, chosen, starts, firsts, roots, tokens, depths, places, ancestors, table,
    levels, total, nodes, width, last, facts_part, roots_row, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tree's tables, and the nodes' places in the draft's passes; grid [B, blocks of nodes].

    `firsts` are the places where the pass over each depth begins; `last` is the last place.
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
