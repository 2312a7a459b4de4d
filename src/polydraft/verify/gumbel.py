"""GUMBEL: children and emitted token from one shared noise, E_i ~ Exp(1): the n smallest E_i/q_i, and the smallest E_i/p_i.

The emitted token takes no notice of the children. These are a draw without replacement, in order; what verification needs
of the noise is drawn anew, given them, so it must see all that were drawn, expanded in the tree or not. The n-th arrival of
E/q is at T_n, a sum of exponential gaps whose rates are the draft mass left; the k-th child's p-time is q T_k / p. Of a
token i that was not drawn, E_i exceeds q_i T_n by a fresh exponential number, so the first p-time among those has the
cumulative hazard H(t) = Σ (p_i t − q_i T_n)₊, and is i's with chance ∝ p_i among the terms that are positive.
"""

import math

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.verify.arrays import normalised, ratio
from polydraft.verify.scheme import SCHEMES, DistinctChildren

_MOST_CHILDREN = 64
"""Every child takes a random number, and the numbers a node may use are fixed before its children are known."""
_SPACING = 0.35
"""Of the trapezoidal rule in log t; its error is about exp(−π²/spacing), 6e-13."""
_EARLIEST, _LATEST = 1e-12, 45.0
_ROWS = 512
"""Rows computed together, to stay in the cache."""


@SCHEMES.register("gumbel")
class Gumbel(DistinctChildren):
    """Distinct candidates that share their noise with the emitted token."""

    name = "gumbel"
    max_children = _MOST_CHILDREN
    verify_uniforms = 2 + _MOST_CHILDREN

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Integrate over the noise given the children; slow, for tests; exact to 1e-10 where draft masses are above 1e-7."""
        target_RV, draft_RV = normalised(target_probs_RV), normalised(draft_probs_RV)
        distribution_RV = target_RV.clone()
        present_R = (children_RK != NO_TOKEN).sum(-1)
        for count in range(1, children_RK.shape[1] + 1):
            rows = (present_R == count).nonzero()[:, 0]
            distribution_RV[rows] = first_arrival_distribution(target_RV[rows], draft_RV[rows], children_RK[rows, :count])
        return distribution_RV

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Draw the arrivals, then the first p-time of the children and of all others."""
        exists_RK = children_RK != NO_TOKEN
        token_RK = torch.where(exists_RK, children_RK, children_RK[:, :1]).clamp_(min=0)
        target_RV = normalised(target_probs_RV)
        # Without a child the draft's distribution must not matter, not even for which number gives which token: any may stand
        # there.
        draft_RV = torch.where(exists_RK.any(-1, keepdim=True), normalised(draft_probs_RV), target_RV)
        target_RK = target_RV.gather(1, token_RK) * exists_RK
        draft_RK = draft_RV.gather(1, token_RK) * exists_RK
        # From here on both distributions are those of the tokens that were not drawn; sums, since a missing child repeats a
        # token.
        target_RV, draft_RV = target_RV.scatter_add(1, token_RK, -target_RK), draft_RV.scatter_add(1, token_RK, -draft_RK)
        exponential_RU = -torch.log1p(-uniforms_RU[:, : 2 + children_RK.shape[1]].double())
        left_RK = draft_RK.flip(-1).cumsum(-1).flip(-1) + draft_RV.sum(-1, keepdim=True)
        gap_RK = torch.where(exists_RK, exponential_RU[:, 2:] / left_RK, 0.0)
        arrival_RK = gap_RK.cumsum(-1)
        time_RK = torch.where(target_RK > 0, draft_RK * arrival_RK / target_RK, torch.inf)
        first_R1, index_R1 = time_RK.min(-1, keepdim=True)
        other_R1, other_time_R1 = _first_of_others(
            target_RV, draft_RV, arrival_RK[:, -1:], exponential_RU[:, :1], uniforms_RU[:, 1:2].double()
        )
        token_R1 = torch.where(first_R1 < other_time_R1, token_RK.gather(1, index_R1), other_R1)
        # Also where the distributions are not numbers.
        return torch.where(torch.minimum(first_R1, other_time_R1) < torch.inf, token_R1, NO_TOKEN)[:, 0]


