"""Trees whose shape follows the draft's path probabilities in every round, on a CPU.

References
----------
.. [1] Wang et al. 2024, OPT-Tree, arXiv:2406.17276.
.. [2] Li et al. 2024, EAGLE-2, arXiv:2406.16858.
"""

import torch
from torch import Tensor

from polydraft.draft.candidates import Front, Level, best, total
from polydraft.draft.growth import Growing, likeliest_level
from polydraft.draft.policy import RowPolicy
from polydraft.draft.shaped_builder import ShapedBuilder
from polydraft.draft.source import DistributionSource
from polydraft.draft.stopping_builder import DECISION_OBSTACLE, Decision
from polydraft.sampling import RowParams
from polydraft.trees import DraftTree, DynamicShape
from polydraft.verify import SCHEMES


class DynamicBuilder(ShapedBuilder):
    """Grow trees of the likeliest paths, as many as pay [1, 2].

    Candidates are chosen by rank, not drawn, so naive sampling is an exact verification. If scores decide what the target
    emits, at temperature 0 or in coupled texts, no exact verifier accepts more.

    Parameters
    ----------
    source, shape, params, vocab_size, draft_temperature
        As for `ShapedBuilder`.
    policy : RowPolicy
    decision : Decision, optional
        Lets rows stop earlier than their policy would.
    """

    scheme = SCHEMES.get("top")()
    num_uniforms = 0
    learns = elastic = movable = True
    policy: RowPolicy

    def __init__(
        self,
        source: DistributionSource,
        shape: DynamicShape,
        params: RowParams,
        vocab_size: int,
        *,
        policy: RowPolicy,
        draft_temperature: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(source, shape, params, vocab_size, draft_temperature=draft_temperature, belief=policy.belief)
        self.policy, self._decision = policy, decision
        self.obstacle = DECISION_OBSTACLE if decision is not None else "the host decides how dynamic trees grow"

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Grow the trees of a round: pass the likeliest paths through the source, level by level."""
        self._grown = None
        if self.resting:
            return self._bare(tail_B2[:, 1])
        growing = Growing(tail_B2[:, 1], self.passes, torch.float64)
        features_BWF = self.source.root(tail_B2)
        logits_BWV, going_B = self.source.logits(features_BWF), torch.tensor(self.policy.drafting)
        growing.levels.append(self._level(growing, logits_BWV).masked(going_B))
        levels_B = going_B.long()
        while len(growing.levels) < self.depth:
            front = Front.of(growing.levels[-1], self.shape.beam)
            mass_B = front.mass_B
            going_B = going_B & self.policy.wants_level(mass_B, len(growing.levels))
            if self._decision is not None:
                going_B = going_B & self._decision.goes_on(features_BWF, logits_BWV)
            if not going_B.any():
                break
            block = growing.pass_on(front)
            features_BWF = self.source.expand(front.tokens_BW, front.parents_BW, block)
            logits_BWV = self.source.logits(features_BWF)
            growing.levels.append(self._level(growing, logits_BWV).masked(going_B))
            if self.policy.adaptive:
                gained_B = self._promise(growing.levels) - self._promise(growing.levels[:-1])
                self.policy.saw_level(mass_B, gained_B, going_B)
            levels_B = levels_B + going_B
        return self._tree(growing, levels_B)

    def _level(self, growing: Growing, logits_BWV: Tensor) -> Level:
        return likeliest_level(self.shape, self._distributions, growing, logits_BWV)

    def _promise(self, levels: list[Level]) -> Tensor:
        """Return what the best tree of these levels promises, less the cost of its nodes."""
        scores_BC = torch.cat([level.scores_BX for level in levels], 1)
        return self.policy.net(best(scores_BC, self.shape.nodes - 1)[0].exp())

    def _tree(self, growing: Growing, levels_B: Tensor) -> DraftTree:
        """Make a tree of the likeliest candidates, as many as pay, and tell the policy what it promises."""
        scores_BC = growing.scores_BC
        best_BM, index_BM = best(scores_BC, self.shape.nodes - 1)
        counts_B = torch.minimum(self.policy.counts(best_BM.exp()), (best_BM > -torch.inf).sum(-1))
        chosen_BM = torch.arange(best_BM.shape[1]) < counts_B[:, None]
        keep_BC = torch.zeros_like(scores_BC, dtype=torch.bool).scatter_(1, index_BM, chosen_BM)
        # The batch sets the number of levels; more of them must not change a row's sum, which its policy learns from.
        expected_B = total(scores_BC.exp().where(keep_BC, 0.0))
        self.policy.plan(expected_B.tolist(), counts_B.tolist(), levels_B.tolist())
        most = int(counts_B.max())
        if most == 0:
            return self._bare(growing.root_B)
        self._grown = growing.tree(keep_BC, most, self.shape.branch, self.depth)
        return self._grown.draft
