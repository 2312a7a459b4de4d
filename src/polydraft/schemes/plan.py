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
    slope_RC: Array
    """m: chance to win with a place in the cell, times the number of children."""
    selected_RC: Array
    """r: law of the winner."""
    drift_RC: Array
    """d: what a cell wins beyond what its own places give."""
    gains_RC: Array
    """Running sum of the positive part of d."""
    losses_RC: Array
    """Running sum of the negative part of d. The same stretch of gains and losses belongs to cells that exchange places."""


def make_plan(target_RC: Array, draft_RC: Array, count_R1: Array, most: int) -> Plan:
    """Plan races of `count_R1` children, at most `most`, drawn from the draft law.

    Parameters
    ----------
    target_RC, draft_RC : Array
        Mass of each cell, largest draft-to-target ratio first, after an empty one; the draft's sums to one, the target's to
        at most one.
    """
    if isinstance(count_R1, np.ndarray):
        most = max(int(count_R1.max()), 1)  # a look that costs nothing here, and would stall other devices
    above_RC = draft_RC.cumsum(-1)
    below_RC = above_RC - draft_RC
    # m = Σ_{j<n} X_k^j X_{k−1}^{n−1−j}: the same as the quotient of differences, without their cancellation.
    this_RK = count_R1 == ranks(most, count_R1) + 1
    power_RC = above_RC
    raised_RC, slope_RC, term_RC = power_RC * this_RK[:, :1], this_RK[:, :1] * 1.0, 1.0
    for drawn in range(1, most):
        term_RC = term_RC * below_RC + power_RC
        power_RC = power_RC * above_RC
        this_R1 = this_RK[:, drawn : drawn + 1]
        raised_RC, slope_RC = raised_RC + power_RC * this_R1, slope_RC + term_RC * this_R1
    excess_RC = raised_RC - target_RC.cumsum(-1)
    hull_RC = library(excess_RC).minimum(running_max(excess_RC), backwards(running_max(backwards(excess_RC))))
    selected_RC = target_RC + hull_RC
    selected_RC[:, 1:] -= hull_RC[:, :-1]
    # At most n q: rounding must leave nothing to cells without draft mass, nor to any where there are no children.
    selected_RC = library(selected_RC).minimum(no_less(selected_RC, 0), draft_RC * count_R1)
    slope_RC = slope_RC + 0 * above_RC  # of full width, also where no node has a second child
    drift_RC = selected_RC - draft_RC * slope_RC
    gains_RC, losses_RC = no_less(drift_RC, 0).cumsum(-1), no_less(-drift_RC, 0).cumsum(-1)
    return Plan(draft_RC, above_RC, slope_RC, selected_RC, drift_RC, gains_RC, losses_RC)


def places(plan: Plan, cell_RK: Array, partner_RK: Array, place_RK: Array) -> Array:
    """Give each child its place, by two uniform numbers: one for the partner, one for whose place and where in it."""
    where = library(cell_RK).where
    drift_RK, draft_RK = take(plan.drift_RC, cell_RK), take(plan.draft_RC, cell_RK)
    gaining_RK, size_RK = drift_RK > 0, abs(drift_RK)
    end_RK = where(gaining_RK, take(plan.gains_RC, cell_RK), take(plan.losses_RC, cell_RK))
    mark_RK = end_RK - (1 - partner_RK) * size_RK
    other_RK = where(gaining_RK, at_most(plan.losses_RC, mark_RK), at_most(plan.gains_RC, mark_RK))
    other_RK = no_more(other_RK, plan.draft_RC.shape[1] - 1)
    slope_RK = take(plan.slope_RC, other_RK) - take(plan.slope_RC, cell_RK)
    away_RK = no_more(quotient(size_RK, draft_RK * abs(slope_RK)), 1)
    swapped_RK = place_RK < away_RK
    # How far below the end of the cell: what is left of a number that has decided whose place it is.
    below_RK = where(swapped_RK, 1 - quotient(place_RK, away_RK), quotient(1 - place_RK, 1 - away_RK))
    taken_RK = where(swapped_RK, other_RK, cell_RK)
    return take(plan.above_RC, taken_RK) - below_RK * take(plan.draft_RC, taken_RK)


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
    slope_RKC = plan.slope_RC[:, None] - of_children(plan.slope_RC)
    away_RKC = quotient(size_RK1, of_children(plan.draft_RC) * slope_RKC.abs()).clamp(max=1.0)
    mass_RKC = quotient(overlap_RKC.clamp(min=0), size_RK1) * away_RKC
    stay_RK1 = 1 - mass_RKC.sum(-1, keepdim=True)
    return as_tensor(mass_RKC.scatter_add(2, cell_RK[..., None], stay_RK1))
