"""Acceptance of verifiers that have a closed form and are not optimal for their drafts.

References
----------
.. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
.. [2] Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport, NeurIPS 2023.
"""

import torch
from torch import Tensor

from polydraft.theory.laws import by_rows, check_count, check_laws
from polydraft.theory.sorted_pair import SortedPair
from polydraft.theory.without_replacement import MAX_COUNT, inclusion

_BISECTIONS = 60
"""More than a float64 has bits."""


def naive_acceptance(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int, *, replacement: bool) -> Tensor:
    """Return the acceptance of drawing the token from the target and looking whether it was drafted: Σ p(i) P(i drafted).

    Parameters
    ----------
    target_probs_RV, draft_probs_RV : Tensor
        Laws, one row a position; each sums to one.
    count : int
        Drafts a position; at most 64 without replacement.
    replacement : bool
        Whether drafts are independent, with P(i drafted) = 1 − (1 − q(i))ⁿ, or distinct as in the scheme naive; then the
        sum over all drawings is one integral, see `without_replacement.inclusion`.

    Returns
    -------
    Tensor
        Acceptance of each row, float64.
    """
    check_laws(target_probs_RV=target_probs_RV, draft_probs_RV=draft_probs_RV)
    check_count(count, most=None if replacement else MAX_COUNT)

    def acceptance(target_RV: Tensor, draft_RV: Tensor) -> Tensor:
        if replacement:
            drafted_RV = -torch.expm1(count * torch.log1p(-draft_RV.clamp(max=1)))
            return (target_RV * drafted_RV).sum(-1)
        return inclusion(target_RV, draft_RV, count)

    return by_rows(acceptance, target_probs_RV, draft_probs_RV).clamp(0, 1)


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
