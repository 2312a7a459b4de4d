"""What verifying a tree takes and gives."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from torch import Tensor

from polydraft.registry import Registry
from polydraft.schemes import Scheme
from polydraft.trees import DraftTree

TargetLaw = Callable[[Tensor, Tensor], Tensor]
"""`(node_B, path_BP) -> probs_BV`: the target's law at one node a row, given the tokens of the path below the root."""


class Fault(IntEnum):
    """What makes a round worthless, found on the device and reported by the host."""

    NONE = 0
    TARGET = 1
    """The target's law was not a number."""
    DRAFT = 2
    """The draft's law was not a number."""


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
    """Nodes on the walk that had candidates: `accepted_B`, or one more where all candidates of a node failed."""
    fault_B: Tensor
    """`Fault` of each row."""


class Walk(ABC):
    """Verification of a whole tree by means of a scheme; runs without looking at values on the host."""

    name: ClassVar[str]

    @abstractmethod
    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Random numbers a row that `run` uses on a tree of that depth."""

    @abstractmethod
    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Decide which path is kept and which tokens are emitted."""


WALKS: Registry[type[Walk]] = Registry("walk")
