"""GUMBEL: children and emitted token from one shared noise, E_i ~ Exp(1): the n smallest E_i/q_i, and the smallest E_i/p_i.

The emitted token takes no notice of the children. These are a draw without replacement, in order; what verification needs
of the noise is drawn anew, given them, so it must see all that were drawn, expanded in the tree or not. The n-th arrival of
E/q is at T_n, a sum of exponential gaps whose rates are the draft mass left; the k-th child's p-time is q T_k / p. Of a
token i that was not drawn, E_i exceeds q_i T_n by a fresh exponential number, so the first p-time among those has the
cumulative hazard H(t) = Σ (p_i t − q_i T_n)₊, and is i's with chance ∝ p_i among the terms that are positive.
"""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_distinct
from polydraft.schemes.arithmetic import normalised, without
from polydraft.schemes.arrivals import first_arrival_law
from polydraft.schemes.scheme import SCHEMES, Scheme

_MOST_CHILDREN = 64
"""Every child takes a random number, and the numbers a node may use are fixed before its children are known."""


@SCHEMES.register("gumbel")
class Gumbel(Scheme):
    """Distinct candidates that share their noise with the emitted token."""

    name = "gumbel"
    max_children = _MOST_CHILDREN
    verify_uniforms = 2 + _MOST_CHILDREN
    replacement = False

    def child_law(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Draw without replacement, which is the law of the smallest E/q in their order."""
        return without(normalised(draft_probs_RV), earlier_RJ)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw all children from one table of sums."""
        return draw_distinct(draft_probs_RV, uniforms_RK)

    def law(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Integrate over the noise given the children; slow, for tests; exact to 1e-10 where draft masses are above 1e-7."""
        target_RV, draft_RV = normalised(target_probs_RV), normalised(draft_probs_RV)
        law_RV = target_RV.clone()
        present_R = (children_RK != NO_TOKEN).sum(-1)
        for count in range(1, children_RK.shape[1] + 1):
            rows = (present_R == count).nonzero()[:, 0]
            law_RV[rows] = first_arrival_law(target_RV[rows], draft_RV[rows], children_RK[rows, :count])
        return law_RV

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Draw the arrivals, then the first p-time of the children and of all others."""
        exists_RK = children_RK != NO_TOKEN
        token_RK = torch.where(exists_RK, children_RK, children_RK[:, :1]).clamp_(min=0)
        target_RV, draft_RV = normalised(target_probs_RV), normalised(draft_probs_RV)
        target_RK = target_RV.gather(1, token_RK) * exists_RK
        draft_RK = draft_RV.gather(1, token_RK) * exists_RK
        # From here on both laws are those of the tokens that were not drawn; sums, since a missing child repeats a token.
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
        # Also where the laws are not numbers.
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