def _first_of_others(
    target_RV: Tensor, draft_RV: Tensor, last_R1: Tensor, exponential_R1: Tensor, uniform_R1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the token of smallest p-time among those of which E/q > `last`, and that time; infinity where there is none."""
    key_RV, order_RV = torch.where(target_RV > 0, draft_RV / target_RV, torch.inf).sort(dim=1, stable=True)
    target_sum_RV, draft_sum_RV = target_RV.gather(1, order_RV).cumsum(-1), draft_RV.gather(1, order_RV).cumsum(-1)
    # H where a token's term becomes positive; it rises with the token's place in this order.
    reached_RV = last_R1 * (target_sum_RV[:, :-1] * key_RV[:, 1:] - draft_sum_RV[:, :-1])
    active_R1 = ((reached_RV <= exponential_R1) & (key_RV[:, 1:] < torch.inf)).sum(-1, keepdim=True)
    mass_R1 = target_sum_RV.gather(1, active_R1)
    time_R1 = (exponential_R1 + last_R1 * draft_sum_RV.gather(1, active_R1)) / mass_R1
    mark_R1 = torch.minimum(uniform_R1 * mass_R1, mass_R1.nextafter(torch.zeros_like(mass_R1)))
    place_R1 = torch.searchsorted(target_sum_RV, mark_R1, right=True).clamp_(max=order_RV.shape[1] - 1)
    return order_RV.gather(1, place_R1), torch.where(mass_R1 > 0, time_R1, torch.inf)


def first_arrival_distribution(target_RV: Tensor, draft_RV: Tensor, children_RK: Tensor) -> Tensor:
    """Return the distribution of the token with the smallest E_i/p_i, given the order of the first E_i/q_i; exact and slow.

    Fix the time t at which the token i comes first in E/p. Every other E_j then exceeds p_j t, so that in E/q a token j arrives
    at rate q_j from the time a_j t on, a_j = p_j/q_j, and i at a_i t itself. Between these times all rates are constant, and
    the number of children arrived so far, in the right order and with nothing else before, is a Markov chain. With G_i(t) the
    chance that the order is as given, the distribution is ∝ ∫ p_i e^{-t} G_i(t) dt; G_i(t) is smooth in log t.

    Parameters
    ----------
    target_RV, draft_RV : Tensor
        Distributions that sum to one, as float64.
    children_RK : Tensor
        Distinct tokens with draft mass.
    """
    steps = math.ceil(math.log(_LATEST / _EARLIEST) / _SPACING)
    time_T = _EARLIEST * torch.exp(_SPACING * torch.arange(steps + 1, dtype=torch.float64, device=target_RV.device))
    distribution_RV = torch.empty_like(target_RV)
    for first in range(0, len(target_RV), _ROWS):
        rows = slice(first, first + _ROWS)
        distribution_RV[rows] = _distribution_of_rows(target_RV[rows], draft_RV[rows], children_RK[rows], time_T)
    return distribution_RV


def _distribution_of_rows(target_RV: Tensor, draft_RV: Tensor, children_RK: Tensor, time_T: Tensor) -> Tensor:
    vocabulary, count = target_RV.shape[1], children_RK.shape[1]
    release_RV, order_RV = torch.where(draft_RV > 0, target_RV / draft_RV, torch.inf).sort(dim=1)
    draft_RV, target_RV = draft_RV.gather(1, order_RV), target_RV.gather(1, order_RV)
    child_RKV = order_RV[:, None] == children_RK[:, :, None]
    # Rates in the segment that begins with a token's release: of leaving state l (l children arrived), and of advancing.
    advance_RKV = (child_RKV * draft_RV[:, None]).cumsum(-1)
    leave_RKV = draft_RV.cumsum(-1)[:, None] - (advance_RKV.cumsum(1) - advance_RKV)
    segments = [_Segment(release_RV, leave_RKV, advance_RKV, place, time_T) for place in range(vocabulary)]

    nothing_RT, all_RT = torch.zeros(len(target_RV), len(time_T)).double(), torch.ones(len(target_RV), len(time_T)).double()
    states = [all_RT] + [nothing_RT] * count
    before = []  # chances of the states when each token is released
    for segment in segments:
        before.append(states)
        states = segment.forward(states)
    completes = [nothing_RT] * count + [all_RT]
    weight_T = time_T * torch.exp(-time_T)
    distribution_RV = torch.zeros_like(target_RV)
    for place in reversed(range(vocabulary)):
        completes = segments[place].backward(completes)
        # i is no child: all have arrived by then. Or it is the l-th: l − 1 have, and from l on the others follow.
        chance_RT = before[place][count] * ~child_RKV[:, :, place].any(-1, keepdim=True)
        for rank in range(count):
            chance_RT = chance_RT + before[place][rank] * completes[rank + 1] * child_RKV[:, rank, place][:, None]
        distribution_RV[:, place] = (chance_RT * weight_T).sum(-1)
    # A drawing of chance 0 in float64 has no distribution to speak of.
    distribution_RV = normalised(distribution_RV * target_RV)
    return torch.zeros_like(distribution_RV).scatter_(
        1, order_RV, torch.where(distribution_RV.sum(-1, keepdim=True) > 0, distribution_RV, target_RV)
    )


class _Segment:
    """Transition chances of the chain from one token's release to the next, for all times t at once.

    They are divided differences of exp(−rate · length) over the states passed, times the rates of advancing. Since the rate
    of leaving falls by just the rate of advancing from one state to the next, every quotient below is a weighted mean.
    """

    def __init__(self, release_RV: Tensor, leave_RKV: Tensor, advance_RKV: Tensor, place: int, time_T: Tensor) -> None:
        begin_R1 = release_RV[:, place : place + 1]
        last = place + 1 == release_RV.shape[1]
        end_R1 = torch.full_like(begin_R1, torch.inf) if last else release_RV[:, place + 1 : place + 2]
        # Tokens without draft mass are released never; nothing is left to happen between them.
        span_R1 = torch.where(begin_R1 < torch.inf, end_R1 - begin_R1, 0.0)
        leave_RK, advance_RK = leave_RKV[:, :, place].clamp(min=0), advance_RKV[:, :, place]
        count = leave_RK.shape[1]
        chance: dict[tuple[int, int], Tensor] = {}
        for state in range(count):
            rate_R1 = leave_RK[:, state : state + 1] * span_R1
            rate_R1 = torch.where(leave_RK[:, state : state + 1] > 0, rate_R1, 0.0)  # not 0 · ∞
            chance[state, state] = torch.exp(-rate_R1 * time_T)
        chance[count, count] = torch.ones_like(chance[0, 0])
        for passed in range(1, count + 1):
            for state in range(count + 1 - passed):
                reached = state + passed
                first_R1, final_R1 = advance_RK[:, state : state + 1], advance_RK[:, reached - 1 : reached]
                total_R1 = advance_RK[:, state:reached].sum(-1, keepdim=True)
                if reached == count:  # not left any more
                    total_R1 = leave_RK[:, state : state + 1]
                difference_RT = first_R1 * chance[state + 1, reached] - final_R1 * chance[state, reached - 1]
                chance[state, reached] = ratio(difference_RT, total_R1)
        self.chance = chance

    def forward(self, states: list[Tensor]) -> list[Tensor]:
        """Return chances of the states at the end, given those at the beginning."""
        ends = [torch.zeros_like(state_RT) for state_RT in states]
        for (state, reached), chance_RT in self.chance.items():
            ends[reached].addcmul_(states[state], chance_RT)
        return ends

    def backward(self, completes: list[Tensor]) -> list[Tensor]:
        """Return chances to complete from each state at the beginning, given those at the end."""
        begins = [torch.zeros_like(complete_RT) for complete_RT in completes]
        for (state, reached), chance_RT in self.chance.items():
            begins[state].addcmul_(completes[reached], chance_RT)
        return begins
