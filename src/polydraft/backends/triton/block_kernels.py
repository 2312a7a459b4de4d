"""Triton kernels of the block walk with `hybrid`, behind `polydraft.backends.triton.verification`.

They do what `polydraft.verify.contest` and `polydraft.verify.block` describe, at all nodes at once: `prepare`, `fill_cells`
and `race` pick a child of every node, `measure` adds up the target's excess along each row's path, `finish` draws where it
stops and what is emitted there. Probabilities are whole numbers, as in `polydraft.backends.triton.draw_kernels`.

A single child needs no race: at such a place the first cell holds the draft's total, `outside` the target's, and the first
quotient applies to all tokens.

A *place* is one of the B · N nodes. For each place the kernels pass on `facts`: the number of children that the draft knows,
how many of them are certain, which of the row's distributions they were drawn from, the fault, and whether there are children.
"""

import triton
import triton.language as tl

from polydraft.backends.triton.draw_kernels import BELOW_ONE, ONE, count_certain, fixed

FACTS = tl.constexpr(5)


@triton.jit
def _cells_of(target_C, distribution_C, scale, CELLS: tl.constexpr):
    """Return the cell of each token: equal steps of p/(p + q), by operations that preserve the order of q/p."""
    ratio_C = distribution_C.to(tl.float64) / tl.maximum(target_C, 1).to(tl.float64)
    # An explicit fma, so that every kernel rounds alike.
    size_C = tl.fma(ratio_C, tl.full([], 1 / CELLS, tl.float64) * scale, tl.full([], 1 / CELLS, tl.float64))
    cell_C = tl.minimum((1.0 / size_C).to(tl.int32), CELLS) - 1
    return tl.where(target_C > 0, tl.maximum(cell_C, 0), 0)


@triton.jit
def _columns_of(columns, token_C, real_C, PARTIAL: tl.constexpr):
    """Return the draft's column of each token; -1 for tokens that the draft does not know."""
    column_C = tl.where(real_C, token_C, -1).to(tl.int64)
    if PARTIAL:
        column_C = tl.load(columns + token_C, mask=real_C, other=-1)
    return column_C


