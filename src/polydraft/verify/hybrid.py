"""RACE and HYBRID: one child is picked by a race, then accepted as in speculative sampling.

`race` has n independent children, whose order does not matter, and accepts Σ min(p, r) = 1 − max(0, max_k (X_kⁿ − P_k)) over
prefixes by falling q/p: the most that any verifier can with them ([1], Theorem 3). How the winner is
found is in `polydraft.verify.contest`.

`hybrid` takes the draft's top m tokens for certain and draws the other n − m independently. m follows from the draft
distribution and n alone: a top token is made certain while its expected number among the remaining draws, q_(m+1) (n − m) / (1
− q(Top_m)), is at least a threshold. Acceptance P(T) + 1 − max(0, max_k (X_k^{n−m} − P_k)) outside T is the most that any
verifier can with these children. m = n − 1 is the greedy method of [1], m = 0 is `race`.

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

from polydraft.backends.triton import kernels_run
from polydraft.errors import UsageError
from polydraft.sampling import NO_TOKEN, draw_independent, draw_one
from polydraft.verify import fused_draw as fused
from polydraft.verify.arrays import Array, Ranked, arange, as_array, as_tensor, can_sync, largest, normalised, quietly, ratio
from polydraft.verify.contest import BUCKETS, Contest
from polydraft.verify.scheme import SCHEMES, IndependentChildren, Scheme, Selection

_MOST_CHILDREN = 64
"""Every child takes two random numbers, and the numbers a node may use are fixed before its children are known."""


@SCHEMES.register("race")
class Race(IndependentChildren):
    """Independent candidates, one picked by an optimal race; sorts the vocabulary, see race-bucketed."""

    name = "race"
    max_children = _MOST_CHILDREN
    select_uniforms = 1 + 2 * _MOST_CHILDREN
    verify_uniforms = 2 + 2 * _MOST_CHILDREN
    buckets: int | None = None
    """How many buckets of like tokens stand for the vocabulary; None sorts instead."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        """Set up the race."""
        return Contest.of(target_probs_RV, draft_probs_RV, children_RK, buckets=self.buckets)

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        """Pick the winner."""
        contest = self.contest(target_probs_RV, draft_probs_RV, children_RK)
        return Selection(contest.select(uniforms_RU), contest.distribution_RV)

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Select, then accept with chance min(1, p/r), else emit from (p − r)₊."""
        selection = self.select(target_probs_RV, draft_probs_RV, children_RK, uniforms_RU[:, 1:])
        return accepted_or_residual(target_probs_RV, selection, uniforms_RU[:, :1].double())

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Chances of the children to be selected, times those to be accepted; what is left goes to (p − r)₊. Slow."""
        contest = self.contest(target_probs_RV, draft_probs_RV, children_RK)
        target_RV, selected_RV = normalised(target_probs_RV), contest.distribution_RV
        token_RK, racing_RK = as_tensor(contest.token_RK), as_tensor(contest.racing_RK)
        accept_RK = ratio(target_RV.gather(1, token_RK), selected_RV.gather(1, token_RK)).clamp(max=1.0) * contest.chances()
        residual_RV = normalised((target_RV - selected_RV).clamp(min=0))
        emitted_RV = (residual_RV * (1 - accept_RK.sum(-1, keepdim=True))).scatter_add_(1, token_RK, accept_RK)
        return torch.where(racing_RK.any(-1, keepdim=True), emitted_RV, target_RV)


@SCHEMES.register("race-bucketed")
class RaceBucketed(Race):
    """The race with 4096 buckets of similar candidates instead of a sort: just as exact, acceptance within 1e-4 (measured)."""

    name = "race-bucketed"

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.buckets = buckets


def accepted_or_residual(target_probs_RV: Tensor, selection: Selection, uniform_R1: Tensor) -> Tensor:
    """Speculative sampling of a selected child against its distribution: one number decides, and draws the residual."""
    target_RV = target_probs_RV.double()
    mass_R1 = target_RV.sum(-1, keepdim=True)
    token_R1 = selection.token_R[:, None].clamp(min=0)
    target_R1, selected_R1 = target_RV.gather(1, token_R1), selection.distribution_RV.gather(1, token_R1) * mass_R1
    mark_R1 = uniform_R1 * selected_R1
    accepted_R1 = (mark_R1 < target_R1) & (selection.token_R[:, None] != NO_TOKEN)
    if can_sync(accepted_R1) and accepted_R1.all():
        return selection.token_R
    residual_RV = torch.addcmul(target_RV, selection.distribution_RV, mass_R1, value=-1).clamp_(min=0)
    # Rejected marks are uniform from p to r.
    left_R1 = torch.where(selected_R1 > 0, ratio(mark_R1 - target_R1, selected_R1 - target_R1), uniform_R1)
    drawn_R1 = draw_one(residual_RV, left_R1[:, 0])[:, None]
    # Rounding may reject where p = r and nothing is left to emit.
    accepted_R1 |= (drawn_R1 == NO_TOKEN) & (target_R1 > 0) & (selected_R1 > 0)
    return torch.where(accepted_R1, selection.token_R[:, None], drawn_R1)[:, 0]


@SCHEMES.register("hybrid")
class Hybrid(Race):
    """The top candidates for certain plus independent ones, picked by an optimal race; the default.

    Parameters
    ----------
    threshold : float or Tensor, optional
        Expected draws from which a top token is made certain, 0.5 if not given; 0 for all but one, infinity for none. Any
        choice is exact as long as it is the same for drawing and verifying. By name: ``hybrid:0.7``.
    buckets : int, optional
        Of like tokens, in the race; None sorts the vocabulary, which takes ten times as long for less than 1e-4 of acceptance.
    """

    name = "hybrid"
    replacement = None
    usual_threshold: ClassVar[float] = 0.5

    def __init__(self, threshold: float | Tensor | None = None, buckets: int | None = BUCKETS) -> None:
        threshold = self.usual_threshold if threshold is None else threshold
        if not isinstance(threshold, Tensor) and not threshold >= 0:
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
        token_RK, certain_RK, rest_RV = self._split(draft_probs_RV, count)
        if rank >= token_RK.shape[1]:
            return normalised(rest_RV)
        top_RV = torch.zeros_like(draft_probs_RV, dtype=torch.float64).scatter_(1, token_RK[:, rank : rank + 1], 1.0)
        return torch.where(certain_RK[:, rank : rank + 1], top_RV, normalised(rest_RV))

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Take the top tokens, draw the others from the rest."""
        few = uniforms_RK.shape[1] <= fused.MOST_CHILDREN
        if few and not isinstance(self.threshold, Tensor) and self.draws_by_kernels(draft_probs_RV):
            return fused.draw(draft_probs_RV, uniforms_RK, self.threshold)
        return self._drawn(uniforms_RK, *self._split(draft_probs_RV, uniforms_RK.shape[1]))

    def draws_by_kernels(self, draft_probs_RV: Tensor) -> bool:
        """On a GPU, if the threshold is a constant."""
        known = type(self)._split is Hybrid._split and not isinstance(self.threshold, Tensor)
        return known and draft_probs_RV.dtype == torch.float32 and kernels_run(draft_probs_RV)

    def draw_some(self, draft_probs_RV: Tensor, uniforms_RK: Tensor, count_R1: Tensor, ranked: Ranked | None = None) -> Tensor:
        """Draw all that a row may have; those behind its number of children are cut off, the others do not know of them."""
        children_RK = self._drawn(uniforms_RK, *self._split(draft_probs_RV, uniforms_RK.shape[1], as_array(count_R1), ranked))
        return torch.where(torch.arange(children_RK.shape[1], device=count_R1.device) < count_R1, children_RK, NO_TOKEN)

    @staticmethod
    def _drawn(uniforms_RK: Tensor, token_RK: Tensor, certain_RK: Tensor, rest_RV: Tensor) -> Tensor:
        children_RK = draw_independent(rest_RV, uniforms_RK)
        width = token_RK.shape[1]
        children_RK[:, :width] = torch.where(certain_RK, token_RK, children_RK[:, :width])
        return children_RK

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        """Set up the race of the children that are not certain."""
        return Contest.of(target_probs_RV, draft_probs_RV, children_RK, self._certain_children, self.buckets)

    def _split(
        self, draft_probs_RV: Tensor, count: int, count_R1: Array | None = None, ranked: Ranked | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return top tokens, which of them are certain, and the weights without these; rows may have fewer children."""
        value_RK, token_RK = largest(draft_probs_RV, count) if ranked is None else ranked
        assert value_RK.shape[1] == min(count, draft_probs_RV.shape[1]), (value_RK.shape, count)
        total_R1 = as_array(draft_probs_RV.double().sum(-1, keepdim=True))
        certain_RK = arange(token_RK.shape[1], token_RK) < certain_of_top(
            value_RK, total_R1, count if count_R1 is None else count_R1, self.threshold
        )
        token_RK, left_RK = as_tensor(token_RK), as_tensor(value_RK * ~certain_RK).to(draft_probs_RV.dtype)
        return token_RK, as_tensor(certain_RK), draft_probs_RV.scatter(1, token_RK, left_RK)

    def _certain_children(self, child_RK: Array, draft_RK: Array, total_R1: Array, count_R1: Array) -> Array:
        """Find m again, from the children alone.

        While certain children last, the next one is the top token left, and passes the threshold. The first that is not
        certain does not: no token left did. Or it was the only one left; then the next child is the same.

        The total is that of `_split`, unless another order of summation rounded it differently, and it would take a ratio
        within 1e-15 of the threshold to tell.
        """
        return _certain(draft_RK, child_RK[:, 1:] != child_RK[:, :-1], total_R1, count_R1, self.threshold)


@cache
def _with_threshold(kind: type[Hybrid], threshold: float) -> type[Scheme]:
    """Make it once: schemes of one name are of one class."""
    members = {"name": f"hybrid:{threshold!r}", "usual_threshold": threshold, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


@quietly
def certain_of_top(value_RK: Array, total_R1: Array, count: Array | int, threshold: float | Tensor) -> Array:
    """Return m of each row, from its largest weights, in order, and their total.

    The rest always keeps a token, so that all children exist or none does.
    """
    # In float64, as `_certain_children` has it.
    return _certain(value_RK + 0 * total_R1, value_RK[:, 1:] > 0, total_R1, count, threshold)


def _certain(value_RK: Array, more_RJ: Array, total_R1: Array, count: Array | int, threshold: float | Tensor) -> Array:
    """Count how many of the first values pass the threshold one after the other, where something is left after them."""
    threshold = as_array(threshold) if isinstance(threshold, Tensor) else threshold
    left_RK = count - arange(value_RK.shape[1], value_RK)
    rest_RK = total_R1 - value_RK.cumsum(-1) + value_RK
    likely_RK = (value_RK * left_RK >= rest_RK * threshold) & (left_RK > 1)
    return (likely_RK[..., :-1] & more_RJ).cumprod(-1).sum(-1, keepdims=True)
