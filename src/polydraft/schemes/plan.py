"""How a race among independent children is run so that the best law wins: RACE, in closed form.

Every child gets a place x in [0, 1], uniform over the draft's randomness; the largest wins. A child of cell k, whose
own places are [X_{k−1}, X_k], X the running draft mass, would win with chance q_k m_k,
m_k = (X_kⁿ − X_{k−1}ⁿ) / (X_k − X_{k−1}). Wanted is r = p + ΔE, where E = min(prefix max, suffix max) of e = Xⁿ − P
over cells of falling q/p: then Σ min(p, r) = 1 − max e, the most that any verifier of n independent children accepts
([1], Theorem 3). Cells that want more (d = r − q m > 0) and cells that want less exchange places, equally many both ways,
so that x stays uniform and the chance to win becomes r.

References
----------
.. [1] Towards Optimal Multi-draft Speculative Decoding, eq. 8 and Theorem 3 (the optimum; the race is ours).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polydraft.schemes.arrays import (
    Array,
    as_tensor,
    at_most,
    backwards,
    library,
    no_less,
    no_more,
    quotient,
    raised,
    ranks,
    running_max,
    take,
)


@dataclass(frozen=True, eq=False)
class Plan:
    """A race for each row; C cells, the first of them without mass, so that running sums start at 0."""

    draft_RC: Array
    """q: places of a cell's own."""
    above_RC: Array
    """X, where a cell's places end."""
    count_R1: Array
    """n, the number of children that race."""
    selected_RC: Array
    """r: law of the winner."""
    drift_RC: Array
    """d: what a cell wins beyond what its own places give."""
    gains_RC: Array
    """Running sum of the positive part of d."""
    losses_RC: Array
    """Running sum of the negative part of d. The same stretch of gains and losses belongs to cells that exchange places."""


def make_plan(target_RC: Array, draft_RC: Array, count_R1: Array) -> Plan:
    """Plan races of `count_R1` children drawn from the draft law.

    Parameters
    ----------
    target_RC, draft_RC : Array
        Mass of each cell, largest draft-to-target ratio first, after an empty one; the draft's sums to one, the target's to
        at most one.
    """
    above_RC = draft_RC.cumsum(-1)
    raised_RC = raised(above_RC, count_R1)
    excess_RC = raised_RC - target_RC.cumsum(-1)
    hull_RC = library(excess_RC).minimum(running_max(excess_RC), backwards(running_max(backwards(excess_RC))))
    selected_RC = target_RC + hull_RC
    selected_RC[:, 1:] -= hull_RC[:, :-1]
    # At most n q: rounding must leave nothing to cells without draft mass, nor to any where there are no children.
    selected_RC = library(selected_RC).minimum(no_less(selected_RC, 0), draft_RC * count_R1)
    # q m is X_kⁿ − X_{k−1}ⁿ.
    drift_RC = selected_RC - raised_RC
    drift_RC[:, 1:] += raised_RC[:, :-1]
    gain_RC = no_less(drift_RC, 0)
    return Plan(draft_RC, above_RC, count_R1, selected_RC, drift_RC, gain_RC.cumsum(-1), (gain_RC - drift_RC).cumsum(-1))


def places(plan: Plan, cell_RK: Array, partner_RK: Array, place_RK: Array) -> Array:
    """Give each child its place, by two uniform numbers: one for the partner, one for whose place and where in it."""
    where, width = library(cell_RK).where, cell_RK.shape[1]
    drift_RK, draft_RK = take(plan.drift_RC, cell_RK), take(plan.draft_RC, cell_RK)
    gaining_RK, size_RK = drift_RK > 0, abs(drift_RK)
    end_RK = where(gaining_RK, take(plan.gains_RC, cell_RK), take(plan.losses_RC, cell_RK))
    mark_RK = end_RK - (1 - partner_RK) * size_RK
    other_RK = where(gaining_RK, at_most(plan.losses_RC, mark_RK), at_most(plan.gains_RC, mark_RK))
    other_RK = no_more(other_RK, plan.draft_RC.shape[1] - 1)
    both_RX = library(cell_RK).concatenate([cell_RK, other_RK], 1)
    above_RX, own_RX = take(plan.above_RC, both_RX), take(plan.draft_RC, both_RX)
    slope_RX = slopes(above_RX, above_RX - own_RX, plan.count_R1, width)
    away_RK = no_more(quotient(size_RK, draft_RK * abs(slope_RX[:, width:] - slope_RX[:, :width])), 1)
    swapped_RK = place_RK < away_RK
    # How far below the end of the cell: what is left of a number that has decided whose place it is.
    below_RK = where(swapped_RK, 1 - quotient(place_RK, away_RK), quotient(1 - place_RK, 1 - away_RK))
    above_RK, own_RK = (where(swapped_RK, table_RX[:, width:], table_RX[:, :width]) for table_RX in (above_RX, own_RX))
    return above_RK - below_RK * own_RK


