"""Acceptance of drafts and token taken from one exponential race (scheme gumbel).

Token j arrives at time E_j/q(j) in the draft's race and E_j/p(j) in the target's, with the same exponential E_j. The target's
winner i is accepted if fewer than n others beat it in the draft's race. Given i and its time t (exponential of rate one in
the target's race), token j beats it with rate (ρq(j) − p(j))₊, ρ = p(i)/q(i), up to t. So n arrivals compete with one clock
of rate one: the chance that all of them come first is ∏ G_k/(1 + G_k), with G_k the rates left before the k-th arrival. The
time is thereby integrated out, and only i and the order of the first n − 1 arrivals are left to draw.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.theory.sorted_pair import SortedPair, pick


def gumbel_of_one(target_RV: Tensor, draft_RV: Tensor) -> Tensor:
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
