"""Static trees that rows may draw only in part: nothing while drafting does not pay, or fewer levels by a decision."""

from abc import ABC, abstractmethod
from typing import Unpack

import torch
from torch import Tensor

from polydraft.draft.policy import RowPolicy
from polydraft.draft.source import DistributionSource
from polydraft.draft.static_builder import DrawOptions, StaticBuilder
from polydraft.draft.static_plan import GroupPlan, LevelPlan
from polydraft.sampling import NO_TOKEN, RowParams
from polydraft.trees import DraftTree, SlicedMask, Topology

DECISION_OBSTACLE = "the host asks the decision model between levels"


class Decision(ABC):
    """Decides whether rows go on drafting.

    A rule is exact if it depends only on the distributions and tokens drawn so far: later children then have the distribution
    that verification assumes.
    """

    @abstractmethod
    def goes_on(self, features_BGF: Tensor, logits_BGV: Tensor) -> Tensor:
        """Say which rows go on, `[B]`, given the draft's features and logits at the G nodes whose children were drawn last."""


class StoppingBuilder(StaticBuilder):
    """Draw static trees; rows may stop before the last level, or before the first.

    Parameters
    ----------
    source, topology, params, vocab_size, scheme, draft_temperature
        As for `StaticBuilder`.
    decision : Decision, optional
        Lets rows stop before the last level.
    policy : RowPolicy, optional
        On a CPU, lets rows rest while drafting does not pay.
    """

    whole = False

    def __init__(
        self,
        source: DistributionSource,
        topology: Topology,
        params: RowParams,
        vocab_size: int,
        *,
        decision: Decision | None = None,
        policy: RowPolicy | None = None,
        **options: Unpack[DrawOptions],
    ) -> None:
        super().__init__(source, topology, params, vocab_size, **options)
        self.decision, self.policy = decision, policy
        self._mask = SlicedMask.of(self.topology, self.source.device)
        self._going_B = torch.ones_like(self._greedy_B)
        """Rows that draft and have not stopped yet."""
        self.learns = policy is not None
        self.obstacle = DECISION_OBSTACLE if policy is None else "the host checks whether drafting pays"

    def plant(self, root_B: Tensor) -> Tensor:
        """Start a tree, and decide which rows draft."""
        self._going_B = torch.ones_like(root_B, dtype=torch.bool)
        if self.policy is not None:
            drafting = self.policy.drafting
            self._going_B = torch.tensor(drafting, device=root_B.device)
            self.policy.plan(
                [float(drafts) for drafts in drafting],
                [(self.num_nodes - 1) * drafts for drafts in drafting],
                [self.depth * drafts for drafts in drafting],
            )
        return super().plant(root_B)

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Build a tree; the root alone if all rows rest."""
        rests = self.resting
        if rests or (self.policy is not None and not any(self.policy.drafting)):
            if not rests:
                self.source.root(tail_B2)
            return self._bare(tail_B2[:, 1])
        return super().build(tail_B2, uniforms_BU)

    def _plant(self, tokens_BN: Tensor, plan: GroupPlan | LevelPlan, columns_RK: Tensor) -> None:
        rows_R1 = self._going_B.repeat_interleave(len(columns_RK) // len(tokens_BN))[:, None]
        super()._plant(tokens_BN, plan, columns_RK.where(rows_R1, NO_TOKEN))

    def stops(self, features_BGF: Tensor, logits_BGV: Tensor) -> bool:
        """Ask the decision model which rows go on below the nodes that drew last; say whether all stop."""
        if self.decision is None:
            return False
        self._going_B = self._going_B & self.decision.goes_on(features_BGF, logits_BGV)
        return not bool(self._going_B.any())  # waits for the device; if only some rows stop, these draw nothing further

    def tree(self, tokens_BN: Tensor) -> DraftTree:
        """Return the grown tree; after an early stop, its upper part with the usual depth, so that outcomes are as wide."""
        depth, distributions = self._drawn, tuple(self._level_probs)
        if depth == self.depth:
            return super().tree(tokens_BN)
        tables, size = self._mask.stopped(depth), len(tokens_BN)
        nodes = len(tables.depths_N)
        return DraftTree(
            tokens_BN[:, :nodes],
            tables.depths_N.expand(size, -1),
            tables.ancestors_NN.expand(size, -1, -1),
            tables.child_table_NK.expand(size, -1, -1),
            self.depth,
            distributions + distributions[-1:] * (self.depth - depth),
            self.plan.distribution_rows_N[:nodes].expand(size, -1),
            self._distributions.vocabulary,
        )
