"""No drafts: the engine with an empty tree is plain autoregressive decoding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.drafters.drafter import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.models import LanguageModel
from polydraft.sampling import RowParams
from polydraft.schemes import Naive
from polydraft.trees import DraftTree, Topology
from polydraft.walks import Verdict


class Plain(Drafter):
    """Propose nothing."""

    name = "none"

    def start(self, params: RowParams, target: LanguageModel) -> "PlainSession":
        """Go to work; there is nothing to prepare."""
        return PlainSession()


class PlainSession(DraftSession):
    """Trees of a root alone."""

    scheme = Naive()
    num_nodes, depth = 1, 0
    num_uniforms = 0
    recordable = True
    needs_outcome = False

    def begin(self, texts: Sequence[Sequence[int]], longest: int, rows: Sequence[int], params: RowParams) -> None:
        """Remember nothing."""

    def propose(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Return the pending token alone."""
        pending_B1 = tail_B2[:, 1:]
        return DraftTree.from_topology(Topology(), pending_B1, (), torch.zeros_like(pending_B1[0]))

    def commit(self, verdict: Verdict, keep_B: Tensor, features_BNF: Tensor) -> None:
        """Keep nothing."""

    def settle(self, texts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]) -> None:
        """Remember nothing."""

    def rewind(self, texts: Sequence[Sequence[int]]) -> None:
        """Remember nothing."""


@DRAFTERS.register("none")
def _build(parts: Parts) -> Plain:
    return Plain()
