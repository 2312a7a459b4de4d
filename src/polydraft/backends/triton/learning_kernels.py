"""Triton kernels of what rows learn of rounds; see `polydraft.draft.fused_learning`. Imported only where Triton is there."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def allow_sizes(rests, sharing, now, levels, nodes, allowed, wanted, rows, BLOCK: tl.constexpr):
    """Write the levels and nodes that each row's next tree may have, no level for rows that rest; grid [B]."""
    row = tl.program_id(0).to(tl.int64)
    shares, ready = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, rows, BLOCK):
        row_X = first + tl.arange(0, BLOCK)
        shares_X = tl.load(sharing + row_X, mask=row_X < rows, other=0).to(tl.int32)
        ready_X = tl.load(rests + row_X, mask=row_X < rows, other=1) == 0
        shares, ready = shares + shares_X, ready + tl.where(ready_X, shares_X, 0)
    enough = 2 * tl.sum(ready, 0) >= tl.sum(shares, 0)
    drafts = (tl.load(rests + row) == 0) & (enough | (tl.load(sharing + row) == 0))
    size = tl.load(now + row)
    tl.store(allowed + row, tl.where(drafts, tl.load(levels + size), 0))
    tl.store(wanted + row, tl.load(nodes + size))


@triton.jit(do_not_specialize=["depth", "sizes", "most"])
def learn_round(
    keeps, accepts, expected, drafted_nodes, drafted_levels, found,
    passes, level_costs, overheads, promised, accepted, tokens, spent, rests, trials, first_trials, next_rests,
    means, size_levels, costs, now, then, reports, depth, sizes, most,
    MEMORY: tl.constexpr, RATE_MEMORY: tl.constexpr, RATE_PRIOR: tl.constexpr,
    LOSING: tl.constexpr, WINNING: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, ADAPTIVE: tl.constexpr,
    LEVEL_MEMORY: tl.constexpr, GROWTH: tl.constexpr, STAY: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Do what `RowPolicy.learn`, `SizeChoice.learn` and `report` do; grid [B]."""
    row = tl.program_id(0).to(tl.int64)
    active = tl.load(keeps + row) > 0
    levels = tl.where(active, tl.load(drafted_levels + row), 0)
    drafted = levels > 0
    hits = tl.load(accepts + row).to(tl.float64)
    # What rows that did not draft have not learnt is written back as it was.
    was_promised, was_accepted = tl.load(promised + row), tl.load(accepted + row)
    was_tokens, was_spent = tl.load(tokens + row), tl.load(spent + row)
    cost = tl.load(passes + row * most + tl.load(drafted_nodes + row))
    cost += tl.load(level_costs + row) * levels + tl.load(overheads + row)
    now_promised = tl.where(drafted, MEMORY * was_promised + tl.load(expected + row).to(tl.float64), was_promised)
    now_accepted = tl.where(drafted, MEMORY * was_accepted + hits, was_accepted)
    now_tokens = tl.where(drafted, RATE_MEMORY * was_tokens + hits + 1, was_tokens)
    now_spent = tl.where(drafted, RATE_MEMORY * was_spent + cost, was_spent)
    tl.store(promised + row, now_promised)
    tl.store(accepted + row, now_accepted)
    rate, rest = now_tokens / now_spent, tl.load(rests + row)
    if ADAPTIVE:
        trial, next_rest = tl.load(trials + row), tl.load(next_rests + row)
        rest = tl.where(active & (levels == 0), tl.maximum(rest - 1, 0), rest)
        trial = tl.where(drafted, tl.maximum(trial - 1, 0), trial)
        loses = drafted & (trial == 0) & (rate < LOSING)
        rest = tl.where(loses, next_rest, rest)
        trial = tl.where(loses, tl.load(first_trials + row), trial)
        next_rest = tl.where(loses, tl.minimum(2 * next_rest, LONGEST), next_rest)
        next_rest = tl.where(drafted & (rate > WINNING), SHORTEST, next_rest)
        tl.store(rests + row, rest)
        tl.store(trials + row, trial)
        tl.store(next_rests + row, next_rest)
        now_tokens = tl.where(loses, RATE_PRIOR, now_tokens)
        now_spent = tl.where(loses, RATE_PRIOR, now_spent)
        rate = now_tokens / now_spent
    tl.store(tokens + row, now_tokens)
    tl.store(spent + row, now_spent)

    level_D, size_X = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_X)
    mean_D = tl.load(means + row * depth + level_D, mask=level_D < depth, other=0.0)
    found_D = tl.load(found + row * depth + level_D, mask=level_D < depth, other=0.0).to(tl.float64)
    promise_D = now_accepted / now_promised * found_D
    mean_D = tl.where(level_D < levels, LEVEL_MEMORY * mean_D + (1 - LEVEL_MEMORY) * promise_D, mean_D)
    last = tl.sum(tl.where(level_D == tl.maximum(levels - 1, 0), mean_D, 0.0), 0)
    untried_D = tl.zeros([BLOCK_D], tl.float64) + last
    for step in range(depth):
        untried_D = tl.where(level_D - levels >= step, untried_D * GROWTH, untried_D)
    mean_D = tl.where((level_D >= levels) & drafted, untried_D, mean_D)
    tl.store(means + row * depth + level_D, mean_D, mask=level_D < depth)

    chosen = tl.load(then + row)
    real_X = (size_X >= FIRST) & (size_X < sizes)
    end_X = tl.maximum(tl.load(size_levels + size_X, mask=real_X, other=0), 1)
    gain_X = tl.sum(tl.where((level_D[None, :] < end_X[:, None]) & (level_D < depth)[None, :], mean_D[None, :], 0.0), 1)
    price_X = tl.load(costs + row * sizes + size_X, mask=real_X, other=0.0)
    net_X = gain_X - tl.maximum(rate, 1.0) * price_X + STAY * (size_X == chosen).to(tl.float64)
    net_X = tl.where(real_X, net_X, float("-inf"))
    best = tl.min(tl.where(net_X == tl.max(net_X, 0), size_X, BLOCK_X), 0)
    wanted = tl.where(drafted, best.to(tl.int64), chosen)
    tl.store(now + row, chosen)
    tl.store(then + row, wanted)
    tells = active & (rest < 2) if FIRST else active
    tl.store(reports + row, tl.where(tells, wanted, 0))
