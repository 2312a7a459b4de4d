"""Acceptance of the schemes rrs-wr, rrs-wor and kseq, by sums that become look-ups once tokens are sorted by p/q.

**Recursive rejection.** After any number of rejections, the residual is (p − λq)₊, rescaled, for some λ, and the chance of
having rejected everything so far is F(λ) = Σ(p − λq)₊. Let E be the draft's mass on the tokens drawn so far, which are excluded
from further draws. Another rejection moves λ to λ + F(λ)/(1 − E). With replacement, E stays 0 and λ is deterministic. Without
replacement, each rejected token adds its mass to E. Rejected tokens never return to the residual, so E is all that we need to
remember of them. After one sort, F takes two look-ups, so a drawing costs O(n log V) instead of n passes over the vocabulary.

References
----------
.. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
.. [2] Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport, NeurIPS 2023.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.devices import is_host
from polydraft.errors import UsageError
from polydraft.verify.weights import ratio

SUM_TOLERANCE = 2e-4
"""How far a row's sum may be from one, and results with it; a float32 softmax over 256k tokens is off by up to 7e-5."""

Formula = Callable[[Tensor, Tensor, int], Tensor]
"""`(target_probs_RV, draft_probs_RV, count) -> values`: one value per row, or several."""


def chunk_size(device: torch.device) -> int:
    """Return how many numbers to process at once: a CPU core's cache full, or enough to keep a GPU busy within a gigabyte."""
    return 2**18 if is_host(device) else 2**24


def check_distributions(**distributions_RV: Tensor) -> None:
    """Refuse tensors whose rows are not distributions over one vocabulary; messages use the arguments' names.

    Rows are not renormalised: one that does not sum to one usually means a forgotten softmax or a truncated vocabulary, and the
    result would be for another pair of models.
    """
    shapes = {name: tuple(distribution_RV.shape) for name, distribution_RV in distributions_RV.items()}
    for name, distribution_RV in distributions_RV.items():
        if distribution_RV.dim() != 2 or 0 in distribution_RV.shape or not distribution_RV.is_floating_point():
            raise UsageError(
                f"{name} has shape {shapes[name]}, dtype {distribution_RV.dtype}; allowed: floating point, rows by vocabulary;"
                " for a single distribution pass probs[None]"
            )
        if shapes[name] != next(iter(shapes.values())):
            raise UsageError(f"distributions differ in shape ({shapes}); pass one row per position, over one vocabulary")
        if not torch.isfinite(distribution_RV).all():
            raise UsageError(
                f"{name} row {_first(~torch.isfinite(distribution_RV).all(-1))} is not finite; allowed: probabilities"
            )
        if distribution_RV.min() < 0:
            row = _first((distribution_RV < 0).any(-1))
            raise UsageError(
                f"{name} row {row} has a negative entry, {distribution_RV[row].min():.3g}; allowed: probabilities from 0"
            )
        off_R = (distribution_RV.sum(-1, dtype=torch.float64) - 1).abs() > SUM_TOLERANCE
        if off_R.any():
            row = _first(off_R)
            raise UsageError(
                f"{name} row {row} sums to {distribution_RV[row].sum(dtype=torch.float64):.6g}; allowed: 1±{SUM_TOLERANCE:g}; "
                "apply softmax in float32 or float64"
            )


def check_pair(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int, most: int | None = None) -> None:
    """Refuse anything but probabilities of target and draft, and a number of drafts from 1 up to `most`."""
    check_distributions(target_probs_RV=target_probs_RV, draft_probs_RV=draft_probs_RV)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or (most is not None and count > most):
        allowed = "whole numbers from 1" + ("" if most is None else f" to {most}")
        raise UsageError(f"count is {count!r}; allowed: {allowed}; it is the number of drafts per node")


