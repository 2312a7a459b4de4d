"""RACE: independent children of whom one is picked by a race, then accepted as in speculative sampling.

Accepts Σ min(p, r) = 1 − max(0, max_k (X_kⁿ − P_k)) over prefixes by falling q/p: the most that any verifier can with n
independent children ([1], Theorem 3). How the winner is found is in `plan`. The order of the children does not matter.

References
----------
.. [1] Towards Optimal Multi-draft Speculative Decoding, §4 (computes this optimum, does not attain it).
.. [2] Khisti et al. 2024, arXiv:2410.18234: picking first and accepting then can be optimal.
"""

from typing import ClassVar

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_independent, draw_one
from polydraft.schemes.arithmetic import normalised, ratio
from polydraft.schemes.arrays import as_tensor, looks
from polydraft.schemes.cells import BUCKETS
from polydraft.schemes.contest import Contest
from polydraft.schemes.scheme import SCHEMES, Scheme, Selection

_MOST_CHILDREN = 64
"""Every child takes two random numbers, and the numbers a node may use are fixed before its children are known."""


@SCHEMES.register("race")
class Race(Scheme):
    """Independent candidates, one picked by an optimal race; sorts the vocabulary, see race-bucketed."""

    name = "race"
    max_children = _MOST_CHILDREN
    select_uniforms = 1 + 2 * _MOST_CHILDREN
    verify_uniforms = 2 + 2 * _MOST_CHILDREN
    replacement: ClassVar[bool | None] = True
    buckets: int | None = None
    """How many buckets of like tokens stand for the vocabulary; None sorts instead."""

    def child_law(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Every child follows the draft law."""
        return normalised(draft_probs_RV)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw all children from one table of sums."""
        return draw_independent(draft_probs_RV, uniforms_RK)

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        """Set up the race."""
        return Contest.of(target_probs_RV, draft_probs_RV, children_RK, buckets=self.buckets)

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        """Pick the winner."""
        contest = self.contest(target_probs_RV, draft_probs_RV, children_RK)
        return Selection(contest.select(uniforms_RU), contest.law_RV)

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Select, then accept with chance min(1, p/r), else emit from (p − r)₊."""
        selection = self.select(target_probs_RV, draft_probs_RV, children_RK, uniforms_RU[:, 1:])
        return accepted_or_residual(target_probs_RV, selection, uniforms_RU[:, :1].double())

    def law(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Chances of the children to be selected, times those to be accepted; what is left goes to (p − r)₊. Slow."""
        contest = self.contest(target_probs_RV, draft_probs_RV, children_RK)
        target_RV, selected_RV = normalised(target_probs_RV), contest.law_RV
        token_RK, racing_RK = as_tensor(contest.token_RK), as_tensor(contest.racing_RK)
        accept_RK = ratio(target_RV.gather(1, token_RK), selected_RV.gather(1, token_RK)).clamp(max=1.0) * contest.chances()
        residual_RV = normalised((target_RV - selected_RV).clamp(min=0))
        emitted_RV = (residual_RV * (1 - accept_RK.sum(-1, keepdim=True))).scatter_add_(1, token_RK, accept_RK)
        return torch.where(racing_RK.any(-1, keepdim=True), emitted_RV, target_RV)


@SCHEMES.register("race-bucketed")
class RaceBucketed(Race):
    """The race with 4096 buckets of like candidates instead of a sort: as exact, and within 1e-4 as optimal."""

    name = "race-bucketed"

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.buckets = buckets


def accepted_or_residual(target_probs_RV: Tensor, selection: Selection, uniform_R1: Tensor) -> Tensor:
    """Speculative sampling of a selected child against its law: one number decides, and draws the residual."""
    target_RV = target_probs_RV.double()
    mass_R1 = target_RV.sum(-1, keepdim=True)
    token_R1 = selection.token_R[:, None].clamp(min=0)
    target_R1, selected_R1 = target_RV.gather(1, token_R1), selection.law_RV.gather(1, token_R1) * mass_R1
    mark_R1 = uniform_R1 * selected_R1
    accepted_R1 = (mark_R1 < target_R1) & (selection.token_R[:, None] != NO_TOKEN)
    if looks(accepted_R1) and accepted_R1.all():
        return selection.token_R
    residual_RV = torch.addcmul(target_RV, selection.law_RV, mass_R1, value=-1).clamp_(min=0)
    # Rejected marks are uniform from p to r.
    left_R1 = torch.where(selected_R1 > 0, ratio(mark_R1 - target_R1, selected_R1 - target_R1), uniform_R1)
    drawn_R1 = draw_one(residual_RV, left_R1[:, 0])[:, None]
    # Rounding may reject where p = r and nothing is left to emit.
    accepted_R1 |= (drawn_R1 == NO_TOKEN) & (target_R1 > 0) & (selected_R1 > 0)
    return torch.where(accepted_R1, selection.token_R[:, None], drawn_R1)[:, 0]
