"""Recursive rejection sampling: speculative sampling and both algorithms of MCSD.

References
----------
.. [1] Leviathan et al. 2023, arXiv:2211.17192 (speculative sampling).
.. [2] Multi-Candidate Speculative Decoding, Algorithms 1 and 2.
"""

import torch
from torch import Tensor

from polydraft.devices import can_sync
from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.sampling.categorical import BELOW_ONE
from polydraft.verify.scheme import SCHEMES, DistinctChildren, IndependentChildren, Scheme, Selection
from polydraft.verify.weights import normalised, quotient, ratio


def _rejection_distribution(target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, replacement: bool) -> Tensor:
    """Test the children in draw order; each rejection replaces the target distribution by its residual.

    Both distributions stay unnormalised, with their masses kept separately: normalising the residual (p − q)₊ would take twice
    as many passes over the vocabulary.

    Deviations from [2]: computed in float64; never divides by a residual without mass (p = q), where nothing is left to emit;
    the acceptance test is the strict `U q < p`, so a token without target mass is never accepted.
    """
    target_RV, draft_RV = target_probs_RV.double(), draft_probs_RV.double()
    if not replacement:
        draft_RV = draft_RV.clone() if draft_RV is draft_probs_RV else draft_RV  # removals below are in place
    target_mass_R1, draft_mass_R1 = target_RV.sum(-1, keepdim=True), draft_RV.sum(-1, keepdim=True)
    undecided_R1 = torch.ones_like(target_mass_R1)
    emitted = []
    for child_R1 in children_RK.T[:, :, None]:
        exists_R1 = child_R1 != NO_TOKEN
        token_R1 = child_R1.clamp(min=0)
        drawn_R1 = draft_RV.gather(1, token_R1)
        # Target mass per unit of draft mass: residuals are (p − scale · q)₊.
        scale_R1 = torch.where(exists_R1, ratio(target_mass_R1, draft_mass_R1), 0.0)
        accept_R1 = ratio(target_RV.gather(1, token_R1), scale_R1 * drawn_R1).clamp(max=1.0)
        emitted.append(undecided_R1 * accept_R1)
        undecided_R1 = undecided_R1 * (1 - accept_R1)
        target_RV = torch.addcmul(target_RV, draft_RV, scale_R1, value=-1).clamp_(min=0)
        target_mass_R1 = target_RV.sum(-1, keepdim=True)
        if not replacement:
            draft_RV.scatter_(1, token_R1, torch.where(exists_R1, 0.0, drawn_R1))
            draft_mass_R1 = draft_RV.sum(-1, keepdim=True)
    distribution_RV = target_RV.mul_(undecided_R1 * ratio(torch.ones_like(target_mass_R1), target_mass_R1))
    return distribution_RV.scatter_add_(1, children_RK.clamp(min=0), torch.cat(emitted, dim=1))


def _rejection_token(
    target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniform_R1: Tensor, replacement: bool
) -> Tensor:
    """Draw from `_rejection_distribution` without computing all of it: an accepted child needs no residual.

    One random number decides everything: after a rejection it is uniform above the chance to accept.
    """
    target_RV, draft_RV, number_R1 = target_probs_RV.double(), draft_probs_RV.double(), uniform_R1.double()
    target_mass_R1, draft_mass_R1 = target_RV.sum(-1, keepdim=True), draft_RV.sum(-1, keepdim=True)
    undecided_R1 = torch.ones_like(number_R1, dtype=torch.bool)
    token_R1 = nearly_R1 = torch.full_like(children_RK[:, :1], NO_TOKEN)
    for child_R1 in children_RK.T[:, :, None]:
        exists_R1, index_R1 = child_R1 != NO_TOKEN, child_R1.clamp(min=0)
        drawn_R1 = draft_RV.gather(1, index_R1)
        scale_R1 = quotient(target_mass_R1, draft_mass_R1) * exists_R1
        accept_R1 = quotient(target_RV.gather(1, index_R1), scale_R1 * drawn_R1).clamp(max=1) * exists_R1
        token_R1 = torch.where(undecided_R1 & (number_R1 < accept_R1), child_R1, token_R1)
        nearly_R1 = torch.where(accept_R1 > 0.5, child_R1, nearly_R1)
        undecided_R1 = undecided_R1 & (number_R1 >= accept_R1)
        number_R1 = quotient(number_R1 - accept_R1, 1 - accept_R1).clamp(0, BELOW_ONE)
        if can_sync(token_R1) and not undecided_R1.any():
            return token_R1[:, 0]
        target_RV = torch.addcmul(target_RV, draft_RV, scale_R1, value=-1).clamp_(min=0)
        target_mass_R1 = target_RV.sum(-1, keepdim=True)
        if not replacement:
            draft_RV = draft_RV.scatter(1, index_R1, drawn_R1 * ~exists_R1)
            draft_mass_R1 = draft_RV.sum(-1, keepdim=True)
    left_R1 = draw_one(target_RV, number_R1[:, 0])[:, None]
    # Rounding may reject although p = q: then nothing is left, and the child was almost accepted.
    left_R1 = torch.where(left_R1 == NO_TOKEN, nearly_R1, left_R1)
    return torch.where(undecided_R1, left_R1, token_R1)[:, 0]


class _Rejection(Scheme):
    """Candidates tested one after the other against what the earlier ones left of the target distribution."""

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Chain residuals; without replacement, a rejected child also leaves the draft distribution."""
        return _rejection_distribution(target_probs_RV, draft_probs_RV, children_RK, bool(self.replacement))

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Stop at the first child that is accepted."""
        return _rejection_token(target_probs_RV, draft_probs_RV, children_RK, uniforms_RU[:, :1], bool(self.replacement))


@SCHEMES.register("rrs-wor")
class RejectionWithoutReplacement(_Rejection, DistinctChildren):
    """MCSD Algorithm 2: distinct candidates, tested one after the other."""

    name = "rrs-wor"


@SCHEMES.register("rrs-wr")
class RejectionWithReplacement(_Rejection, IndependentChildren):
    """MCSD Algorithm 1: independent candidates, tested one after the other."""

    name = "rrs-wr"


@SCHEMES.register("speculative")
class Speculative(RejectionWithReplacement):
    """Plain speculative sampling [1]: one candidate per node."""

    name = "speculative"
    max_children = 1
    select_uniforms = 0

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        """Pick the only child, which follows the draft distribution."""
        token_R = children_RK[:, 0]
        return Selection(token_R, normalised(draft_probs_RV) * (token_R != NO_TOKEN)[:, None])
