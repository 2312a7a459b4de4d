"""Wrong verification rules and walks ("mutants"): mistakes that people have made, or could make."""

import dataclasses

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify import (
    Hybrid,
    KSeq,
    NodeWalk,
    Race,
    RaceBucketed,
    RejectionWithoutReplacement,
    RejectionWithReplacement,
    Scheme,
    SpecHub,
    Verdict,
    Walk,
)
from polydraft.verify.contest import Contest, bucketed_cells
from polydraft.verify.walk import TargetDistribution
from polydraft.verify.weights import normalised, ratio, without


def _residual(target_RV: Tensor, draft_RV: Tensor) -> Tensor:
    excess_RV = (target_RV - draft_RV).clamp(min=0)
    return torch.where(excess_RV.sum(-1, keepdim=True) > 0, normalised(excess_RV), target_RV)


class Rejection(Scheme):
    """Recursive rejection with a switch for each mistake; correct as it is."""

    name = "mutant"
    drawn_with_replacement = False
    tested_with_replacement = False
    removed_before_residual = False
    residual_taken = True
    draft_temperature = 1.0
    epsilon = 0.0
    least_target = 0.0

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        draft_RV = normalised(draft_probs_RV)
        return draft_RV if self.drawn_with_replacement else without(draft_RV, earlier_RJ)

    def arranged(self, draft_RV: Tensor, children_RK: Tensor) -> Tensor:
        return children_RK

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        original_RV, draft_RV = normalised(target_probs_RV), normalised(draft_probs_RV)
        children_RK = self.arranged(draft_RV, children_RK)
        draft_RV = normalised(draft_RV ** (1 / self.draft_temperature))
        target_RV = original_RV
        emitted_RV = torch.zeros_like(target_RV)
        undecided_R1 = torch.ones_like(target_RV[:, :1])
        for child_R1 in children_RK.T[:, :, None]:
            exists_R1, token_R1 = child_R1 != NO_TOKEN, child_R1.clamp(min=0)
            numerator_R1 = target_RV.gather(1, token_R1).clamp(min=self.least_target)
            denominator_R1 = draft_RV.gather(1, token_R1) + self.epsilon
            ratio_R1 = torch.where(denominator_R1 > 0, numerator_R1 / denominator_R1, 0.0).clamp(max=1.0)
            accept_R1 = torch.where(exists_R1, ratio_R1, 0.0)
            emitted_RV = emitted_RV.scatter_add(1, token_R1, undecided_R1 * accept_R1)
            undecided_R1 = undecided_R1 * (1 - accept_R1)
            reduced_RV = draft_RV if self.tested_with_replacement else without(draft_RV, child_R1)
            subtracted_RV = reduced_RV if self.removed_before_residual else draft_RV
            target_RV = torch.where(exists_R1, _residual(target_RV, subtracted_RV), target_RV)
            draft_RV = reduced_RV
        return emitted_RV + undecided_R1 * (target_RV if self.residual_taken else original_RV)


class WithReplacement(Rejection):
    """The correct rule for independent children."""

    drawn_with_replacement = tested_with_replacement = True


class DistinctTestedAsIndependent(Rejection):
    """Draw distinct children and test them as if they were independent."""

    tested_with_replacement = True


class IndependentTestedAsDistinct(Rejection):
    """Draw independent children and test them as if they were distinct."""

    drawn_with_replacement = True


class Deduplicated(WithReplacement):
    """Merge repeated children and test each once."""

    def arranged(self, draft_RV: Tensor, children_RK: Tensor) -> Tensor:
        columns = [children_RK[:, :1]]
        for rank in range(1, children_RK.shape[1]):
            child_R1 = children_RK[:, rank : rank + 1]
            repeated_R1 = (children_RK[:, :rank] == child_R1).any(-1, keepdim=True)
            columns.append(torch.where(repeated_R1, NO_TOKEN, child_R1))
        return torch.cat(columns, dim=1)


class SortedByDraft(Rejection):
    """Test the likeliest child first."""

    def arranged(self, draft_RV: Tensor, children_RK: Tensor) -> Tensor:
        probs_RK = torch.where(children_RK == NO_TOKEN, -1.0, draft_RV.gather(1, children_RK.clamp(min=0)))
        return children_RK.gather(1, probs_RK.argsort(dim=1, descending=True, stable=True))


