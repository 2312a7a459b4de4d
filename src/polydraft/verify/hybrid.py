"""RACE and HYBRID: one child is picked by a race, then accepted as in speculative sampling.

`race` has n independent children in any order, and accepts Σ min(p, r) = 1 − max(0, max_k (X_kⁿ − P_k)) over prefixes by
falling q/p: the most that any verifier reaches with them ([1], Theorem 3). `polydraft.verify.contest` finds the winner.

`hybrid` takes the draft's top m tokens for certain and draws the other n − m independently. m follows from the draft
distribution and n alone: a top token is made certain while its expected number among the remaining draws, q_(m+1) (n − m) / (1
− q(Top_m)), is at least a threshold. Acceptance P(T) + 1 − max(0, max_k (X_k^{n−m} − P_k)) outside T is the most that any
verifier reaches with these children. m = n − 1 is the greedy method of [1], m = 0 is `race`.

References
----------
.. [1] Towards Optimal Multi-draft Speculative Decoding, §4 (computes the optimum, does not attain it) and §5.
.. [2] Khisti et al. 2024, arXiv:2410.18234: picking first and accepting then can be optimal.
"""

import math
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from polydraft.devices import can_sync
from polydraft.errors import UsageError
from polydraft.sampling import NO_TOKEN, draw_independent, draw_one
from polydraft.verify.contest import BUCKETS, Contest, count_certain
from polydraft.verify.scheme import SCHEMES, IndependentChildren, Scheme, Selection
from polydraft.verify.weights import largest, normalised, ratio

_MOST_CHILDREN = 64
"""A limit, because every child takes two random numbers, and a node's numbers are set aside before its children are known."""


@SCHEMES.register("race")
class Race(IndependentChildren):
    """Independent candidates, one picked by an optimal race; sorts the vocabulary, see race-bucketed."""

    name = "race"
    max_children = _MOST_CHILDREN
    select_uniforms = 1 + 2 * _MOST_CHILDREN
    verify_uniforms = 2 + 2 * _MOST_CHILDREN
    buckets: int | None = None
    """How many buckets of similar tokens replace the vocabulary; None sorts it instead."""
    threshold: float | None = None
    """Expected draws from which a top token is a certain child, which does not race; None if none ever is."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        """Set up the race of all children that are not certain."""
        return Contest.of(target_probs_RV, draft_probs_RV, children_RK, self.threshold, self.buckets)

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        """Pick the winner."""
        contest = self.contest(target_probs_RV, draft_probs_RV, children_RK)
        return Selection(contest.select(uniforms_RU), contest.distribution_RV)

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Select, then accept with chance min(1, p/r), else emit from (p − r)₊."""
        selection = self.select(target_probs_RV, draft_probs_RV, children_RK, uniforms_RU[:, 1:])
        return accepted_or_residual(target_probs_RV, selection, uniforms_RU[:, :1].double())

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Chance of each child to be selected, times its chance to be accepted; the remainder goes to (p − r)₊. Slow."""
        contest = self.contest(target_probs_RV, draft_probs_RV, children_RK)
        target_RV, selected_RV = normalised(target_probs_RV), contest.distribution_RV
        token_RK = contest.token_RK
        accept_RK = ratio(target_RV.gather(1, token_RK), selected_RV.gather(1, token_RK)).clamp(max=1.0) * contest.chances()
        residual_RV = normalised((target_RV - selected_RV).clamp(min=0))
        emitted_RV = (residual_RV * (1 - accept_RK.sum(-1, keepdim=True))).scatter_add_(1, token_RK, accept_RK)
        return torch.where(contest.racing_RK.any(-1, keepdim=True), emitted_RV, target_RV)


@SCHEMES.register("race-bucketed")
class RaceBucketed(Race):
    """The race with 4096 buckets of similar candidates instead of a sort: just as exact, acceptance within 1e-4 (measured)."""

    name = "race-bucketed"

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.buckets = buckets


def accepted_or_residual(target_probs_RV: Tensor, selection: Selection, uniform_R1: Tensor) -> Tensor:
    """Test a selected child by speculative sampling; one random number decides, and draws from the residual if it fails."""
    target_RV = target_probs_RV.double()
    mass_R1 = target_RV.sum(-1, keepdim=True)
    token_R1 = selection.token_R[:, None].clamp(min=0)
    target_R1, selected_R1 = target_RV.gather(1, token_R1), selection.distribution_RV.gather(1, token_R1) * mass_R1
    mark_R1 = uniform_R1 * selected_R1
    accepted_R1 = (mark_R1 < target_R1) & (selection.token_R[:, None] != NO_TOKEN)
    if can_sync(accepted_R1) and accepted_R1.all():
        return selection.token_R
    residual_RV = torch.addcmul(target_RV, selection.distribution_RV, mass_R1, value=-1).clamp_(min=0)
    # A rejected mark is uniform between p and r.
    left_R1 = torch.where(selected_R1 > 0, ratio(mark_R1 - target_R1, selected_R1 - target_R1), uniform_R1)
    drawn_R1 = draw_one(residual_RV, left_R1[:, 0])[:, None]
    # Rounding may reject although p = r, and then nothing is left to emit.
    accepted_R1 |= (drawn_R1 == NO_TOKEN) & (target_R1 > 0) & (selected_R1 > 0)
    return torch.where(accepted_R1, selection.token_R[:, None], drawn_R1)[:, 0]


def threshold_of(scheme: Scheme) -> float | None:
    """Return the threshold of a bucketed race, infinity if no child is ever certain; None for any other scheme.

    Also None for subclasses that pick or race in their own way: faster forms know only the registered schemes.
    """
    if not isinstance(scheme, Race) or scheme.buckets is None:
        return None
    if type(scheme).select is not Race.select or type(scheme).contest is not Race.contest:
        return None
    return torch.inf if scheme.threshold is None else scheme.threshold


def split(draft_probs_RV: Tensor, count: int, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the top tokens, which of them are certain if there are `count` children, and the weights without these."""
    value_RK, token_RK = largest(draft_probs_RV, count)
    total_R1 = draft_probs_RV.double().sum(-1, keepdim=True)
    certain_R1 = count_certain(value_RK.double(), value_RK[:, 1:] > 0, total_R1, count, threshold)
    certain_RK = torch.arange(token_RK.shape[1], device=token_RK.device) < certain_R1
    left_RK = (value_RK * ~certain_RK).to(draft_probs_RV.dtype)
    return token_RK, certain_RK, draft_probs_RV.scatter(1, token_RK, left_RK)