@triton.jit(do_not_specialize=["nodes", "count", "levels", "distributions_row"])
def prepare(
    target, drafts, distribution_rows, depths, starts, tokens, table, columns, cells, outside, known, facts, scales,
    nodes, count, levels, size, width, distributions_row, distribution_rows_row, depths_row, tokens_row, table_row, table_node,
    THRESHOLD: tl.constexpr, PARTIAL: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Look up each place's children, count the certain ones, and clear its cells; grid [B · N]."""
    place = tl.program_id(0).to(tl.int64)
    row, node = place // nodes, place % nodes
    rank_K = tl.arange(0, BLOCK_K)
    child_K = tl.load(table + row * table_row + node * table_node + rank_K, mask=rank_K < count, other=0)
    token_K = tl.load(tokens + row * tokens_row + child_K, mask=child_K > 0, other=-1)
    column_K = _columns_of(columns, token_K, token_K >= 0, PARTIAL)
    tl.store(known + place * count + rank_K, column_K, mask=rank_K < count)
    children = tl.sum((column_K >= 0).to(tl.int32), 0)
    level = tl.minimum(tl.load(depths + row * depths_row + node), levels - 1)
    distribution = tl.load(distribution_rows + row * distribution_rows_row + node) + tl.load(starts + level)
    distribution = row * distributions_row + tl.minimum(distribution, distributions_row - 1)
    certain, scale = 0, tl.full([], 1.0, tl.float64)
    first = tl.load(target + place * size)
    fault = tl.where(first != first, 1, 0)
    if children > 0:
        total_C, broken_C = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, BLOCK):
            column_C = start + tl.arange(0, BLOCK)
            probs_C = tl.load(drafts + distribution * width + column_C, mask=column_C < width, other=0.0)
            total_C += fixed(probs_C)
            broken_C |= (probs_C != probs_C).to(tl.int32)
        total = tl.sum(total_C, 0)
        fault = tl.where((fault == 0) & (tl.max(broken_C, 0) > 0), 2, fault)
        weight_K = fixed(tl.load(drafts + distribution * width + column_K, mask=column_K >= 0, other=0.0))
        next_K = tl.load(table + row * table_row + node * table_node + rank_K + 1, mask=rank_K + 1 < count, other=0)
        next_K = tl.load(tokens + row * tokens_row + next_K, mask=next_K > 0, other=-1)
        certain = count_certain(weight_K, next_K != token_K, total, children, THRESHOLD, BLOCK_K)
        rest = total - tl.sum(tl.where(rank_K < certain, weight_K, 0), 0)
        scale = total.to(tl.float64) / tl.maximum(rest, 1).to(tl.float64)
        if children == 1:
            tl.store(cells + place * 2 * CELLS, total)
        else:
            for start in range(0, 2 * CELLS, BLOCK):
                cell_C = start + tl.arange(0, BLOCK)
                tl.store(cells + place * 2 * CELLS + cell_C, tl.zeros([BLOCK], tl.int64), mask=cell_C < 2 * CELLS)
    tl.store(outside + place, tl.zeros([], tl.int64))
    tl.store(scales + place, scale)
    tl.store(facts + place * FACTS, children)
    tl.store(facts + place * FACTS + 1, certain)
    tl.store(facts + place * FACTS + 2, distribution.to(tl.int32))
    tl.store(facts + place * FACTS + 3, fault)
    tl.store(facts + place * FACTS + 4, (tl.max(token_K, 0) >= 0).to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def fill_cells(
    target, drafts, columns, cells, outside, known, facts, scales, count, size, width,
    PARTIAL: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the tokens that may race to their cells, target weights first, then draft weights; grid [B · N, blocks of tokens]."""
    place = tl.program_id(0).to(tl.int64)
    children = tl.load(facts + place * FACTS)
    if children == 0:
        return
    token_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_C = token_C < size
    target_C = fixed(tl.load(target + place * size + token_C, mask=real_C, other=0.0))
    if children == 1:
        tl.atomic_add(outside + place, tl.sum(target_C, 0), sem="relaxed")
        return
    certain, distribution = tl.load(facts + place * FACTS + 1), tl.load(facts + place * FACTS + 2).to(tl.int64)
    column_C = _columns_of(columns, token_C, real_C, PARTIAL)
    racing_C = column_C >= 0
    if PARTIAL:
        tl.atomic_add(outside + place, tl.sum(tl.where(racing_C, 0, target_C), 0), sem="relaxed")
    distribution_C = fixed(tl.load(drafts + distribution * width + column_C, mask=racing_C, other=0.0))
    for rank in range(certain):
        racing_C &= column_C != tl.load(known + place * count + rank)
    cell_C = _cells_of(target_C, distribution_C, tl.load(scales + place), CELLS)
    cells += place * 2 * CELLS
    tl.atomic_add(cells + cell_C, target_C, mask=racing_C & (target_C > 0), sem="relaxed")
    tl.atomic_add(cells + CELLS + cell_C, distribution_C, mask=racing_C & (distribution_C > 0), sem="relaxed")


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _share(part, whole):
    """Divide; where the whole is 0, the part is 0 or unused."""
    return part / tl.maximum(whole, 1e-300)


@triton.jit
def _slopes(above_K, below_K, racing):
    """Return Σ_{j<n} X_k^j X_{k−1}^{n−1−j}."""
    slope_K, power_K = above_K * 0.0, above_K * 0.0 + 1.0
    for _ in range(racing):
        slope_K = slope_K * below_K + power_K
        power_K *= above_K
    return slope_K


@triton.jit(do_not_specialize=["nodes", "count", "numbers", "depth", "uniform_row"])
def race(
    target, drafts, cells, outside, known, facts, scales, table, tokens, depths, uniforms, quotients, picks, ratios, masses,
    nodes, count, depth, numbers, size, width, depths_row, tokens_row, table_row, table_node, uniform_row,
    CELLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Plan each place's race and run it; grid [B · N].

    Writes the winner's node and its p/r, the target's mass, and for each cell the selected child's distribution divided by the
    draft's weight.
    """
    place = tl.program_id(0).to(tl.int64)
    row, node = place // nodes, place % nodes
    children = tl.load(facts + place * FACTS)
    if children == 0:
        tl.store(picks + place, tl.full([], -1, tl.int64))
        tl.store(ratios + place, tl.zeros([], tl.float64))
        return
    certain, distribution = tl.load(facts + place * FACTS + 1), tl.load(facts + place * FACTS + 2).to(tl.int64)
    rank_K = tl.arange(0, BLOCK_K)
    column_K = tl.load(known + place * count + rank_K, mask=rank_K < count, other=-1)
    child_K = tl.load(table + row * table_row + node * table_node + rank_K, mask=rank_K < count, other=0)
    if children == 1:
        # The only child always wins: its distribution is the draft's.
        column, child = tl.max(column_K, 0), tl.max(tl.where(column_K >= 0, child_K, 0), 0)
        mass = tl.load(outside + place).to(tl.float64)
        quotient = tl.full([], 1.0, tl.float64) / tl.maximum(tl.load(cells + place * 2 * CELLS), 1).to(tl.float64)
        wanted = fixed(tl.load(target + place * size + tl.load(tokens + row * tokens_row + child))).to(tl.float64)
        chance = fixed(tl.load(drafts + distribution * width + column)).to(tl.float64) * quotient * mass
        tl.store(quotients + place * CELLS, quotient)
        tl.store(picks + place, tl.where(tl.load(facts + place * FACTS + 3) == 0, child, -1))
        tl.store(ratios + place, tl.where(chance > 0, _share(wanted, chance), 0.0))
        tl.store(masses + place, mass)
        return
    racing = children - certain
    cell_C = tl.arange(0, CELLS)
    token_K = tl.load(tokens + row * tokens_row + child_K, mask=column_K >= 0, other=0)
    target_K = fixed(tl.load(target + place * size + token_K, mask=column_K >= 0, other=0.0))
    distribution_K = fixed(tl.load(drafts + distribution * width + column_K, mask=column_K >= 0, other=0.0))
    cell_K = _cells_of(target_K, distribution_K, tl.load(scales + place), CELLS)
    apart_K, racing_K = rank_K < certain, (rank_K >= certain) & (column_K >= 0)

    # The plan, cell by cell.
    target_C = tl.load(cells + place * 2 * CELLS + cell_C)
    weight_C = tl.load(cells + place * 2 * CELLS + CELLS + cell_C)
    certain_mass = tl.sum(tl.where(apart_K, target_K, 0), 0)
    mass = (tl.sum(target_C, 0) + certain_mass + tl.load(outside + place)).to(tl.float64)
    total = tl.maximum(tl.sum(weight_C, 0), 1).to(tl.float64)
    reach_C = tl.cumsum(weight_C, 0)
    above_C, below_C = reach_C.to(tl.float64) / total, (reach_C - weight_C).to(tl.float64) / total
    own_C, wanted_C = weight_C.to(tl.float64) / total, _share(target_C.to(tl.float64), mass)
    raised_C, lower_C = above_C, below_C
    for _ in range(1, racing):
        raised_C *= above_C
        lower_C *= below_C
    excess_C = raised_C - _share(tl.cumsum(target_C, 0).to(tl.float64), mass)
    # The excess before the first cell is 0.
    up_C = tl.maximum(tl.associative_scan(excess_C, 0, _larger), 0.0)
    hull_C = tl.minimum(up_C, tl.associative_scan(excess_C, 0, _larger, reverse=True))
    hull_before_C = tl.where(cell_C > 0, tl.gather(hull_C, tl.maximum(cell_C - 1, 0), 0), 0.0)
    # At most n q, so that rounding leaves nothing to cells without draft mass.
    selected_C = tl.minimum(tl.maximum(wanted_C + hull_C - hull_before_C, 0.0), own_C * racing)
    drift_C = selected_C - raised_C + lower_C
    gain_C = tl.maximum(drift_C, 0.0)
    gains_C, losses_C = tl.cumsum(gain_C, 0), tl.cumsum(gain_C - drift_C, 0)
    beyond_C = tl.maximum(selected_C - wanted_C, 0.0)
    handed = tl.minimum(_share(_share(certain_mass.to(tl.float64), mass), tl.sum(beyond_C, 0)), 1.0)
    left_C = selected_C - beyond_C * handed
    quotient_C = left_C / tl.maximum(weight_C, 1).to(tl.float64)
    tl.store(quotients + place * CELLS + cell_C, quotient_C)

    # Places, by two random numbers per child.
    level = tl.minimum(tl.load(depths + row * depths_row + node), depth - 1)
    uniforms += row * uniform_row + level * numbers
    partner_K = tl.load(uniforms + 1 + 2 * rank_K, mask=rank_K < count, other=0.0)
    spot_K = tl.load(uniforms + 2 + 2 * rank_K, mask=rank_K < count, other=0.0)
    drift_K, own_K, above_K = tl.gather(drift_C, cell_K, 0), tl.gather(own_C, cell_K, 0), tl.gather(above_C, cell_K, 0)
    gaining_K, amount_K = drift_K > 0, tl.abs(drift_K)
    end_K = tl.where(gaining_K, tl.gather(gains_C, cell_K, 0), tl.gather(losses_C, cell_K, 0))
    mark_K = end_K - (1 - partner_K) * amount_K
    other_K = tl.zeros([BLOCK_K], tl.int32)
    for rank in range(children):
        mark = tl.sum(tl.where(rank_K == rank, mark_K, 0.0), 0)
        gaining = tl.sum(tl.where(rank_K == rank, gaining_K.to(tl.int32), 0), 0) > 0
        passed = tl.sum((tl.where(gaining, losses_C, gains_C) <= mark).to(tl.int32), 0)
        other_K = tl.where(rank_K == rank, tl.minimum(passed, CELLS - 1), other_K)
    other_own_K, other_above_K = tl.gather(own_C, other_K, 0), tl.gather(above_C, other_K, 0)
    slope_K = _slopes(above_K, above_K - own_K, racing)
    other_slope_K = _slopes(other_above_K, other_above_K - other_own_K, racing)
    away_K = tl.minimum(_share(amount_K, own_K * tl.abs(other_slope_K - slope_K)), 1.0)
    swapped_K = spot_K < away_K
    down_K = tl.where(swapped_K, 1 - _share(spot_K, away_K), _share(1 - spot_K, 1 - away_K))
    spot_K = tl.where(swapped_K, other_above_K - down_K * other_own_K, above_K - down_K * own_K)
    winner = tl.argmax(tl.where(racing_K, spot_K, -1.0), 0)

    number = tl.load(uniforms)  # a winner may hand over to a certain child
    keep_K = _share(tl.gather(left_C, cell_K, 0), tl.gather(selected_C, cell_K, 0))
    keep = tl.sum(tl.where(rank_K == winner, keep_K, 0.0), 0)
    running_K = tl.cumsum(tl.where(apart_K, target_K, 0), 0)
    heir_mark = (_share(number - keep, 1 - keep) * certain_mass.to(tl.float64)).to(tl.int64)
    heir = tl.sum((running_K <= heir_mark).to(tl.int32), 0)
    winner = tl.where((number < keep) | (heir >= certain), winner, heir)

    # Its node, and p/r.
    column = tl.sum(tl.where(rank_K == winner, column_K, 0), 0)
    chance_K = tl.where(
        apart_K, _share(target_K.to(tl.float64), mass), tl.gather(quotient_C, cell_K, 0) * distribution_K.to(tl.float64)
    )
    chance = tl.sum(tl.where(rank_K == winner, chance_K, 0.0), 0) * mass
    wanted = tl.sum(tl.where(rank_K == winner, target_K, 0), 0).to(tl.float64)
    match = tl.min(tl.where(column_K == column, rank_K, BLOCK_K), 0)  # a token drawn twice has equal subtrees in distribution
    picked = tl.sum(tl.where(rank_K == match, child_K, 0), 0)
    tl.store(picks + place, tl.where(tl.load(facts + place * FACTS + 3) == 0, picked, -1))
    tl.store(ratios + place, tl.where(chance > 0, _share(wanted, chance), 0.0))
    tl.store(masses + place, mass)


@triton.jit
def _believed(weight, LEAST_WEIGHT: tl.constexpr):
    """Whether a path has enough weight to look further."""
    return (weight >= LEAST_WEIGHT) & (weight > 0)


@triton.jit
def _next_weight(weight, ratio):
    """Return min(1, a p(x)/r(x))."""
    return tl.minimum(weight * ratio, 1.0)


@triton.jit
def _left_over(
    target, drafts, columns, known, facts, scales, quotients, masses, place, token_C, weight, going, count, size, width,
    PARTIAL: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Return (a p − r)₊ for some tokens at a place if the path goes on there; at its end, p itself."""
    real_C = token_C < size
    left_C = fixed(tl.load(target + place * size + token_C, mask=real_C, other=0.0))
    if going:
        certain, distribution = tl.load(facts + place * FACTS + 1), tl.load(facts + place * FACTS + 2).to(tl.int64)
        column_C = _columns_of(columns, token_C, real_C, PARTIAL)
        distribution_C = fixed(tl.load(drafts + distribution * width + column_C, mask=column_C >= 0, other=0.0))
        cell_C = tl.zeros_like(token_C)
        if tl.load(facts + place * FACTS) > 1:
            cell_C = _cells_of(left_C, distribution_C, tl.load(scales + place), CELLS)
        quotient_C = tl.load(quotients + place * CELLS + cell_C, mask=column_C >= 0, other=0.0)
        believed_C = left_C.to(tl.float64) * (weight / tl.load(masses + place))
        left_C = fixed(tl.maximum(believed_C - quotient_C * distribution_C.to(tl.float64), 0.0))
        for rank in range(certain):  # selected with chance p: nothing is left
            left_C = tl.where(column_C == tl.load(known + place * count + rank), 0, left_C)
    return left_C


@triton.jit(do_not_specialize=["nodes", "count", "depth"])
def measure(
    target, drafts, columns, known, facts, scales, quotients, masses, picks, ratios, sums, nodes, count, depth, size, width,
    LEAST_WEIGHT: tl.constexpr, PARTIAL: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up what is left over at each depth of each row's path; grid [B · (depth + 1), blocks of tokens]."""
    row, level = tl.program_id(0).to(tl.int64) // (depth + 1), tl.program_id(0) % (depth + 1)
    place, weight, arrived = row * nodes, tl.full([], 1.0, tl.float64), 1
    for _ in range(level):
        child, ratio = tl.load(picks + place), tl.load(ratios + place)
        going = (arrived > 0) & (child >= 0) & _believed(weight, LEAST_WEIGHT)
        weight = _next_weight(weight, ratio)
        place = tl.where(going, row * nodes + child, place)
        arrived = going.to(tl.int32)
    total = tl.zeros([], tl.int64)
    if arrived > 0:
        going = (level < depth) & (tl.load(picks + place) >= 0) & _believed(weight, LEAST_WEIGHT)
        token_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        left_C = _left_over(
            target, drafts, columns, known, facts, scales, quotients, masses, place, token_C, weight, going, count, size, width,
            PARTIAL, CELLS,
        )  # fmt: skip
        total = tl.sum(left_C, 0)
    tl.store(sums + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), total)


@triton.jit
def _stop_chance(mass, weight):
    """Return h = s/(s + 1 − a); 0 if there is nothing to emit."""
    rest = mass + (1 - weight)
    return tl.where(rest != 0, mass / tl.where(rest != 0, rest, 1.0), 0.0)


@triton.jit(do_not_specialize=["nodes", "count", "depth", "blocks", "numbers", "uniform_row"])
def finish(
    target, drafts, columns, known, facts, scales, quotients, masses, picks, ratios, sums, tokens, uniforms,
    paths, accepted, emitted, offered, faults,
    nodes, count, depth, blocks, numbers, size, width, tokens_row, uniform_row,
    LEAST_WEIGHT: tl.constexpr, PARTIAL: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Draw where each row's path stops and the token there, and write the verdict; grid [B]."""
    row = tl.program_id(0).to(tl.int64)
    depth_D, block_M = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    sums += row * (depth + 1) * blocks
    uniforms += row * uniform_row + numbers

    # Down the path.
    node, weight, arrived, fault = tl.zeros([], tl.int64), tl.full([], 1.0, tl.float64), 1, 0
    node_D, below_D = tl.zeros([BLOCK_D], tl.int64), tl.zeros([BLOCK_D], tl.int64)
    weight_D, chance_D = tl.zeros([BLOCK_D], tl.float64), tl.zeros([BLOCK_D], tl.float64)
    going_D = tl.zeros([BLOCK_D], tl.int32)
    for level in range(depth + 1):
        place = row * nodes + node
        child, ratio = tl.load(picks + place), tl.load(ratios + place)
        going = (arrived > 0) & (level < depth) & (child >= 0) & _believed(weight, LEAST_WEIGHT)
        left = tl.sum(tl.load(sums + level * blocks + block_M, mask=block_M < blocks, other=0), 0)
        # At a path's end nothing is picked, so the excess is all of a p.
        chance = _stop_chance(tl.where(going, left.to(tl.float64) / ONE, weight), weight)
        if (arrived > 0) & (level < depth):
            fault = tl.maximum(fault, tl.load(facts + place * FACTS + 3))
        node_D = tl.where(depth_D == level, node, node_D)
        weight_D = tl.where(depth_D == level, weight, weight_D)
        chance_D = tl.where((depth_D == level) & (arrived > 0), chance, chance_D)
        going_D = tl.where(depth_D == level, going.to(tl.int32), going_D)
        weight = _next_weight(weight, ratio)
        node = tl.where(going, child, node)
        below_D = tl.where((depth_D == level) & (level < depth), node, below_D)
        arrived = going.to(tl.int32)

    # Up again: the deepest node is tried first.
    distribution_D, passed = tl.zeros([BLOCK_D], tl.float64), tl.full([], 1.0, tl.float64)
    for step in range(depth + 1):
        chance = tl.sum(tl.where(depth_D == depth - step, chance_D, 0.0), 0)
        distribution_D = tl.where(depth_D == depth - step, chance * passed, distribution_D)
        passed *= 1 - chance
    mark = tl.minimum(tl.load(uniforms), BELOW_ONE) * tl.sum(distribution_D, 0)
    beyond_D = (tl.cumsum(distribution_D, 0) > mark) & (distribution_D > 0)
    last = tl.max(tl.where(distribution_D > 0, depth_D, -1), 0)  # in case rounding puts the mark at the very end
    stop = tl.minimum(tl.min(tl.where(beyond_D, depth_D, BLOCK_D), 0), last)
    deep = tl.maximum(stop, 0)

    # The token there.
    at_D = depth_D == deep
    node, weight = tl.sum(tl.where(at_D, node_D, 0), 0), tl.sum(tl.where(at_D, weight_D, 0.0), 0)
    going, place = tl.sum(tl.where(at_D, going_D, 0), 0) > 0, row * nodes + node
    sum_M = tl.load(sums + deep * blocks + block_M, mask=block_M < blocks, other=0)
    total = tl.sum(sum_M, 0)
    mark = (tl.minimum(tl.load(uniforms + 1), BELOW_ONE) * total.to(tl.float64)).to(tl.int64)
    block = tl.minimum(tl.sum((tl.cumsum(sum_M, 0) <= mark).to(tl.int32), 0), blocks - 1)
    mark -= tl.sum(tl.where(block_M < block, sum_M, 0), 0)
    token_C = block * BLOCK + tl.arange(0, BLOCK)
    left_C = _left_over(
        target, drafts, columns, known, facts, scales, quotients, masses, place, token_C, weight, going, count, size, width,
        PARTIAL, CELLS,
    )  # fmt: skip
    token = block * BLOCK + tl.sum((tl.cumsum(left_C, 0) <= mark).to(tl.int32), 0)
    silent = (stop < 0) | (total <= 0) | (token >= size)
    token = tl.where(silent, -1, token).to(tl.int64)
    fault = tl.where((fault == 0) & silent, 1, fault)

    real_D = depth_D <= depth
    below_D = tl.load(tokens + row * tokens_row + below_D, mask=real_D, other=0)
    places = row * (depth + 1) + depth_D
    tl.store(paths + places, tl.where(depth_D < deep, node_D, node), mask=real_D)
    tl.store(emitted + places, tl.where(at_D, token, below_D), mask=real_D)
    tl.store(accepted + row, deep.to(tl.int64))
    tl.store(offered + row, (deep + tl.load(facts + place * FACTS + 4)).to(tl.int64))
    tl.store(faults + row, fault.to(tl.int64))
