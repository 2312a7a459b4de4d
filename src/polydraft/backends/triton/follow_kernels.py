"""Triton kernels to verify greedy and coupled texts, and for every round's outcome. Imported only if Triton is installed.

`largest_of_parts` finds the largest logit of each part of the vocabulary; `follow` finds the largest of each node, and follows
these tokens; `conclude` packs a round's outcome, see `polydraft.engine.outcome`.

A *key* is a whole number that is larger for a larger logit and, for equal logits, for the smaller token: a logit's place in the
order of floating-point numbers, from 0 on, above the token's distance from the largest possible one.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.keys import LAST, in_order

_TOKEN_BITS = tl.constexpr(31)
_HALF = tl.constexpr(2**31)
"""The place of 0 in the order of floating-point numbers."""
_MINUS_INFINITY = tl.constexpr(0x007FFFFF)
_INFINITY = tl.constexpr(0xFF800000)
_NO_WAY = tl.constexpr(2**62)
_NODE_BITS = tl.constexpr(32)
_LOW_BITS = tl.constexpr(2**32 - 1)
_NUMBERS = tl.constexpr(6)
"""Fields of `RowOutcome` after `tokens`."""


@triton.jit
def _keys_of(logits_C, token_C):
    """Return the keys of some logits; NaN has the largest."""
    return ((in_order(logits_C).to(tl.int64) + _HALF) << _TOKEN_BITS) | (-token_C + LAST).to(tl.int64)


@triton.jit
def _token_of(key_N):
    """Return the tokens of keys; -1 if the logit is infinite or NaN."""
    score_N = key_N >> _TOKEN_BITS
    token_N = -(key_N & LAST) + LAST
    return tl.where((score_N > _MINUS_INFINITY) & (score_N < _INFINITY), token_N, -1)


@triton.jit(do_not_specialize=["nodes"])
def largest_of_parts(logits, keys, nodes, size, logits_row, logits_node, BLOCK: tl.constexpr):
    """Find the largest key of each part of the vocabulary; grid [B · N, parts]."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += (place // nodes) * logits_row + (place % nodes) * logits_node
    token_C = part * BLOCK + tl.arange(0, BLOCK)
    # Minus infinity past the end: if real tokens have it too, they have smaller ids and win.
    logits_C = tl.load(logits + token_C, mask=token_C < size, other=float("-inf")).to(tl.float32)
    tl.store(keys + place * tl.num_programs(1) + part, tl.max(_keys_of(logits_C, token_C), 0))


