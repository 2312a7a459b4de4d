"""Acceptance of the schemes rrs-wr, rrs-wor, kseq and gumbel, by sums that a sort by p/q turns into look-ups.

**Recursive rejection.** The residual after any number of rejections is (p − λq)₊, rescaled, for some λ: rejecting once
more, where the draft law is q without the tokens drawn so far and these hold mass E of it, moves λ to λ + F(λ)/(1 − E) with
F(λ) = Σ(p − λq)₊. The chance of having rejected everything so far is F(λ) itself. With replacement E stays 0 and the chain
is deterministic. Without, each rejected token adds its mass to E; tokens once rejected never come back into the residual,
so E is all that is remembered of them, and after one sort F is two look-ups: a drawing costs O(n log V) instead of n passes
over the vocabulary.

**Drafts and token from one exponential race (gumbel).** Token j arrives at time E_j/q(j) in the draft's race and E_j/p(j)
in the target's, with the same exponential E_j. The target's winner i is accepted if fewer than n others beat it in the
draft's race. Given i and its time t (exponential of rate one in the target's race), token j beats it with rate (ρq(j) −
p(j))₊, ρ = p(i)/q(i), up to t. So n arrivals compete with one clock of rate one: the chance that all of them come first is
∏ G_k/(1 + G_k), with G_k the rates left before the k-th arrival. The time is thereby integrated out, and only i and the
order of the first n − 1 arrivals are left to draw.

References
----------
.. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
.. [2] Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport, NeurIPS 2023.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.schemes.arithmetic import ratio
from polydraft.theory._laws import SortedPair, pick

_BISECTIONS = 60
"""More than a float64 has bits."""


def rejection_with_replacement(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Exact acceptance of the scheme rrs-wr: 1 − F(λ_n), λ_{j+1} = λ_j + F(λ_j)."""
    scale_R1 = torch.zeros_like(target_RV[:, :1])
    missed_R1 = torch.ones_like(scale_R1)
    for _ in range(count):
        scale_R1 = scale_R1 + missed_R1
        missed_R1 = torch.addcmul(target_RV, draft_RV, scale_R1, value=-1).clamp_(min=0).sum(-1, keepdim=True)
    return (1 - missed_R1[:, 0]).clamp(0, 1)


def rejection_of_two(target_RV: Tensor, draft_RV: Tensor, _: int) -> Tensor:
    """Exact acceptance of the scheme rrs-wor with two drafts: every first rejection is summed over."""
    pair = SortedPair(target_RV, draft_RV, 2)
    first_RV = (pair.draft_RV - pair.target_RV).clamp(min=0)
    missed_R1 = first_RV.sum(-1, keepdim=True)
    every_RV1 = torch.arange(target_RV.shape[1], device=target_RV.device).expand_as(target_RV)[:, :, None]
    second_RV = pair.above(1 + ratio(missed_R1, pair.left(every_RV1)))
    return (1 - (ratio(first_RV, missed_R1) * second_RV).sum(-1)).clamp(0, 1)


def rejection_without_replacement(target_RV: Tensor, draft_RV: Tensor, uniforms_KRX: Tensor) -> Tensor:
    """Return the acceptance of the scheme rrs-wor given each of X sampled drawings of K drafts, the first K − 1 rejected.

    Its mean over X is the acceptance: the chance of rejection is summed exactly at each draft, and only which token was
    rejected is drawn, from (q_j − p_j)₊ (Rao-Blackwell).
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
        # No step: everything was covered, or support is exhausted and nothing more is drawn.
        missed_RX = torch.where(step_RX > 0, pair.above(scale_RX), missed_RX)
    return (1 - missed_RX).clamp(0, 1)


def _draw_rejected(pair: SortedPair, scale_RX: Tensor, step_RX: Tensor, drawn_RXJ: Tensor, uniforms_RX: Tensor) -> Tensor:
    """Draw a rejected token: with λ' = λ + step, its weight is step · q up to ratio λ, λ'q − p from there up to λ'.

    All tokens drawn before lie up to λ.
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
        """Weight of the tokens before a place."""
        inner_RX = torch.minimum(stop_RX, edge_RX)
        taken_RX = torch.where(drawn_RXJ < inner_RX[:, :, None], taken_RXJ, 0.0).sum(-1)
        whole_RX = step_RX * (pair.draft_sums_RX.gather(1, inner_RX) - taken_RX)
        draft_RX = pair.draft_sums_RX.gather(1, stop_RX) - pair.draft_sums_RX.gather(1, inner_RX)
        target_RX = pair.target_sums_RX.gather(1, stop_RX) - pair.target_sums_RX.gather(1, inner_RX)
        top_RX = torch.where(place_R1K < stop_RX[:, :, None], top_RXK, 0.0).sum(-1)
        return whole_RX + (next_RX * draft_RX - target_RX) + top_RX

    return pair.locate(weight, pair.places(next_RX), uniforms_RX)


