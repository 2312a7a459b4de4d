"""K-SEQ: independent children tested one after the other, each accepted with chance min(1, p / (ρ q)).

ρ solves 1 − (1 − β(ρ))ⁿ = ρ β(ρ), β(ρ) = Σ min(p / ρ, q) ([1] eq. 30); acceptance is 1 − (1 − β)ⁿ, or more if the residual
hits a child.

References
----------
.. [1] Towards Optimal Multi-draft Speculative Decoding, Appendix A.2, after Sun et al., SpecTr, arXiv:2310.15141.
"""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.verify.scheme import SCHEMES, IndependentChildren
from polydraft.verify.weights import normalised, ratio


@SCHEMES.register("kseq")
class KSeq(IndependentChildren):
    """Independent candidates, each accepted with the same reduced ratio (SpecTr's K-SEQ).

    Parameters
    ----------
    steps : int
        Bisection steps for ρ. Too few cost acceptance, never exactness.
    """

    name = "kseq"

    def __init__(self, steps: int = 32) -> None:
        self.steps = steps

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Eq. 32 for the children, and eq. 33 for the residual."""
        exists_RK = children_RK != NO_TOKEN
        token_RK = children_RK.clamp(min=0)
        target_RV, draft_RV = normalised(target_probs_RV), normalised(draft_probs_RV)
        count_R1 = exists_RK.sum(-1, keepdim=True)
        rho_R1 = self._rho(target_RV, draft_RV, count_R1)
        common_RV = torch.minimum(target_RV / rho_R1, draft_RV)
        each_R1 = common_RV.sum(-1, keepdim=True)
        # How often a token's share of `common` is emitted by some child: (1 − (1 − β)ⁿ) / β.
        times_R1 = ratio(1 - (1 - each_R1).clamp(min=0) ** count_R1, each_R1)
        residual_RV = normalised(torch.addcmul(target_RV, common_RV, times_R1, value=-1).clamp_(min=0))
        accept_RK = ratio(common_RV.gather(1, token_RK), draft_RV.gather(1, token_RK)) * exists_RK
        undecided_RK = (1 - accept_RK).cumprod(-1)
        emitted_RK = accept_RK * torch.nn.functional.pad(undecided_RK[:, :-1], (1, 0), value=1.0)
        return (residual_RV * undecided_RK[:, -1:]).scatter_add_(1, token_RK, emitted_RK)

    def _rho(self, target_RV: Tensor, draft_RV: Tensor, count_R1: Tensor) -> Tensor:
        """Return ρ or slightly more: the upper end of the interval, because below the root eq. 33 would be negative."""
        lower_R1, upper_R1 = torch.ones_like(target_RV[:, :1]), count_R1.clamp(min=1).double()
        for _ in range(self.steps):
            middle_R1 = (lower_R1 + upper_R1) / 2
            each_R1 = torch.minimum(target_RV * (1 / middle_R1), draft_RV).sum(-1, keepdim=True)
            below_R1 = 1 - (1 - each_R1).clamp(min=0) ** count_R1 > middle_R1 * each_R1
            lower_R1, upper_R1 = torch.where(below_R1, middle_R1, lower_R1), torch.where(below_R1, upper_R1, middle_R1)
        return upper_R1
