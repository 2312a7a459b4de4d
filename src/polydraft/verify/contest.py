"""One node's race: the vocabulary in cells, the optimal plan (RACE, in closed form), and the race itself.

**Cells.** Tokens with similar draft-to-target ratios q/p share a cell, largest ratio first, after an empty cell 0. The plan
treats a cell as one token. Any cells are exact as long as no token of a later cell has a larger ratio than a token of an
earlier one: independent children in the same cell differ only by the draft distribution.

**Plan.** Every child gets a place x in [0, 1], uniform over the draft's randomness; the largest wins. A child of cell k, whose
own places are [X_{k−1}, X_k], X the running draft mass, would win with chance q_k m_k,
m_k = (X_kⁿ − X_{k−1}ⁿ) / (X_k − X_{k−1}). The goal is r = p + ΔE, where E = min(prefix max, suffix max) of e = Xⁿ − P
over cells of falling q/p: then Σ min(p, r) = 1 − max e, the most that any verifier of n independent children accepts
([1], Theorem 3). Cells that need more (d = r − q m > 0) and cells that need less exchange places, equally many both ways,
so that x stays uniform and the chance to win becomes r.

**Certain children** (the draft's top tokens T, see `Hybrid`) do not race. The race is planned for the target's mass outside T,
and a winner i hands over to t ∈ T, in proportion to p_t, so often that t is selected with chance p_t:
r'_i = r_i − (r_i − p_i)₊ P(T) / Σ(r − p)₊, which takes only from where r exceeds p. Without certain children r' = r.

References
----------
.. [1] Towards Optimal Multi-draft Speculative Decoding, eq. 8 and Theorem 3 (the optimum; the race is ours).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.verify.weights import quotient, ratio

BUCKETS = 4096
"""Cells by default; costs less than 1e-4 of acceptance, most when target and draft are nearly equal."""


def bucketed_cells(
    target_RV: Tensor, draft_RV: Tensor, scale_R1: Tensor | None = None, buckets: int = BUCKETS
) -> tuple[Tensor, int]:
    """Put similar ratios into the same cell without sorting: equal steps of p/(p + q).

    Unlike steps of the ratio's logarithm, these are fine where p and q are similar, and cover every ratio. It is computed as
    1/(1 + q/p), because each of these operations preserves the order despite rounding; p/(p + q) or a logarithm would not.

    Parameters
    ----------
    target_RV, draft_RV : Tensor
        Unnormalised weights; 0/0 may land anywhere, because it has no weight.
    scale_R1 : Tensor, optional
        Factor that makes draft weights comparable with target weights; it only matters for acceptance.
    """
    assert 0 < buckets < 2**15
    if draft_RV.dtype.itemsize < 4:
        draft_RV, target_RV = draft_RV.float(), target_RV.float()
    # buckets / (1 + q/p), in as few passes over the vocabulary as possible.
    ratio_RV = draft_RV / target_RV
    ratio_RV *= 1 / buckets if scale_R1 is None else scale_R1 / buckets
    ratio_RV += 1 / buckets
    bucket_RV = ratio_RV.reciprocal_().long().clamp_(1, buckets)
    if bucket_RV.shape[1] < buckets:
        return _dense(-bucket_RV)  # most buckets are empty: a short sort is cheaper than carrying them along
    return bucket_RV, buckets + 1


def _dense(key_RV: Tensor) -> tuple[Tensor, int]:
    """Return the rank of each key among the distinct ones of its row, the largest first and numbered 1."""
    sorted_RV, order_RV = key_RV.sort(dim=1, descending=True)
    rank_RV = (sorted_RV[:, 1:] != sorted_RV[:, :-1]).cumsum(-1)
    return torch.ones_like(order_RV).scatter_(1, order_RV[:, 1:], rank_RV + 1), key_RV.shape[1] + 1


@dataclass(frozen=True, eq=False)
class RacePlan:
    """A race for each row, over C cells; the first has no mass, so that running sums start at 0."""

    draft_RC: Tensor
    """q, the length of a cell's own places."""
    above_RC: Tensor
    """X, where a cell's own places end."""
    count_R1: Tensor
    """n, the number of children that race."""
    selected_RC: Tensor
    """r, the distribution of the winner."""
    drift_RC: Tensor
    """d, what a cell must win beyond what its own places give."""
    gains_RC: Tensor
    """Running sum of the positive part of d."""
    losses_RC: Tensor
    """Running sum of the negative part of d. Cells whose stretches of gains and losses overlap exchange places."""