@triton.jit
def _ways(
    way_N, offered_N, table, tokens, token_N, nodes, count, earlier, table_node, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Search the children of every node for its token; the first match makes the smallest way.

    A *way* is a child's rank in the high bits and its node in the low bits.
    """
    node_N, rank_K = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    for start in range(0, count, BLOCK_K):
        real_NK = (node_N < nodes)[:, None] & (start + rank_K < count)[None, :]
        child_NK = tl.load(table + node_N[:, None] * table_node + (start + rank_K)[None, :], mask=real_NK, other=0)
        below_NK = tl.load(tokens + child_NK, mask=child_NK > 0, other=-1)
        offered_N = tl.maximum(offered_N, tl.max((below_NK >= 0).to(tl.int64), 1))
        rank_NK = (earlier + start + rank_K).to(tl.int64)[None, :]
        match_NK = (below_NK >= 0) & (below_NK == token_N[:, None])
        way_NK = tl.where(match_NK, (rank_NK << _NODE_BITS) | child_NK, _NO_WAY)
        way_N = tl.minimum(way_N, tl.min(way_NK, 1))
    return way_N, offered_N


@triton.jit(
    do_not_specialize=[
        "nodes", "count", "extra_count", "depth", "parts",
        "given_row", "tokens_row", "table_row", "table_node", "extra_row", "extra_node",
    ]
)  # fmt: skip
def follow(
    given, tokens, table, extra, paths, accepted, emitted, offered, faults,
    nodes, count, extra_count, depth, parts, given_row, tokens_row, table_row, table_node, extra_row, extra_node,
    KEYED: tl.constexpr, EXTRA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the verdict on the tokens that all nodes emit, given directly or as keys; grid [B]."""
    row = tl.program_id(0).to(tl.int64)
    node_N, depth_D = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    given += row * given_row
    if KEYED:
        part_M, key_N = tl.arange(0, BLOCK_M), tl.full([BLOCK_N], -1, tl.int64)
        for start in range(0, parts, BLOCK_M):
            real_NM = (node_N < nodes)[:, None] & (start + part_M < parts)[None, :]
            key_NM = tl.load(given + node_N[:, None] * parts + (start + part_M)[None, :], mask=real_NM, other=-1)
            key_N = tl.maximum(key_N, tl.max(key_NM, 1))
        token_N = _token_of(key_N)
    else:
        token_N = tl.load(given + node_N, mask=node_N < nodes, other=-1)

    # The way on from every node at once.
    tokens += row * tokens_row
    way_N, offered_N = tl.full([BLOCK_N], _NO_WAY, tl.int64), tl.zeros([BLOCK_N], tl.int64)
    way_N, offered_N = _ways(
        way_N, offered_N, table + row * table_row, tokens, token_N, nodes, count, 0, table_node, BLOCK_N, BLOCK_K
    )
    if EXTRA:
        way_N, offered_N = _ways(
            way_N, offered_N, extra + row * extra_row, tokens, token_N, nodes, extra_count, count, extra_node, BLOCK_N, BLOCK_K
        )
    goes_N = way_N != _NO_WAY
    next_N = tl.where(goes_N, way_N & _LOW_BITS, node_N.to(tl.int64))
    # Pack the next node, whether the path goes on, whether there are candidates, and the token into one number per node.
    fact_N = (((next_N << 1) | goes_N.to(tl.int64)) << 1) | offered_N
    fact_N = (fact_N << _NODE_BITS) | (token_N + 1)

    node, passed = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    token, some = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    path_D, token_D = tl.zeros([BLOCK_D], tl.int64), tl.zeros([BLOCK_D], tl.int64)
    for level in range(depth + 1):
        fact = tl.sum(tl.where(node_N == node, fact_N, 0), 0)
        token, some = (fact & _LOW_BITS) - 1, (fact >> _NODE_BITS) & 1
        path_D = tl.where(depth_D == level, node, path_D)
        token_D = tl.where(depth_D == level, token, token_D)
        goes = (fact >> (_NODE_BITS + 1)) & 1
        passed += tl.where(level < depth, goes, 0)
        node = fact >> (_NODE_BITS + 2)

    places, real_D = row * (depth + 1) + depth_D, depth_D <= depth
    tl.store(paths + places, path_D, mask=real_D)
    tl.store(emitted + places, token_D, mask=real_D)
    tl.store(accepted + row, passed)
    tl.store(offered + row, passed + some)
    tl.store(faults + row, (token < 0).to(tl.int64))


@triton.jit(
    do_not_specialize=[
        "nodes", "candidates", "count", "depth",
        "paths_row", "emitted_row", "tokens_row", "depths_row", "table_row", "table_node",
    ]
)  # fmt: skip
def conclude(
    paths, emitted, accepted, offered, faults, tokens, depths, table, active, tails, packed, kept,
    nodes, candidates, count, depth, paths_row, emitted_row, tokens_row, depths_row, table_row, table_node,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack a round's outcome, count what each row keeps, and update its last two tokens; grid [B]."""
    row = tl.program_id(0).to(tl.int64)
    emitted, tokens, table = emitted + row * emitted_row, tokens + row * tokens_row, table + row * table_row
    passed = tl.load(accepted + row)
    tl.store(kept + row, tl.where(tl.load(active + row) != 0, passed + 1, 0))

    # The root is not read here, because it may be a view of the last token.
    drafted_X, longest_X = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, candidates, BLOCK):
        node_X = start + tl.arange(0, BLOCK)
        token_X = tl.load(tokens + node_X, mask=(node_X > 0) & (node_X < candidates), other=-1)
        drafted_X += (token_X >= 0).to(tl.int64)
    for start in range(0, nodes * count, BLOCK):
        entry_X = start + tl.arange(0, BLOCK)
        place_X = entry_X // count * table_node + entry_X % count
        child_X = tl.load(table + place_X, mask=entry_X < nodes * count, other=0)
        token_X = tl.load(tokens + child_X, mask=child_X > 0, other=-1)
        depth_X = tl.load(depths + row * depths_row + child_X, mask=token_X >= 0, other=0)
        longest_X = tl.maximum(longest_X, depth_X)

    first = tl.load(paths + row * paths_row + tl.minimum(depth, 1))
    branch = tl.where(first > 0, count, -1)
    for start in range(0, count, BLOCK):
        rank_X = start + tl.arange(0, BLOCK)
        child_X = tl.load(table + rank_X, mask=rank_X < count, other=-1)
        branch = tl.minimum(branch, tl.min(tl.where(child_X == first, rank_X, count), 0))
    branch = tl.where(branch == count, 0, branch)  # further children count as the first one

    depth_D = tl.arange(0, BLOCK_D)
    packed += row * (depth + 1 + _NUMBERS)
    token_D = tl.load(emitted + depth_D, mask=depth_D <= depth, other=-1)
    tl.store(packed + depth_D, token_D, mask=depth_D <= depth)
    packed += depth + 1
    tl.store(packed, passed)
    tl.store(packed + 1, tl.load(offered + row))
    tl.store(packed + 2, tl.load(faults + row))
    tl.store(packed + 3, tl.max(longest_X, 0))
    tl.store(packed + 4, branch.to(tl.int64))
    tl.store(packed + 5, tl.sum(drafted_X, 0))

    before = tl.load(tails + row * 2 + 1)
    before = tl.where(passed > 0, tl.load(emitted + passed - 1, mask=passed > 0, other=-1), before)
    tl.store(tails + row * 2, before)
    tl.store(tails + row * 2 + 1, tl.load(emitted + passed))
