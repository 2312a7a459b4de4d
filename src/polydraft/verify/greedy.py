"""All children but one are certain; that one is tested by speculative sampling against the rest's distribution q^{-Top}.

Acceptance P(Top) + Σ min(p, q^{-Top}) ([1], Theorem 7) is the most that any verifier reaches with these children.

References
----------
.. [1] Towards Optimal Multi-draft Speculative Decoding, §5.
.. [2] Sun et al. 2024, SpecHub (construction in [1] eq. 21).
"""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_independent, draw_one
from polydraft.verify.rejection import RejectionWithReplacement
from polydraft.verify.scheme import SCHEMES, Scheme
from polydraft.verify.weights import largest, likeliest, normalised, without

_SPECULATIVE = RejectionWithReplacement()


@SCHEMES.register("greedy")
class Greedy(Scheme):
    """The n − 1 likeliest draft tokens and one drawn from the rest; best at low temperatures."""

    name = "greedy"

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Eq. 18: all mass on the next likeliest token; for the last child, the distribution of the rest."""
        rank = earlier_RJ.shape[1]
        if rank == count - 1:
            return without(normalised(draft_probs_RV), earlier_RJ)
        value_RK, token_RK = largest(draft_probs_RV, count)
        distribution_RV = torch.zeros_like(draft_probs_RV, dtype=torch.float64)
        if rank >= token_RK.shape[1]:
            return distribution_RV
        return distribution_RV.scatter_(1, token_RK[:, rank : rank + 1], (value_RK[:, rank : rank + 1] > 0).double())

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Take the likeliest tokens and draw the last child; if the support is smaller, the children are all of it."""
        count = uniforms_RK.shape[1]
        value_RK, token_RK = largest(draft_probs_RV, count)
        value_RK, token_RK = value_RK[:, : count - 1], token_RK[:, : count - 1]
        top_RK = torch.where(value_RK > 0, token_RK, NO_TOKEN)
        top_RK = torch.nn.functional.pad(top_RK, (0, count - 1 - top_RK.shape[1]), value=NO_TOKEN)
        rest_RV = draft_probs_RV.scatter(1, token_RK, 0.0)
        return torch.cat([top_RK, draw_independent(rest_RV, uniforms_RK[:, -1:])], dim=1)

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        """Eq. 19: test one child against the distribution of the rest."""
        return _SPECULATIVE.distribution(target_probs_RV, *self._tested(draft_probs_RV, children_RK))

    def verify(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
        """Accept that child, or emit from the residual, which may hit another child."""
        return _SPECULATIVE.verify(target_probs_RV, *self._tested(draft_probs_RV, children_RK), uniforms_RU)

    def _tested(self, draft_probs_RV: Tensor, children_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rest's distribution and the child drawn from it; if the support ended, its last token is the rest."""
        exists_RK = children_RK != NO_TOKEN
        top_RK = torch.nn.functional.pad(exists_RK[:, 1:], (0, 1))
        draft_RV, token_RK = draft_probs_RV.double(), children_RK.clamp(min=0)
        rest_RV = draft_RV.scatter_add(1, token_RK, draft_RV.gather(1, token_RK) * top_RK * -1)
        last_R1 = torch.where(top_RK, NO_TOKEN, children_RK).amax(-1, keepdim=True)
        return rest_RV, last_R1


@SCHEMES.register("spechub")
class SpecHub(Greedy):
    """Two candidates, one of which is always the likeliest draft token, the hub."""

    name = "spechub"
    max_children = 2

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        """Eq. 21: a draw from the draft distribution, then the hub, or a draw from the rest if the first was the hub."""
        draft_RV = normalised(draft_probs_RV)
        if earlier_RJ.shape[1] == 0:
            return draft_RV
        hub_R1 = likeliest(draft_probs_RV)
        first_R1 = earlier_RJ[:, :1]
        hub_RV = torch.zeros_like(draft_RV).scatter_(1, hub_R1, (first_R1 != NO_TOKEN).double())
        return torch.where(first_R1 == hub_R1, without(draft_RV, hub_R1), hub_RV)

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        """Draw one child, then the second one depending on the first."""
        first_R1 = draw_independent(draft_probs_RV, uniforms_RK[:, :1])
        if uniforms_RK.shape[1] == 1:
            return first_R1
        hub_R1 = likeliest(draft_probs_RV)
        other_R1 = draw_one(draft_probs_RV.scatter(1, hub_R1, 0.0), uniforms_RK[:, 1])[:, None]
        second_R1 = torch.where(first_R1 == hub_R1, other_R1, hub_R1)
        return torch.cat([first_R1, torch.where(first_R1 == NO_TOKEN, NO_TOKEN, second_R1)], dim=1)

    def _tested(self, draft_probs_RV: Tensor, children_RK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rest's distribution and the child that is not the hub; for a lone child, the draft distribution."""
        draft_RV = draft_probs_RV.double()
        first_R1, second_R1 = children_RK[:, :1], children_RK[:, 1:2]
        if second_R1.shape[1] == 0:
            return draft_RV, first_R1
        first_mass_R1, second_mass_R1 = (draft_RV.gather(1, child_R1.clamp(min=0)) for child_R1 in (first_R1, second_R1))
        # The hub is the likelier child; of equally likely ones, the one with the smaller id.
        hub_first_R1 = (first_mass_R1 > second_mass_R1) | ((first_mass_R1 == second_mass_R1) & (first_R1 < second_R1))
        two_R1 = second_R1 != NO_TOKEN
        hub_R1 = torch.where(hub_first_R1, first_R1, second_R1).clamp(min=0)
        rest_RV = draft_RV.scatter_add(1, hub_R1, draft_RV.gather(1, hub_R1) * two_R1 * -1)
        return rest_RV, torch.where(two_R1 & hub_first_R1, second_R1, first_R1)
