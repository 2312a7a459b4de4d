"""The interface of walks, which verify trees; the target's distributions that they take, and the verdict that they return."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from polydraft.devices import can_sync
from polydraft.errors import UsageError, unknown_name
from polydraft.registry import Registry
from polydraft.sampling import NO_TOKEN, Warper
from polydraft.trees import DraftTree
from polydraft.verify.scheme import SCHEMES, Scheme

_MOST_BYTES = 2**28
"""Most bytes for a table of all nodes' distributions."""
TargetDistribution = Callable[[Tensor, Tensor], Tensor]
"""`(node_B, path_BP) -> probs_BV`: the target's distribution at one node per row, given the path below the root."""
LEAST_WEIGHT = 2**-6
"""Walks over whole paths do not look at a node's children if the node is kept with less than this chance.

A look costs some passes over the vocabulary, up to a hundredth of a round, and gains no more than that chance. Any threshold is
exact, because the chance does not depend on anything below the node.
"""
AUTO = "auto"
_PREFERRED = ("block", "node")


class TreeDistributions(ABC):
    """A `TargetDistribution` with more methods, which let walks take short cuts."""

    greedy: bool
    """Whether scores alone decide every token: it is the `likeliest`, at temperature 0 or with noise added."""
    whole: bool
    """Whether the logits of all nodes are available at once."""

    @abstractmethod
    def __call__(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the distribution at one node per row, given the tokens of the path below the root."""

    @abstractmethod
    def everywhere(self, draft: DraftTree) -> Tensor:
        """Return the distributions at all nodes, `[B, N, V]`; only if `whole`."""

    @abstractmethod
    def likeliest(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the likeliest token at one node per row; `NO_TOKEN` if the distribution is NaN."""

    @abstractmethod
    def likeliest_everywhere(self, draft: DraftTree) -> Tensor:
        """Return the likeliest token at each node, `[B, N]`; only if `whole`."""

    def logits_in_order(self, draft: DraftTree) -> Tensor | None:
        """Return numbers `[B, N, V]` whose largest is at the `likeliest` token of each node; None if there are none."""
        return None


class TargetDistributions(TreeDistributions):
    """The target's distributions in a tree, from the features of its nodes.

    Parameters
    ----------
    features_BNF : Tensor
        The target's features at all nodes.
    head : function
        Turns features of any shape into logits.
    warper : Warper
        Turns logits into distributions.
    whole : bool
        Whether to compute all logits at once, or each node's when it is visited.
    """

    def __init__(self, features_BNF: Tensor, head: Callable[[Tensor], Tensor], warper: Warper, *, whole: bool) -> None:
        self.greedy, self.whole = warper.params.decided, whole
        self._features_BNF, self._head, self._warper = features_BNF, head, warper
        self._logits_BNV = head(features_BNF) if whole else None

    def __call__(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the distribution at one node per row."""
        return self._warper.probs(self._prepared(node_B, path_BP), path_BP[:, None])[:, 0]

    def everywhere(self, draft: DraftTree) -> Tensor:
        """Return the distributions at all nodes."""
        return self._warper.probs(self._prepared_everywhere(draft), self._paths(draft))

    def likeliest(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the token of largest logit at one node per row."""
        return self._warper.likeliest(self._logits(node_B), path_BP[:, None], path_BP.shape[1])[:, 0]

    def likeliest_everywhere(self, draft: DraftTree) -> Tensor:
        """Return the token of largest logit at each node."""
        assert self._logits_BNV is not None
        return self._warper.likeliest(self._logits_BNV, self._paths(draft), draft.depths_BN)

    def ranking(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return weights in the order of the tokens' probabilities, at one node per row; see `Warper.ranking`."""
        return self._warper.ranking(self._prepared(node_B, path_BP), path_BP[:, None])[:, 0]

    def logits_in_order(self, draft: DraftTree) -> Tensor | None:
        """Return the logits of all nodes if they are computed at once and nothing changes their order."""
        # Noise takes longer than logits, so a host that can look adds it only at the nodes that it visits.
        slow = any(self._warper.params.coupled) and can_sync(draft.tokens_BN)
        return self._prepared_everywhere(draft) if self.whole and self._warper.in_order and not slow else None

    def _prepared(self, node_B: Tensor, path_BP: Tensor) -> Tensor:
        """Return the logits of one node per row, `[B, 1, V]`, prepared; the nodes are as deep as their paths."""
        return self._warper.prepared(self._logits(node_B), path_BP[:, None], path_BP.shape[1])

    def _logits(self, node_B: Tensor) -> Tensor:
        if self._logits_BNV is not None:
            return _rows(self._logits_BNV, node_B)
        return self._head(_rows(self._features_BNF, node_B))

    def _prepared_everywhere(self, draft: DraftTree) -> Tensor:
        assert self._logits_BNV is not None
        return self._warper.prepared(self._logits_BNV, self._paths(draft), draft.depths_BN)

    def _paths(self, draft: DraftTree) -> Tensor:
        """Return the paths to all nodes; empty ones if nothing depends on them."""
        return draft.paths() if self._warper.params.needs_history else draft.tokens_BN[..., None][..., :0]


def all_at_once(
    target_distribution: TargetDistribution | TreeDistributions, draft: DraftTree, columns: int = 0
) -> TypeGuard[TreeDistributions]:
    """Whether a walk should get the distributions of all nodes at once, before it knows which ones it visits.

    It should if the host may not look at values: then it cannot stop early, and asking level by level multiplies the number of
    operations by that of levels. `columns` is the width of the float64 tables that this takes, which must fit into memory.
    """
    fits = 8 * draft.tokens_BN.numel() * columns <= _MOST_BYTES
    known = isinstance(target_distribution, TreeDistributions) and target_distribution.whole
    return known and fits and not can_sync(draft.tokens_BN)


def _rows(table_BNX: Tensor, node_B: Tensor) -> Tensor:
    """Return the entry of one node per row, `[B, 1, X]`."""
    if len(table_BNX) == 1:
        return table_BNX.index_select(1, node_B)
    return table_BNX[torch.arange(len(node_B), device=node_B.device), node_B][:, None]


class Fault(IntEnum):
    """Why the outcome of a round is unusable; found on the device, reported by the host."""

    NONE = 0
    TARGET = 1
    """The target's distribution was NaN."""
    DRAFT = 2
    """The draft's distribution was NaN."""
    SCHEME = 3
    """The distributions were fine, and yet the scheme emitted no token."""


def fault_of(target_probs_RV: Tensor, draft_probs_RV: Tensor) -> Tensor:
    """Return the `Fault` of each row's distributions at one node."""
    # If the target's distribution is NaN, all of it is; a draft's may lack tokens, whose columns stay 0.
    fault_R = torch.where(draft_probs_RV.sum(-1).isnan(), Fault.DRAFT, Fault.NONE)
    return torch.where(target_probs_RV[:, 0].isnan(), Fault.TARGET, fault_R)


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of one round, on the device."""

    path_BD: Tensor
    """Accepted nodes, root first; entries beyond `accepted_B` repeat the last one."""
    accepted_B: Tensor
    """Accepted draft tokens."""
    tokens_BD: Tensor
    """Emitted tokens, `accepted_B + 1` of them valid; the last of these is the next pending token."""
    offered_B: Tensor
    """Nodes on the accepted path that had candidates: `accepted_B`, or one more if the last node's were all rejected."""
    fault_B: Tensor
    """`Fault` of each row."""

    def where(self, rows_B: Tensor, other: "Verdict") -> "Verdict":
        """Return this verdict for `rows_B` and `other` for all other rows."""
        rows_B1 = rows_B[:, None]
        return Verdict(
            self.path_BD.where(rows_B1, other.path_BD),
            self.accepted_B.where(rows_B, other.accepted_B),
            self.tokens_BD.where(rows_B1, other.tokens_BD),
            self.offered_B.where(rows_B, other.offered_B),
            self.fault_B.where(rows_B, other.fault_B),
        )


def lone_root(draft: DraftTree, token_B: Tensor) -> Verdict:
    """Return the verdict on lone roots, to which the target adds a token."""
    root_B = torch.zeros_like(token_B)
    tokens_BD = torch.nn.functional.pad(token_B[:, None], (0, draft.depth), value=NO_TOKEN)
    fault_B = torch.where(token_B == NO_TOKEN, Fault.TARGET, Fault.NONE)
    return Verdict(torch.zeros_like(tokens_BD), root_B, tokens_BD, root_B, fault_B)


def followed(next_BN: Tensor, depth: int) -> Tensor:
    """Return the nodes on the way from the root, `[B, depth + 1]`, given each node's successor."""
    nodes = [torch.zeros_like(next_BN[:, :1])]
    for _ in range(depth):
        nodes.append(next_BN.gather(1, nodes[-1]))
    return torch.cat(nodes, dim=1)


class Walk(ABC):
    """Verifies a whole tree by means of a scheme, without looking at values on the host."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Whether this walk can verify trees that the scheme has drawn."""

    @abstractmethod
    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Return how many random numbers per row `run` uses on a tree of that depth."""

    @abstractmethod
    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        """Decide which path is kept and which tokens are emitted."""


WALKS: Registry[type[Walk]] = Registry("walk")


def check_walk(name: str, scheme: str) -> None:
    """Raise a `UsageError` for an unknown walk, or one that does not fit a scheme, both given by name."""
    if name != AUTO and name not in WALKS:
        raise unknown_name("walk", name, [AUTO, *WALKS])
    if scheme != AUTO:
        resolve_walk(name, SCHEMES.get(scheme)())


def resolve_walk(name: str, scheme: Scheme, *, insist: bool = True) -> Walk:
    """Return the walk of that name, or the best one for the scheme.

    Parameters
    ----------
    name : str
        A registered walk, or ``"auto"``: `block` if the scheme can pick a child before accepting it, else `node`.
    scheme : Scheme
        The scheme that draws the trees.
    insist : bool
        Whether a walk that does not fit the scheme is an error. If not, the best one that fits replaces it: for schemes that
        the user did not choose, such as the one for drafts at temperature 0.
    """
    check_walk(name, AUTO)
    if name != AUTO and WALKS.get(name).fits(scheme):
        return WALKS.get(name)()
    if name != AUTO and insist:
        fitting = ", ".join(other for other in WALKS if WALKS.get(other).fits(scheme))
        raise UsageError(f"walk {name!r} cannot verify what scheme {scheme.name!r} draws; allowed: auto, {fitting}")
    return next(walk() for walk in map(WALKS.get, _PREFERRED) if walk.fits(scheme))
