"""What a round brings: to the host, in one tensor, and to the next round; on a GPU in one kernel."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run, power_of_two, side_by_side
from polydraft.sampling import NO_TOKEN
from polydraft.trees import DraftTree
from polydraft.verify import Verdict

_LEAST_DEPTH = 8
"""Trees that are less deep share the kernel of these."""
_BLOCK = 512
"""Children that the kernel looks at in one go."""


class RowOutcome(NamedTuple):
    """What a round brought one row, on the host."""

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
    """Candidates of the tree."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a round brings the host, in one tensor, so that one copy is enough."""

    packed_BX: Tensor
    """Tokens; the numbers of `RowOutcome` after its tokens; the session's report."""
    depth: int
    """Of the trees: as many tokens, and one more."""

    def reporting(self, report_BX: Tensor | None) -> "Outcome":
        """Add what the session has to say."""
        return self if report_BX is None else Outcome(torch.cat([self.packed_BX, report_BX], dim=1), self.depth)

    def rows(self) -> tuple[list[RowOutcome], list[list[int]]]:
        """Return the outcome row by row, and the session's reports; the tensor must have arrived on the host."""
        stop, told = self.depth + 1, self.depth + len(RowOutcome._fields)
        values: list[list[int]] = self.packed_BX.tolist()
        rows = [RowOutcome(row[: row[stop] + 1], *row[stop:told]) for row in values]
        return rows, [row[told:] for row in values]


def conclude(draft: DraftTree, verdict: Verdict, tail_B2: Tensor, active_B: Tensor) -> tuple[Outcome, Tensor]:
    """Return a round's outcome, and how many nodes of the path each row keeps, the root included: none of rows that idle.

    Parameters
    ----------
    draft : DraftTree
        Riders included.
    verdict : Verdict
    tail_B2 : Tensor
        The last two tokens of each text, moved on in place.
    active_B : Tensor
        Rows that take part.
    """
    assert verdict.tokens_BD.shape[1] == draft.depth + 1
    if kernels_run(tail_B2):
        return _by_kernel(draft, verdict, tail_B2, active_B)
    keep_B = torch.where(active_B, verdict.accepted_B + 1, 0)
    recent_BX = torch.cat([tail_B2[:, 1:], verdict.tokens_BD], dim=1)
    last_B2 = verdict.accepted_B[:, None] + torch.arange(2, device=recent_BX.device)
    tail_B2.copy_(recent_BX.gather(1, last_B2))
    branch_B = draft.branch(verdict.path_BD[:, min(1, draft.depth)])
    drafted_B = (draft.without_riders().tokens_BN[:, 1:] != NO_TOKEN).sum(1)
    # What `RowOutcome` has beside tokens, in its order.
    numbers = (verdict.accepted_B, verdict.offered_B, verdict.fault_B, draft.longest(), branch_B, drafted_B)
    packed_BX = torch.cat([verdict.tokens_BD, *(number_B[:, None] for number_B in numbers)], dim=1)
    return Outcome(packed_BX, draft.depth), keep_B


def _by_kernel(draft: DraftTree, verdict: Verdict, tail_B2: Tensor, active_B: Tensor) -> tuple[Outcome, Tensor]:
    """Do so in one kernel instead of thirty operations on a few hundred numbers."""
    from polydraft.backends.triton import outcome_kernels as kernels

    assert tail_B2.is_contiguous()
    (batch, nodes, count), columns = draft.child_table_BNK.shape, draft.depth + len(RowOutcome._fields)
    tables = verdict.path_BD, verdict.tokens_BD, draft.tokens_BN, draft.depths_BN, draft.child_table_BNK
    path_BD, emitted_BD, tokens_BN, depths_BN, table_BNK = map(side_by_side, tables)
    numbers = (number_B.contiguous() for number_B in (verdict.accepted_B, verdict.offered_B, verdict.fault_B))
    packed_BX, keep_B = tail_B2.new_empty(batch, columns), tail_B2.new_empty(batch)
    kernels.conclude[(batch,)](
        path_BD, emitted_BD, *numbers, tokens_BN, depths_BN, table_BNK, active_B.view(torch.uint8), tail_B2, packed_BX, keep_B,
        nodes, nodes - draft.riders, count, draft.depth, path_BD.stride(0), emitted_BD.stride(0), tokens_BN.stride(0),
        depths_BN.stride(0), *table_BNK.stride()[:2],
        BLOCK_D=power_of_two(draft.depth + 1, _LEAST_DEPTH), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return Outcome(packed_BX, draft.depth), keep_B
