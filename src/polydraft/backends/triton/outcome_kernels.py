"""The Triton kernel of a round's outcome; see `polydraft.engine.outcome`. Imported only where Triton is there."""

import triton
import triton.language as tl

NUMBERS = tl.constexpr(6)
"""Of `RowOutcome`, beside tokens."""


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
    """Pack what a round brought, count what is kept, and move the last two tokens on; grid [B]."""
    row = tl.program_id(0).to(tl.int64)
    emitted, tokens, table = emitted + row * emitted_row, tokens + row * tokens_row, table + row * table_row
    passed = tl.load(accepted + row)
    tl.store(kept + row, tl.where(tl.load(active + row) != 0, passed + 1, 0))

    # The root may be a view of the last token: it is not read here.
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
    packed += row * (depth + 1 + NUMBERS)
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
