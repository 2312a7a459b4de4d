"""Wrong walks: each takes correct rules through a tree in a way that someone could get wrong."""

import dataclasses

import torch
from torch import Tensor

from polydraft.schemes import Scheme
from polydraft.trees import DraftTree
from polydraft.walks import NodeWalk, Verdict, Walk
from polydraft.walks.walk import TargetLaw


class BonusFromRoot(NodeWalk):
    """Draw the token behind the last level from the root's law."""

    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Look up the wrong node at the end."""

        def wrong_law(node_B: Tensor, path_BP: Tensor) -> Tensor:
            return target_law(torch.zeros_like(node_B) if path_BP.shape[1] == draft.depth else node_B, path_BP)

        return super().run(scheme, draft, wrong_law, uniforms_BU)


class LawOfFirstNode(NodeWalk):
    """Verify every node with the draft law of the first node of its level."""

    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Take the first of each level's laws."""
        assert draft.law_rows_BN is not None
        wrong = dataclasses.replace(draft, law_rows_BN=torch.zeros_like(draft.law_rows_BN))
        return super().run(scheme, wrong, target_law, uniforms_BU)


class SameNumbersAtEveryLevel(NodeWalk):
    """Verify every level with the random numbers of the first."""

    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Repeat the first numbers."""
        repeated_BU = uniforms_BU[:, : scheme.verify_uniforms].repeat(1, draft.depth + 1)
        return super().run(scheme, draft, target_law, repeated_BU)


WRONG_WALKS: list[type[Walk]] = [BonusFromRoot, LawOfFirstNode, SameNumbersAtEveryLevel]