def slopes(above_RX: Array, below_RX: Array, count_R1: Array, most: int) -> Array:
    """Return m = Σ_{j<n} X_k^j X_{k−1}^{n−1−j}, n at most `most`: the quotient of differences without their cancellation."""
    rank_J = ranks(most, above_RX)
    other_RJ = count_R1 - 1 - rank_J
    below_RXJ = below_RX[:, :, None] ** no_less(other_RJ, 0)[:, None]
    return (above_RX[:, :, None] ** rank_J * below_RXJ * (other_RJ >= 0)[:, None]).sum(-1)


def winning_chances(plan: Plan, cell_RK: Tensor, exists_RK: Tensor) -> Tensor:
    """Return each child's chance to have the largest place, given all children; exact, for tests, in K · C a row.

    A child's place is uniform in each cell, with some chance for each: the chance that all others are lower is a
    polynomial there, and Gauss–Legendre integration of enough points is exact.
    """
    mass_RKC = _chances_of_cells(Plan(*map(as_tensor, vars(plan).values())), cell_RK)
    lower_RKC = mass_RKC.cumsum(-1) - mass_RKC
    points, weights = np.polynomial.legendre.leggauss(cell_RK.shape[1] // 2 + 1)
    chance_RK = torch.zeros_like(mass_RKC[..., 0])
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        below_RKC = torch.where(exists_RK[..., None], lower_RKC + mass_RKC * (1 + point) / 2, 1.0)
        for child in range(cell_RK.shape[1]):
            others_RC = torch.cat([below_RKC[:, :child], below_RKC[:, child + 1 :]], dim=1).prod(dim=1)
            chance_RK[:, child] += weight / 2 * (mass_RKC[:, child] * others_RC).sum(-1)
    return chance_RK * exists_RK


def _chances_of_cells(plan: Plan, cell_RK: Tensor) -> Tensor:
    """Return in which cell's places a child of each cell ends up, over the numbers that `places` takes."""

    def of_children(table_RC: Tensor) -> Tensor:
        return table_RC.gather(1, cell_RK)[..., None]

    size_RK1, gaining_RK1 = of_children(plan.drift_RC).abs(), of_children(plan.drift_RC) > 0
    end_RK1 = torch.where(gaining_RK1, of_children(plan.gains_RC), of_children(plan.losses_RC))
    other_end_RKC = torch.where(gaining_RK1, plan.losses_RC[:, None], plan.gains_RC[:, None])
    other_begin_RKC = torch.nn.functional.pad(other_end_RKC[..., :-1], (1, 0))
    overlap_RKC = torch.minimum(other_end_RKC, end_RK1) - torch.maximum(other_begin_RKC, end_RK1 - size_RK1)
    slope_RC = slopes(plan.above_RC, plan.above_RC - plan.draft_RC, plan.count_R1, cell_RK.shape[1])
    slope_RKC = slope_RC[:, None] - of_children(slope_RC)
    away_RKC = quotient(size_RK1, of_children(plan.draft_RC) * slope_RKC.abs()).clamp(max=1.0)
    mass_RKC = quotient(overlap_RKC.clamp(min=0), size_RK1) * away_RKC
    stay_RK1 = 1 - mass_RKC.sum(-1, keepdim=True)
    return as_tensor(mass_RKC.scatter_add(2, cell_RK[..., None], stay_RK1))