@SCHEMES.register("hybrid")
class Hybrid(Race):
    """The top candidates for certain plus independent ones, picked by an optimal race; the best of the drawn ones.

    Parameters
    ----------
    threshold : float, optional
        Expected draws from which a top token is made certain, 0.5 if not given; 0 for all but one, infinity for none. Any
        value is exact as long as drawing and verifying use the same. By name: ``hybrid:0.7``.
    buckets : int, optional
        Buckets of similar tokens in the race; None sorts the vocabulary, which takes ten times as long for less than 1e-4 of
        acceptance.
    """

    name = "hybrid"
    replacement = None
    usual_threshold: ClassVar[float] = 0.5
    threshold: float

    def __init__(self, threshold: float | None = None, buckets: int | None = BUCKETS) -> None:
        threshold = self.usual_threshold if threshold is None else threshold
        if not threshold >= 0:
            raise UsageError(f"threshold={threshold!r} is out of range; allowed: 0 or more")
        self.threshold, self.buckets = threshold, buckets

    @classmethod
    def with_setting(cls, text: str) -> type[Scheme]:
        """Return the scheme with another threshold."""
        try:
            threshold = float(text)
        except ValueError:
            threshold = math.nan
        if not threshold >= 0:
            raise UsageError(f"scheme 'hybrid:{text}' has no threshold; allowed: hybrid, or hybrid:X with X from 0 to inf")
        return _with_threshold(cls, threshold)

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """All mass on the next top token, then the distribution of the rest."""
        rank = earlier_RJ.shape[1]
        token_RK, certain_RK, rest_RV = split(draft_probs_RV, count, self.threshold)
        if rank >= token_RK.shape[1]:
            return normalised(rest_RV)
        top_RV = torch.zeros_like(draft_probs_RV, dtype=torch.float64).scatter_(1, token_RK[:, rank : rank + 1], 1.0)
        return torch.where(certain_RK[:, rank : rank + 1], top_RV, normalised(rest_RV))

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Take the top tokens, and draw the others from the rest."""
        if uniforms_RK.shape[1] == 1:  # an only child is never certain
            return draw_independent(draft_probs_RV, uniforms_RK)
        token_RK, certain_RK, rest_RV = split(draft_probs_RV, uniforms_RK.shape[1], self.threshold)
        children_RK = draw_independent(rest_RV, uniforms_RK)
        width = token_RK.shape[1]
        children_RK[:, :width] = torch.where(certain_RK, token_RK, children_RK[:, :width])
        return children_RK


@cache
def _with_threshold(kind: type[Hybrid], threshold: float) -> type[Scheme]:
    """Return the class of hybrid schemes with this threshold, always the same one."""
    members = {"name": f"hybrid:{threshold!r}", "usual_threshold": threshold, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)