def make_plan(target_RC: Tensor, draft_RC: Tensor, count_R1: Tensor) -> RacePlan:
    """Plan races of `count_R1` children drawn from the draft distribution.

    Parameters
    ----------
    target_RC, draft_RC : Tensor
        Mass of each cell: an empty one, then the largest draft-to-target ratio first. The draft's sums to 1, the target's to
        at most 1.
    """
    above_RC = draft_RC.cumsum(-1)
    power_RC = above_RC**count_R1
    excess_RC = power_RC - target_RC.cumsum(-1)
    hull_RC = torch.minimum(excess_RC.cummax(-1).values, excess_RC.flip(-1).cummax(-1).values.flip(-1))
    selected_RC = target_RC + _steps(hull_RC)
    # At most n q, so that rounding leaves nothing to cells without draft mass, nor to any cell if there are no children.
    selected_RC = torch.minimum(selected_RC.clamp(min=0), draft_RC * count_R1)
    drift_RC = selected_RC - _steps(power_RC)  # q m is X_kⁿ − X_{k−1}ⁿ
    gain_RC = drift_RC.clamp(min=0)
    return RacePlan(draft_RC, above_RC, count_R1, selected_RC, drift_RC, gain_RC.cumsum(-1), (gain_RC - drift_RC).cumsum(-1))


def _steps(table_RC: Tensor) -> Tensor:
    """Return by how much each entry exceeds the one before it; the first one, 0."""
    return table_RC.diff(prepend=torch.zeros_like(table_RC[:, :1]))


def places(plan: RacePlan, cell_RK: Tensor, partner_RK: Tensor, place_RK: Tensor) -> Tensor:
    """Give each child its place, by two uniform numbers: one for the partner, one for whose place to take and where in it."""
    drift_RK, draft_RK = plan.drift_RC.gather(1, cell_RK), plan.draft_RC.gather(1, cell_RK)
    gaining_RK, size_RK = drift_RK > 0, drift_RK.abs()
    end_RK = torch.where(gaining_RK, plan.gains_RC.gather(1, cell_RK), plan.losses_RC.gather(1, cell_RK))
    mark_RK = end_RK - (1 - partner_RK) * size_RK
    other_RK = torch.where(gaining_RK, _passed(plan.losses_RC, mark_RK), _passed(plan.gains_RC, mark_RK))
    other_RK = other_RK.clamp(max=plan.draft_RC.shape[1] - 1)
    both_2RK = torch.stack([cell_RK, other_RK])
    above_2RK, own_2RK = (table_RC.expand(2, -1, -1).gather(2, both_2RK) for table_RC in (plan.above_RC, plan.draft_RC))
    slope_2RK = slopes(above_2RK, above_2RK - own_2RK, plan.count_R1, cell_RK.shape[1])
    away_RK = quotient(size_RK, draft_RK * (slope_2RK[1] - slope_2RK[0]).abs()).clamp(max=1)
    swapped_RK = place_RK < away_RK
    # How far below the end of the cell: the number that decided whose place it is, rescaled to be uniform again.
    below_RK = torch.where(swapped_RK, 1 - quotient(place_RK, away_RK), quotient(1 - place_RK, 1 - away_RK))
    above_RK, own_RK = (torch.where(swapped_RK, table_2RK[1], table_2RK[0]) for table_2RK in (above_2RK, own_2RK))
    return above_RK - below_RK * own_RK


def _passed(running_RC: Tensor, mark_RK: Tensor) -> Tensor:
    """Count the entries of a rising row that do not exceed each mark."""
    return torch.searchsorted(running_RC, mark_RK, right=True)


def slopes(above_RX: Tensor, below_RX: Tensor, count_R1: Tensor, most: int) -> Tensor:
    """Return m = Σ_{j<n} X_k^j X_{k−1}^{n−1−j}, n at most `most`: the difference quotient without cancellation."""
    rank_J = torch.arange(most, device=above_RX.device)
    other_RJ = count_R1 - 1 - rank_J
    below_RXJ = below_RX[..., None] ** other_RJ.clamp(min=0)[:, None]
    return (above_RX[..., None] ** rank_J * below_RXJ * (other_RJ >= 0)[:, None]).sum(-1)