def sequential_acceptance(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Exact acceptance of K-SEQ (the scheme kseq): 1 − (1 − β(ρ))ⁿ, §A.2 of [1] after [2].

    β(ρ) = Σ min(p/ρ, q) = (1 − F(ρ))/ρ with F(ρ) = Σ(p − ρq)₊, so that eq. 30 reads (1 − β)ⁿ = F. Of the bisection the upper
    end is taken, as the scheme must: below the root its residual would be negative.
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


def gumbel_of_one(target_RV: Tensor, draft_RV: Tensor, _: int) -> Tensor:
    """Exact acceptance with one draft: Σ_i p(i)/(1 + G(ρ_i))."""
    pair = SortedPair(target_RV, draft_RV, 1)
    finite_RV = torch.isfinite(pair.ratio_RV)
    rate_RV = _rates(pair, torch.where(finite_RV, pair.ratio_RV, 0.0), torch.zeros_like(pair.top_RK)[:, None, :0])
    return torch.where(finite_RV, pair.target_RV / (1 + rate_RV), 0.0).sum(-1).clamp(max=1)


def gumbel_race(target_RV: Tensor, draft_RV: Tensor, uniforms_KRX: Tensor) -> Tensor:
    """Return the acceptance of K drafts given each of X sampled races: who wins the target's and who else beats it."""
    count = len(uniforms_KRX)
    pair = SortedPair(target_RV, draft_RV, count)
    tails_RX = pair.target_tails_RX.flip(-1)
    mark_RX = uniforms_KRX[0] * tails_RX[:, -1:]
    from_end_RX = torch.searchsorted(tails_RX, mark_RX, right=True).clamp(max=target_RV.shape[1])
    winner_RX = target_RV.shape[1] - from_end_RX
    scale_RX = pair.ratio_RV.gather(1, winner_RX)
    drafted_RX = torch.isfinite(scale_RX)
    scale_RX = torch.where(drafted_RX, scale_RX, 0.0)
    beaten_RX = torch.ones_like(scale_RX)
    drawn_RXJ = torch.empty(*scale_RX.shape, 0, dtype=torch.long, device=target_RV.device)
    for rank in range(count):
        rate_RX = _rates(pair, scale_RX, drawn_RXJ)
        beaten_RX = beaten_RX * rate_RX / (1 + rate_RX)
        if rank + 1 < count:
            place_RX = pair.locate(_weights(pair, scale_RX, drawn_RXJ), pair.places(scale_RX), uniforms_KRX[rank + 1])
            drawn_RXJ = torch.cat([drawn_RXJ, place_RX[:, :, None]], dim=-1)
    return torch.where(drafted_RX, 1 - beaten_RX, 0.0)


def _rates(pair: SortedPair, scale_RX: Tensor, drawn_RXJ: Tensor) -> Tensor:
    """G: summed rates of the tokens that can beat the winner and have not arrived."""
    return _weights(pair, scale_RX, drawn_RXJ)(pair.places(scale_RX)).clamp(min=0)


def _weights(pair: SortedPair, scale_RX: Tensor, drawn_RXJ: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the summed rates of the tokens before a place, as a function of the place."""
    gone_RXK, other_RXJ = pair.drawn(drawn_RXJ)
    place_R1K = pair.top_RK[:, None]
    top_RXK = scale_RX[:, :, None] * pick(pair.draft_RV, place_R1K) - pick(pair.target_RV, place_R1K)
    top_RXK = top_RXK.clamp(min=0).masked_fill(gone_RXK, 0.0)
    taken_RXJ = scale_RX[:, :, None] * pick(pair.draft_RV, drawn_RXJ) - pick(pair.target_RV, drawn_RXJ)
    taken_RXJ = torch.where(other_RXJ, taken_RXJ, 0.0)

    def weight(stop_RX: Tensor) -> Tensor:
        light_RX = scale_RX * pair.draft_sums_RX.gather(1, stop_RX) - pair.target_sums_RX.gather(1, stop_RX)
        taken_RX = torch.where(drawn_RXJ < stop_RX[:, :, None], taken_RXJ, 0.0).sum(-1)
        return light_RX - taken_RX + torch.where(place_R1K < stop_RX[:, :, None], top_RXK, 0.0).sum(-1)

    return weight
