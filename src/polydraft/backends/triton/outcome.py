"""A round's outcome on a GPU, in one kernel; torch's are thirty operations on a few hundred numbers."""

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run, power_of_two, side_by_side
from polydraft.engine.outcome import Outcome, RowOutcome, conclude
from polydraft.operations import implements
from polydraft.trees import DraftTree
from polydraft.verify import Verdict

_LEAST_DEPTH = 8
"""Trees that are less deep share the kernel of these."""
_BLOCK = 512
"""Children that the kernel looks at in one go."""


def _supports(draft: DraftTree, verdict: Verdict, tail_B2: Tensor, active_B: Tensor) -> bool:
    return kernels_run(tail_B2)


@implements(conclude, "triton", supports=_supports)
def _conclude(draft: DraftTree, verdict: Verdict, tail_B2: Tensor, active_B: Tensor) -> tuple[Outcome, Tensor]:
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