def winning_chances(plan: RacePlan, cell_RK: Tensor, exists_RK: Tensor) -> Tensor:
    """Return each child's chance to have the largest place, given all children; exact but slow (K · C per row), for tests.

    A child is in each cell with some chance, and uniform there. So the chance that all others are lower is a polynomial in each
    cell, which Gauss–Legendre integration with enough points integrates exactly.
    """
    mass_RKC = _chances_of_cells(plan, cell_RK)
    lower_RKC = mass_RKC.cumsum(-1) - mass_RKC
    points, weights = np.polynomial.legendre.leggauss(cell_RK.shape[1] // 2 + 1)
    chance_RK = torch.zeros_like(mass_RKC[..., 0])
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        below_RKC = torch.where(exists_RK[..., None], lower_RKC + mass_RKC * (1 + point) / 2, 1.0)
        for child in range(cell_RK.shape[1]):
            others_RC = torch.cat([below_RKC[:, :child], below_RKC[:, child + 1 :]], dim=1).prod(dim=1)
            chance_RK[:, child] += weight / 2 * (mass_RKC[:, child] * others_RC).sum(-1)
    return chance_RK * exists_RK


def _chances_of_cells(plan: RacePlan, cell_RK: Tensor) -> Tensor:
    """Return the chance that each child ends up in each cell's places, over the random numbers that `places` takes."""

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
    return mass_RKC.scatter_add(2, cell_RK[..., None], stay_RK1)


def count_certain(value_RK: Tensor, more_RJ: Tensor, total_R1: Tensor, count: Tensor | int, threshold: float) -> Tensor:
    """Return m, how many of a row's first children are certain, `[R, 1]`.

    Child m + 1 is certain if the n − m remaining draws from what the first m leave would draw it `threshold` times or more on
    average, and if another token is left after it: the rest must keep one, so that either all children exist or none.

    Parameters
    ----------
    value_RK : Tensor
        Draft weights of the children, or of the top tokens, in order.
    more_RJ : Tensor
        Whether another token is left after each of them except the last.
    total_R1 : Tensor
        Sum of all draft weights, float64.
    count : Tensor or int
        n, the number of children of each row.
    """
    left_RK = count - torch.arange(value_RK.shape[1], device=value_RK.device)
    rest_RK = total_R1 - value_RK.cumsum(-1) + value_RK
    likely_RK = (value_RK * left_RK >= rest_RK * threshold) & (left_RK > 1)
    return (likely_RK[..., :-1] & more_RJ).cumprod(-1).sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Contest:
    """The race of each row's children."""

    plan: RacePlan
    token_RK: Tensor
    """The children; missing ones repeat the first."""
    cell_RK: Tensor
    """Their cells."""
    racing_RK: Tensor
    """Children that race: those that exist and are not certain."""
    distribution_RV: Tensor
    """r', the distribution of the selected child over drawing and race; zeros for rows without children."""
    certain_RK: Tensor | None = None
    """Target probabilities p_t of the certain children, 0 for others; None if no children are ever certain."""
    keep_RK: Tensor | None = None
    """Chance r'/r that a winner does not hand over."""

    @classmethod
    def of(
        cls,
        target_probs_RV: Tensor,
        draft_probs_RV: Tensor,
        children_RK: Tensor,
        threshold: float | None = None,
        buckets: int | None = None,
    ) -> "Contest":
        """Plan the race.

        Parameters
        ----------
        target_probs_RV, draft_probs_RV : Tensor
            Unnormalised weights.
        threshold : float, optional
            The threshold that children were drawn with, see `Hybrid`: the first may be certain, the others are independent
            draws from the rest of the draft distribution. None if all are independent.
        buckets : int, optional
            Number of cells; if not given, the vocabulary is sorted.
        """
        exists_RK = children_RK != NO_TOKEN
        token_RK = torch.where(exists_RK, children_RK, children_RK[:, :1]).clamp(min=0)
        target_RV, draft_RV = target_probs_RV.double(), draft_probs_RV.double()
        racing_RK, apart_RK, scale_R1 = exists_RK, None, None
        if threshold is not None:
            total_R1, draft_RK = draft_RV.sum(-1, keepdim=True), draft_RV.gather(1, token_RK)
            certain_R1 = _certain_children(children_RK, draft_RK, total_R1, exists_RK.sum(-1, keepdim=True), threshold)
            apart_RK = torch.arange(children_RK.shape[1], device=children_RK.device) < certain_R1
            racing_RK = exists_RK & ~apart_RK
            scale_R1 = quotient(total_R1, total_R1 - (draft_RK * apart_RK).sum(-1, keepdim=True))
        if buckets is None:
            cell_RV, cells = _dense(draft_RV / target_RV)  # every ratio has a cell of its own
        else:
            cell_RV, cells = bucketed_cells(target_probs_RV, draft_probs_RV, scale_R1, buckets)
        cell_RK = cell_RV.gather(1, token_RK)
        if apart_RK is not None:
            # Certain children go into cell 0, whose mass is dropped. Missing ones go where the first child goes.
            cell_RK = cell_RK * (racing_RK | ~apart_RK[:, :1])
            cell_RV.scatter_(1, token_RK, cell_RK)
        target_RC, weight_RC = (
            weights_RV.new_zeros(len(weights_RV), cells).scatter_add_(1, cell_RV, weights_RV)
            for weights_RV in (target_RV, draft_RV)
        )
        target_mass_R1 = target_RC.sum(-1, keepdim=True)
        if apart_RK is not None:
            target_RC[:, 0] = 0.0
            weight_RC[:, 0] = 0.0
        target_RC = quotient(target_RC, target_mass_R1)
        # Summed again, because a difference of sums may not be 0 when nothing is left.
        draft_RC = quotient(weight_RC, weight_RC.sum(-1, keepdim=True))
        plan = make_plan(target_RC, draft_RC, racing_RK.sum(-1, keepdim=True))
        if apart_RK is None:
            distribution_RV = quotient(plan.selected_RC, weight_RC).gather(1, cell_RV) * draft_RV
            return cls(plan, token_RK, cell_RK, racing_RK, distribution_RV)
        certain_RK = quotient(target_RV.gather(1, token_RK), target_mass_R1) * apart_RK
        # r': what winners keep after the certain children get their mass from where r exceeds p.
        beyond_RC = (plan.selected_RC - target_RC).clamp(min=0)
        given_R1 = quotient(certain_RK.sum(-1, keepdim=True), beyond_RC.sum(-1, keepdim=True)).clamp(max=1)
        left_RC = plan.selected_RC - beyond_RC * given_R1
        keep_RK = quotient(left_RC.gather(1, cell_RK), plan.selected_RC.gather(1, cell_RK))
        distribution_RV = quotient(left_RC, weight_RC).gather(1, cell_RV) * draft_RV
        distribution_RV.scatter_add_(1, token_RK, certain_RK)
        return cls(plan, token_RK, cell_RK, racing_RK, distribution_RV, certain_RK, keep_RK)

    def select(self, uniforms_RU: Tensor) -> Tensor:
        """Run the race and return one child per row, with one random number and two more per child."""
        width, number_RU = self.token_RK.shape[1], uniforms_RU.double()
        # In pairs, so that a child's numbers do not depend on how many columns the batch has.
        partner_RK, place_RK = number_RU[:, 1 : 1 + 2 * width : 2], number_RU[:, 2 : 2 + 2 * width : 2]
        place_RK = torch.where(self.racing_RK, places(self.plan, self.cell_RK, partner_RK, place_RK), -1.0)
        index_R1 = place_RK.argmax(-1, keepdim=True)
        if self.certain_RK is not None and self.keep_RK is not None:
            keep_R1, number_R1 = self.keep_RK.gather(1, index_R1), number_RU[:, :1]
            # A number above `keep` is uniform there, so it also decides who takes over.
            running_RK = self.certain_RK.cumsum(-1)
            heir_R1 = _passed(running_RK, quotient(number_R1 - keep_R1, 1 - keep_R1) * running_RK[:, -1:])
            # Rounding may put the mark at the very end (chance 1e-16); then the winner stays.
            kept_R1 = (number_R1 < keep_R1) | (heir_R1 == width)
            index_R1 = torch.where(kept_R1, index_R1, heir_R1.clamp(max=width - 1))
        token_R1 = torch.where(self.racing_RK.any(-1, keepdim=True), self.token_RK.gather(1, index_R1), NO_TOKEN)
        return token_R1[:, 0]

    def chances(self) -> Tensor:
        """Return each child's chance to be selected, given all children; exact and slow, for tests."""
        win_RK = winning_chances(self.plan, self.cell_RK, self.racing_RK)
        if self.certain_RK is None or self.keep_RK is None:
            return win_RK
        kept_RK = win_RK * self.keep_RK
        handed_R1 = (win_RK - kept_RK).sum(-1, keepdim=True)
        return kept_RK + handed_R1 * ratio(self.certain_RK, self.certain_RK.sum(-1, keepdim=True))


def _certain_children(children_RK: Tensor, draft_RK: Tensor, total_R1: Tensor, count_R1: Tensor, threshold: float) -> Tensor:
    """Recover m from the children alone.

    Each certain child is the top token left, and passes the threshold. The first child that is not certain fails it, as every
    token left did; or only one token was left, and then the next child is the same.

    The total may be rounded differently from when the children were drawn, if it was summed in another order. That matters only
    for a ratio within 1e-15 of the threshold.
    """
    return count_certain(draft_RK, children_RK[:, 1:] != children_RK[:, :-1], total_R1, count_R1, threshold)
