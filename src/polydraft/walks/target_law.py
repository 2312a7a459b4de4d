"""What walks ask about the target."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.sampling import Warper
from polydraft.schemes.arrays import looks
from polydraft.trees import DraftTree

_MOST_BYTES = 2**28
"""Most room for one table of all nodes' laws."""

TargetLaw = Callable[[Tensor, Tensor], Tensor]
"""`(node_B, path_BP) -> probs_BV`: the target's law at one node a row, given the tokens of the path below the root."""


class TreeLaws(ABC):
    """A `TargetLaw` that knows more: walks take short cuts with it."""

    greedy: bool
    """Whether every law is one token, `likeliest`."""

    @abstractmethod
    def __call__(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the law at one node a row, given the tokens of the path below the root."""

    @abstractmethod
    def everywhere(self, draft: DraftTree) -> Tensor | None:
        """Return the laws at all nodes, `[B, N, V]`; None where that is too much to ask."""

    @abstractmethod
    def likeliest(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the token of largest probability at one node a row; `NO_TOKEN` where the law is not a number."""

    @abstractmethod
    def likeliest_everywhere(self, draft: DraftTree) -> Tensor | None:
        """Return `likeliest` of all nodes, `[B, N]`; None where that is too much to ask."""


class TargetLaws(TreeLaws):
    """The target's laws in a tree, from the features of its nodes.

    Parameters
    ----------
    features_BNF : Tensor
        The target's, of all nodes.
    head : function
        From features to logits, of any rows.
    warper : Warper
        From logits to laws.
    whole : bool
        Whether to compute all logits at once; else those of each node as it is visited.
    """

    def __init__(self, features_BNF: Tensor, head: Callable[[Tensor], Tensor], warper: Warper, *, whole: bool) -> None:
        self.greedy = warper.params.all_greedy
        self._features_BNF, self._head, self._warper = features_BNF, head, warper
        self._logits_BNV = head(features_BNF) if whole else None

    def __call__(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the law at one node a row."""
        return self._warper.probs(self._logits(node_B), path_BP[:, None])[:, 0]

    def everywhere(self, draft: DraftTree) -> Tensor | None:
        """Return the laws at all nodes, where their logits are there."""
        return None if self._logits_BNV is None else self._warper.probs(self._logits_BNV, self._paths(draft))

    def likeliest(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the token of largest logit at one node a row."""
        return self._warper.likeliest(self._logits(node_B), path_BP[:, None])[:, 0]

    def likeliest_everywhere(self, draft: DraftTree) -> Tensor | None:
        """Return the token of largest logit of all nodes, where their logits are there."""
        return None if self._logits_BNV is None else self._warper.likeliest(self._logits_BNV, self._paths(draft))

    def _logits(self, node_B: Tensor) -> Tensor:
        if self._logits_BNV is not None:
            return _rows(self._logits_BNV, node_B)
        return self._head(_rows(self._features_BNF, node_B))

    def _paths(self, draft: DraftTree) -> Tensor:
        """Return paths to all nodes, as far as anybody reads them."""
        return draft.paths() if self._warper.params.needs_history else draft.tokens_BN[..., None][..., :0]


def laws_everywhere(draft: DraftTree, target_law: TargetLaw, columns: int) -> Tensor | None:
    """Return the target's laws at all nodes, where the host may not look and float64 tables of so many columns fit."""
    small = 8 * draft.tokens_BN.numel() * columns <= _MOST_BYTES
    if looks(draft.tokens_BN) or not small or not isinstance(target_law, TreeLaws):
        return None
    return target_law.everywhere(draft)


def _rows(table_BNX: Tensor, node_B: Tensor) -> Tensor:
    """Return the entry of one node a row, `[B, 1, X]`."""
    if len(table_BNX) == 1 and looks(node_B):
        return table_BNX[:, int(node_B)][:, None]
    if len(table_BNX) == 1:
        return table_BNX.index_select(1, node_B)
    return table_BNX[torch.arange(len(node_B), device=node_B.device), node_B][:, None]
