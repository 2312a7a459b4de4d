"""What verifying a tree takes and gives."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from torch import Tensor

from polydraft.registry import Registry
from polydraft.schemes import Scheme
from polydraft.schemes.arrays import as_tensor, library, small
from polydraft.trees import DraftTree
from polydraft.walks.target_law import TargetLaw

LEAST_WEIGHT = 2**-6
"""Chance that a node is kept below which walks over whole paths do not look at its children.

A look costs some passes over the vocabulary, up to a hundredth of a round, and gains no more than that chance. Any number is
exact, because that chance depends on nothing below the node.
"""


class Fault(IntEnum):
    """What makes a round worthless, found on the device and reported by the host.

    Tensors are compared with `.value`: where a graph is traced, no tensor equals an enum.
    """

    NONE = 0
    TARGET = 1
    """The target's law was not a number."""
    DRAFT = 2
    """The draft's law was not a number."""
    SCHEME = 3
    """The laws were numbers, and yet no token came out."""


def fault_of(target_probs_BV: Tensor, draft_probs_BV: Tensor) -> Tensor:
    """Return the `Fault` of each row's laws at one node, `[B, 1]`."""
    # A target's law that is not a number is none anywhere; a draft's may lack tokens, which are 0 all the same.
    target_B1, draft_B1 = small(_widened(target_probs_BV))[:, :1], small(_widened(draft_probs_BV)).sum(-1, keepdims=True)
    where = library(target_B1).where
    # What is not a number does not equal itself.
    fault_B1 = where(draft_B1 != draft_B1, Fault.DRAFT.value, Fault.NONE.value)
    return as_tensor(where(target_B1 != target_B1, Fault.TARGET.value, fault_B1))


def _widened(probs_BV: Tensor) -> Tensor:
    """Return a law in a dtype that numpy has too."""
    return probs_BV if probs_BV.dtype.itemsize >= 4 else probs_BV.float()


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
    """Nodes on the accepted path that had candidates: `accepted_B`, or one more where the last node had some, in vain."""
    fault_B: Tensor
    """`Fault` of each row."""

    def where(self, rows_B: Tensor, other: "Verdict") -> "Verdict":
        """Return this outcome for some rows, another one for the others."""
        rows_B1 = rows_B[:, None]
        return Verdict(
            self.path_BD.where(rows_B1, other.path_BD),
            self.accepted_B.where(rows_B, other.accepted_B),
            self.tokens_BD.where(rows_B1, other.tokens_BD),
            self.offered_B.where(rows_B, other.offered_B),
            self.fault_B.where(rows_B, other.fault_B),
        )


class Walk(ABC):
    """Verification of a whole tree by means of a scheme; runs without looking at values on the host."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Whether this walk can verify trees that the scheme has drawn."""

    @abstractmethod
    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Random numbers a row that `run` uses on a tree of that depth."""

    @abstractmethod
    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Decide which path is kept and which tokens are emitted."""


WALKS: Registry[type[Walk]] = Registry("walk")
