"""The outcome of a round: one tensor for the host, and what the next round needs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polydraft.operations import operation
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify import Verdict


class RowOutcome(NamedTuple):
    """One row's outcome, on the host."""

    tokens: list[int]
    """Accepted tokens and the one that the target added."""
    accepted: int
    offered: int
    """Nodes on the path at which candidates were offered."""
    fault: int
    """A `Fault`."""
    longest: int
    """Longest drafted path."""
    branch: int
    """Which of the root's children was accepted; -1 for none."""
    drafted: int
    """Candidates in the tree."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """All that the host needs of a round, in one tensor, so that one copy is enough."""

    packed_BX: Tensor
    """Depth + 1 tokens; the other fields of `RowOutcome`; the session's report."""
    depth: int
    """Of the trees."""

    def rows(self) -> tuple[list[RowOutcome], list[list[int]]]:
        """Return the rows' outcomes, and the session's reports; the tensor must be on the host."""
        stop, told = self.depth + 1, self.depth + len(RowOutcome._fields)
        values: list[list[int]] = self.packed_BX.tolist()
        rows = [RowOutcome(row[: row[stop] + 1], *row[stop:told]) for row in values]
        return rows, [row[told:] for row in values]


@operation
def conclude(draft: DraftTree, verdict: Verdict, tail_B2: Tensor, active_B: Tensor) -> tuple[Outcome, Tensor]:
    """Return a round's outcome, and how many nodes of its path each row keeps, root included; 0 for idle rows.

    Parameters
    ----------
    draft : DraftTree
        With its riders.
    verdict : Verdict
    tail_B2 : Tensor
        The last two tokens of each text; updated in place.
    active_B : Tensor
        Rows that take part.
    """
    assert verdict.tokens_BD.shape[1] == draft.depth + 1
    keep_B = torch.where(active_B, verdict.accepted_B + 1, 0)
    recent_BX = torch.cat([tail_B2[:, 1:], verdict.tokens_BD], dim=1)
    last_B2 = verdict.accepted_B[:, None] + torch.arange(2, device=recent_BX.device)
    tail_B2.copy_(recent_BX.gather(1, last_B2))
    branch_B = draft.branch(verdict.path_BD[:, min(1, draft.depth)])
    drafted_B = (draft.without_riders().tokens_BN[:, 1:] != NO_TOKEN).sum(1)
    # The fields of `RowOutcome` after `tokens`, in order.
    numbers = (verdict.accepted_B, verdict.offered_B, verdict.fault_B, draft.longest(), branch_B, drafted_B)
    packed_BX = torch.cat([verdict.tokens_BD, *(number_B[:, None] for number_B in numbers)], dim=1)
    return Outcome(packed_BX, draft.depth), keep_B
