"""Schemes whose every draw can be enumerated."""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.verify import RejectionWithReplacement, Scheme, Selection
from polydraft.verify.weights import normalised


def by_distribution(kind: type[Scheme]) -> Scheme:
    """Let a scheme verify by one draw from its distribution, and not by a faster way of its own."""
    return type(kind.__name__, (kind,), {"verify": Scheme.verify, "verify_uniforms": 1})()


class HighestPicked(RejectionWithReplacement):
    """Independent children of which the one with the highest number is picked: its distribution is far from the draft's."""

    name = "highest"
    select_uniforms = 0

    def picked_distribution(self, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """P(highest ≤ x) = P(child ≤ x)ⁿ."""
        count_R1 = (children_RK != NO_TOKEN).sum(-1, keepdim=True)
        below_RV = normalised(draft_probs_RV).cumsum(-1).clamp(max=1.0) ** count_R1
        return below_RV.diff(prepend=torch.zeros_like(below_RV[:, :1])) * (count_R1 > 0)

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        return Selection(children_RK.max(-1).values, self.picked_distribution(draft_probs_RV, children_RK))


class AnyPicked(RejectionWithReplacement):
    """Independent children of which any is picked: its distribution is the draft's, and the others are wasted."""

    name = "any"
    select_uniforms = 1

    def select(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Selection:
        exists_RK = children_RK != NO_TOKEN
        rank_R = draw_one(exists_RK.double(), uniforms_RU[:, 0])
        token_R = torch.where(rank_R == NO_TOKEN, NO_TOKEN, children_RK.gather(1, rank_R.clamp(min=0)[:, None])[:, 0])
        return Selection(token_R, normalised(draft_probs_RV) * exists_RK.any(-1, keepdim=True))