def by_rows(formula: Formula, target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Apply a formula in float64 to a few rows at a time, so that memory does not grow with the rows."""
    rows = max(1, chunk_size(target_probs_RV.device) // target_probs_RV.shape[1])
    pairs = zip(torch.split(target_probs_RV, rows), torch.split(draft_probs_RV, rows), strict=True)
    return torch.cat([formula(target_RV.double(), draft_RV.double(), count) for target_RV, draft_RV in pairs])


class SortedPair:
    """Both distributions in ascending order of p/q, with running sums; "places" are positions in that order.

    The n likeliest draft tokens are left out of the forward sums and counted one by one. Otherwise, if the draft is sure of a
    few tokens, rounding would wipe out the mass of the others, and that is all that matters once the few are drawn. Axis X:
    drawings of each row; K: the likeliest tokens; J: the tokens drawn so far.
    """

    def __init__(self, target_RV: Tensor, draft_RV: Tensor, count: int) -> None:
        ratio_RV = torch.where(draft_RV > 0, ratio(target_RV, draft_RV), torch.inf)
        self.ratio_RV, order_RV = ratio_RV.sort(-1)
        self.target_RV, self.draft_RV = target_RV.gather(1, order_RV), draft_RV.gather(1, order_RV)
        self.top_RK = self.draft_RV.topk(min(count, draft_RV.shape[1]), dim=1).indices
        self.target_tails_RX, self.draft_tails_RX = _tails(self.target_RV), _tails(self.draft_RV)
        self.target_sums_RX, self.draft_sums_RX = self._sums(self.target_RV), self._sums(self.draft_RV)

    def _sums(self, distribution_RV: Tensor) -> Tensor:
        """Return the sums of the first 0 to V tokens, without the likeliest."""
        return torch.nn.functional.pad(distribution_RV.scatter(1, self.top_RK, 0.0).cumsum(-1), (1, 0))

    def above(self, scale_RX: Tensor) -> Tensor:
        """Return Σ(p − λq)₊."""
        place_RX = self.places(scale_RX)
        return (self.target_tails_RX.gather(1, place_RX) - scale_RX * self.draft_tails_RX.gather(1, place_RX)).clamp_(min=0)

    def places(self, scale_RX: Tensor) -> Tensor:
        """Return how many tokens have p/q ≤ λ."""
        return torch.searchsorted(self.ratio_RV, scale_RX, right=True)

    def drawn(self, drawn_RXJ: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the likeliest tokens were drawn, and which drawn tokens are not among the likeliest."""
        same_RXJK = drawn_RXJ[:, :, :, None] == self.top_RK[:, None, None, :]
        return same_RXJK.any(-2), ~same_RXJK.any(-1)

    def left(self, drawn_RXJ: Tensor) -> Tensor:
        """Return the draft mass of the tokens not drawn yet; the likeliest are summed, which avoids cancellation."""
        gone_RXK, other_RXJ = self.drawn(drawn_RXJ)
        top_RX = torch.where(gone_RXK, 0.0, pick(self.draft_RV, self.top_RK)[:, None]).sum(-1)
        taken_RX = torch.where(other_RXJ, pick(self.draft_RV, drawn_RXJ), 0.0).sum(-1)
        return top_RX + (self.draft_sums_RX[:, -1:] - taken_RX).clamp_(min=0)

    def locate(self, weight: Callable[[Tensor], Tensor], end_RX: Tensor, uniforms_RX: Tensor) -> Tensor:
        """Draw a place before `end_RX`; `weight` returns the summed weight of the tokens before a place.

        Bisects, because each drawing has other weights, but their sums are cheap look-ups.
        """
        mark_RX = uniforms_RX * weight(end_RX)
        low_RX, high_RX = torch.zeros_like(end_RX), end_RX
        for _ in range(self.draft_RV.shape[1].bit_length()):
            middle_RX = (low_RX + high_RX) // 2
            beyond_RX = weight(middle_RX) > mark_RX
            low_RX, high_RX = torch.where(beyond_RX, low_RX, middle_RX), torch.where(beyond_RX, middle_RX, high_RX)
        return low_RX.clamp(max=self.draft_RV.shape[1] - 1)


def pick(values_RV: Tensor, places: Tensor) -> Tensor:
    """Look up places; `places` has any shape with rows first."""
    return values_RV.gather(1, places.flatten(1)).view(places.shape)


def _tails(distribution_RV: Tensor) -> Tensor:
    """Return the sums of the last V to 0 tokens."""
    return torch.nn.functional.pad(distribution_RV.flip(-1).cumsum(-1).flip(-1), (0, 1))


def _first(flags_R: Tensor) -> int:
    return int(flags_R.nonzero()[0, 0])


_BISECTIONS = 60
"""More than the bits of a float64's mantissa."""


def rejection_with_replacement(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Return the exact acceptance of the scheme rrs-wr: 1 − F(λ_n), with λ_{j+1} = λ_j + F(λ_j)."""
    scale_R1 = torch.zeros_like(target_RV[:, :1])
    missed_R1 = torch.ones_like(scale_R1)
    for _ in range(count):
        scale_R1 = scale_R1 + missed_R1
        missed_R1 = torch.addcmul(target_RV, draft_RV, scale_R1, value=-1).clamp_(min=0).sum(-1, keepdim=True)
    return (1 - missed_R1[:, 0]).clamp(0, 1)


def rejection_of_two(target_RV: Tensor, draft_RV: Tensor, _: int) -> Tensor:
    """Return the exact acceptance of the scheme rrs-wor with two drafts: a sum over all tokens that can be rejected first."""
    pair = SortedPair(target_RV, draft_RV, 2)
    first_RV = (pair.draft_RV - pair.target_RV).clamp(min=0)
    missed_R1 = first_RV.sum(-1, keepdim=True)
    every_RV1 = torch.arange(target_RV.shape[1], device=target_RV.device).expand_as(target_RV)[:, :, None]
    second_RV = pair.above(1 + ratio(missed_R1, pair.left(every_RV1)))
    return (1 - (ratio(first_RV, missed_R1) * second_RV).sum(-1)).clamp(0, 1)


def rejection_without_replacement(target_RV: Tensor, draft_RV: Tensor, uniforms_KRX: Tensor) -> Tensor:
    """Return the acceptance of the scheme rrs-wor for each of X random sequences of K − 1 rejected drafts.

    The mean over X estimates the acceptance. Only the identity of each rejected token is drawn, from (q_j − p_j)₊; the chance
    of rejecting is summed exactly (Rao-Blackwell).
    """
    count = len(uniforms_KRX)
    pair = SortedPair(target_RV, draft_RV, count)
    scale_RX = torch.zeros_like(uniforms_KRX[0])
    missed_RX = torch.ones_like(scale_RX)
    drawn_RXJ = torch.empty(*scale_RX.shape, 0, dtype=torch.long, device=target_RV.device)
    for rank in range(count):
        step_RX = ratio(missed_RX, pair.left(drawn_RXJ))
        if rank + 1 < count:
            place_RX = _draw_rejected(pair, scale_RX, step_RX, drawn_RXJ, uniforms_KRX[rank])
            drawn_RXJ = torch.cat([drawn_RXJ, place_RX[:, :, None]], dim=-1)
        scale_RX = scale_RX + step_RX
        # A step of 0 means that nothing was missed, or that no tokens are left to draw.
        missed_RX = torch.where(step_RX > 0, pair.above(scale_RX), missed_RX)
    return (1 - missed_RX).clamp(0, 1)


def _draw_rejected(pair: SortedPair, scale_RX: Tensor, step_RX: Tensor, drawn_RXJ: Tensor, uniforms_RX: Tensor) -> Tensor:
    """Draw a rejected token. With λ' = λ + step, weights are step · q for p/q ≤ λ, and λ'q − p from there up to λ'.

    All tokens drawn before have p/q ≤ λ.
    """
    next_RX = scale_RX + step_RX
    edge_RX = pair.places(scale_RX)
    gone_RXK, other_RXJ = pair.drawn(drawn_RXJ)
    taken_RXJ = torch.where(other_RXJ, pick(pair.draft_RV, drawn_RXJ), 0.0)
    place_R1K = pair.top_RK[:, None]
    top_target_R1K, top_draft_R1K = pick(pair.target_RV, place_R1K), pick(pair.draft_RV, place_R1K)
    top_RXK = torch.where(
        place_R1K < edge_RX[:, :, None],
        step_RX[:, :, None] * top_draft_R1K,
        next_RX[:, :, None] * top_draft_R1K - top_target_R1K,
    ).masked_fill_(gone_RXK, 0.0)

    def weight(stop_RX: Tensor) -> Tensor:
        """Return the summed weight of the tokens before a place."""
        inner_RX = torch.minimum(stop_RX, edge_RX)
        taken_RX = torch.where(drawn_RXJ < inner_RX[:, :, None], taken_RXJ, 0.0).sum(-1)
        whole_RX = step_RX * (pair.draft_sums_RX.gather(1, inner_RX) - taken_RX)
        draft_RX = pair.draft_sums_RX.gather(1, stop_RX) - pair.draft_sums_RX.gather(1, inner_RX)
        target_RX = pair.target_sums_RX.gather(1, stop_RX) - pair.target_sums_RX.gather(1, inner_RX)
        top_RX = torch.where(place_R1K < stop_RX[:, :, None], top_RXK, 0.0).sum(-1)
        return whole_RX + (next_RX * draft_RX - target_RX) + top_RX

    return pair.locate(weight, pair.places(next_RX), uniforms_RX)


def sequential_acceptance(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Return the exact acceptance of K-SEQ (the scheme kseq): 1 − (1 − β(ρ))ⁿ, §A.2 of [1] after [2].

    β(ρ) = Σ min(p/ρ, q) = (1 − F(ρ))/ρ with F(ρ) = Σ(p − ρq)₊, so eq. 30 reads (1 − β)ⁿ = F. As in the scheme, the result is
    the upper end of the bisection, because below the root the residual would be negative.
    """
    pair = SortedPair(target_RV, draft_RV, 1)

    def accepted(scale_R1: Tensor) -> Tensor:
        each_R1 = ((1 - pair.above(scale_R1)) / scale_R1).clamp(0, 1)
        return -torch.expm1(count * torch.log1p(-each_R1))

    low_R1 = torch.ones_like(target_RV[:, :1])
    high_R1 = low_R1 * count
    for _ in range(_BISECTIONS):
        middle_R1 = (low_R1 + high_R1) / 2
        too_low_R1 = accepted(middle_R1) > 1 - pair.above(middle_R1)
        low_R1, high_R1 = torch.where(too_low_R1, middle_R1, low_R1), torch.where(too_low_R1, high_R1, middle_R1)
    return accepted(high_R1)[:, 0]