class PrunedByDraft(Rejection):
    """Drop sampled children that the draft itself finds unlikely."""

    def arranged(self, draft_RV: Tensor, children_RK: Tensor) -> Tensor:
        unlikely_RK = draft_RV.gather(1, children_RK.clamp(min=0)) < 0.1
        return torch.where(unlikely_RK, NO_TOKEN, children_RK)


class ResidualNotTaken(Rejection):
    """After all children have failed, draw from the target itself."""

    residual_taken = False


class DraftAtAnotherTemperature(Rejection):
    """Test against the draft's distribution at another temperature than the one that children were drawn at."""

    draft_temperature = 1.1


class EpsilonInDenominator(Rejection):
    """Add an epsilon to a denominator, to avoid dividing by zero."""

    epsilon = 1e-3


class AcceptedWithoutTargetMass(Rejection):
    """Clamp the target's probability above zero."""

    least_target = 1e-3


class RemovedBeforeResidual(Rejection):
    """Remove a failed child from the draft distribution before it is subtracted, not after."""

    removed_before_residual = True


class TopAndOne(Scheme):
    """Take the top children and one sampled from the rest, and test only that one; correct against the rest's distribution."""

    name = "mutant"
    tested_against_rest = True

    def _rest(self, draft_probs_RV: Tensor, top: int) -> Tensor:
        return without(normalised(draft_probs_RV), draft_probs_RV.topk(top, dim=1).indices)

    def child_distribution(self, draft_probs_RV: Tensor, earlier_RJ: Tensor, count: int) -> Tensor:
        if earlier_RJ.shape[1] == count - 1:
            return self._rest(draft_probs_RV, count - 1)
        order_RV = draft_probs_RV.argsort(dim=1, descending=True, stable=True)
        rank = earlier_RJ.shape[1]
        return torch.zeros_like(draft_probs_RV).scatter_(1, order_RV[:, rank : rank + 1], 1.0)

    def distribution(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Tensor:
        rest_RV = self._rest(draft_probs_RV, children_RK.shape[1] - 1)
        tested_RV = rest_RV if self.tested_against_rest else normalised(draft_probs_RV)
        return RejectionWithReplacement().distribution(target_probs_RV, tested_RV, children_RK[:, -1:])


class GreedyTestedAgainstDraft(TopAndOne):
    """Test the sampled child against the whole draft distribution."""

    tested_against_rest = False


class DrawnByRank(RejectionWithoutReplacement):
    """Draw the likeliest children, although `child_distribution` says that they are sampled."""

    def draw(self, draft_probs_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
        return draft_probs_RV.topk(uniforms_RK.shape[1], dim=1).indices


class KSeqFewSteps(KSeq):
    """The correct rule with as few steps as the mutant below; it is exact with any number of steps."""

    def __init__(self) -> None:
        super().__init__(steps=2)


class KSeqLowerEnd(KSeqFewSteps):
    """Take the lower end of the interval of ρ: the residual then has negative entries, which are cut off."""

    def _rho(self, target_RV: Tensor, draft_RV: Tensor, count_R1: Tensor) -> Tensor:
        upper_R1 = super()._rho(target_RV, draft_RV, count_R1)
        lower_R1: Tensor = upper_R1 - (count_R1 - 1) / 2**self.steps
        return lower_R1.clamp(min=1.0)


class RaceOfOneMore(Race):
    """Plan the race for one child more than there are."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        right = super().contest(target_probs_RV, draft_probs_RV, children_RK)
        wrong = super().contest(target_probs_RV, draft_probs_RV, torch.cat([children_RK, children_RK[:, -1:]], dim=1))
        return dataclasses.replace(right, plan=wrong.plan, distribution_RV=wrong.distribution_RV)


class RaceOfDistinctChildren(Race):
    """Let a repeated child race once."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        distinct_RK = Deduplicated().arranged(draft_probs_RV, children_RK)
        return super().contest(target_probs_RV, draft_probs_RV, distinct_RK)


class RaceWithoutExchange(Race):
    """Let every child race from its own places: the winner follows the distribution of the largest, not the planned one."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        right = super().contest(target_probs_RV, draft_probs_RV, children_RK)
        return dataclasses.replace(right, plan=dataclasses.replace(right.plan, drift_RC=0 * right.plan.drift_RC))


class BucketsSharedByTarget(RaceBucketed):
    """Share what a bucket wins among its tokens by the target's distribution, although children are drawn by the draft's."""

    def __init__(self) -> None:
        super().__init__(buckets=3)

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        right = super().contest(target_probs_RV, draft_probs_RV, children_RK)
        cell_RV, cells = bucketed_cells(target_probs_RV, draft_probs_RV, buckets=3)
        target_RC, selected_RC = torch.zeros(2, len(target_probs_RV), cells).double()
        target_RC.scatter_add_(1, cell_RV, target_probs_RV.double())
        selected_RC.scatter_add_(1, cell_RV, right.distribution_RV)
        distribution_RV = target_probs_RV * ratio(selected_RC, target_RC).gather(1, cell_RV)
        return dataclasses.replace(right, distribution_RV=distribution_RV)


class HybridWithoutHandover(Hybrid):
    """Declare that certain children are selected by the target's distribution, but never select them."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        right = super().contest(target_probs_RV, draft_probs_RV, children_RK)
        assert right.keep_RK is not None
        return dataclasses.replace(right, keep_RK=1 + 0 * right.keep_RK)


class HybridRacingAll(Hybrid):
    """Treat certain children as draws from the whole distribution."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        return Race().contest(target_probs_RV, draft_probs_RV, children_RK)


class HybridOfAnotherThreshold(Hybrid):
    """Verify with another threshold than the children were drawn with."""

    def contest(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, children_RK: Tensor) -> Contest:
        return Hybrid(threshold=float("inf")).contest(target_probs_RV, draft_probs_RV, children_RK)


class SpecHubTestedAgainstDraft(SpecHub):
    """Test the child that is not the hub against the whole distribution."""

    def _tested(self, draft_probs_RV: Tensor, children_RK: Tensor) -> tuple[Tensor, Tensor]:
        return draft_probs_RV, super()._tested(draft_probs_RV, children_RK)[1]


class BonusFromRoot(NodeWalk):
    """Draw the token after the last level from the root's distribution."""

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        def wrong_distribution(node_B: Tensor, path_BP: Tensor) -> Tensor:
            return target_distribution(torch.zeros_like(node_B) if path_BP.shape[1] == draft.depth else node_B, path_BP)

        return super().run(scheme, draft, wrong_distribution, uniforms_BU)


class DistributionOfFirstNode(NodeWalk):
    """Verify every node with the draft distribution of the first node of its level."""

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        assert draft.distribution_rows_BN is not None
        wrong = dataclasses.replace(draft, distribution_rows_BN=torch.zeros_like(draft.distribution_rows_BN))
        return super().run(scheme, wrong, target_distribution, uniforms_BU)


class SameNumbersAtEveryLevel(NodeWalk):
    """Verify every level with the random numbers of the first."""

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        repeated_BU = uniforms_BU[:, : scheme.verify_uniforms].repeat(1, draft.depth + 1)
        return super().run(scheme, draft, target_distribution, repeated_BU)


CORRECT: list[type[Scheme]] = [Rejection, WithReplacement, TopAndOne, KSeqFewSteps]

STRUCTURAL: list[type[Scheme]] = [
    DistinctTestedAsIndependent,
    IndependentTestedAsDistinct,
    Deduplicated,
    SortedByDraft,
    PrunedByDraft,
    ResidualNotTaken,
    DraftAtAnotherTemperature,
    RemovedBeforeResidual,
    GreedyTestedAgainstDraft,
    RaceOfOneMore,
    RaceOfDistinctChildren,
    BucketsSharedByTarget,
    HybridWithoutHandover,
    HybridRacingAll,
    HybridOfAnotherThreshold,
    SpecHubTestedAgainstDraft,
]
"""Wrong enough to fail with 20,000 samples of the fixture."""

SUBTLE: list[type[Scheme]] = [
    EpsilonInDenominator,
    AcceptedWithoutTargetMass,
    KSeqLowerEnd,
    RaceWithoutExchange,
]
"""Only enumeration detects these: samples would need a million draws, or other distributions than the fixture's."""

WRONG_WALKS: list[type[Walk]] = [BonusFromRoot, DistributionOfFirstNode, SameNumbersAtEveryLevel]
"""Walks that are wrong even with correct rules."""
