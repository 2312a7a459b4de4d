"""Schemes that draw the emitted token from the target's distribution and check whether it is one of the children.

They are exact whatever the children are, as long as these do not depend on the verification's random numbers.
"""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.verify.scheme import SCHEMES, DistinctChildren
from polydraft.verify.weights import largest, normalised


@SCHEMES.register("naive")
class Naive(DistinctChildren):
    """Multi-candidate naive sampling (MCNS in MCSD §4.5), with distinct candidates from the draft distribution."""

    name = "naive"
    replacement = None  # verification works for any children
    follows_target = True

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Return the target's distribution, whatever was drawn."""
        return normalised(target_probs_RV)

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Draw from the target's weights, which need not sum to one."""
        return draw_one(target_probs_RV, uniforms_RU[:, 0])


@SCHEMES.register("top")
class Top(Naive):
    """The n likeliest draft tokens as children; naive sampling is then optimal.

    It is also the limit of drawing without replacement as the draft temperature goes to 0, so it stands for every scheme there.
    """

    name = "top"
    needs_order_only = True

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Put all mass on the next likeliest token."""
        rank = earlier_RJ.shape[1]
        child_R1 = self.draw(draft_probs_RV, draft_probs_RV.new_empty(1, count))[:, rank : rank + 1]
        exists_R1 = (child_R1 != NO_TOKEN).double()
        return torch.zeros_like(draft_probs_RV, dtype=torch.float64).scatter_(1, child_R1.clamp(min=0), exists_R1)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Take the likeliest tokens; the random numbers are not used."""
        count = uniforms_RK.shape[1]
        probs_RK, tokens_RK = largest(draft_probs_RV, count)
        children_RK = torch.where(probs_RK > 0, tokens_RK, NO_TOKEN)
        return torch.nn.functional.pad(children_RK, (0, count - children_RK.shape[1]), value=NO_TOKEN)
