"""Verification of ranked trees and a round's outcome on a GPU, in a few kernels, with the same verdicts as torch's operations.

Torch takes about forty small operations to verify and thirty for the outcome, each of which takes a GPU at least as long as one
of these kernels.
"""

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, runs_on_tensors, side_by_side
from polydraft.engine.outcome import Outcome, RowOutcome, conclude
from polydraft.operations import implements
from polydraft.trees import DraftTree
from polydraft.verify.node import follow_largest, follow_tokens
from polydraft.verify.walk import Verdict

_LEAST_DEPTH = 8
"""Shallower trees use the kernel compiled for this depth."""
_PART = 4096
"""Tokens per program."""
_LEAST_NODES, _MOST_NODES = 16, 1024
"""Smaller trees use the kernel compiled for the first; for trees larger than the second, a program would hold too much."""
_TILE = 4096
"""Most children of all nodes, or parts of their logits, that a program takes at a time."""
_COUNTED = 512
"""Children that the outcome's kernel takes at a time."""


def _can_follow(draft: DraftTree, tokens_BN: Tensor) -> bool:
    return draft.tokens_BN.shape[1] <= _MOST_NODES and kernels_run(draft.tokens_BN)


def _can_follow_logits(draft: DraftTree, logits_BNV: Tensor) -> bool:
    return logits_BNV.dtype.itemsize <= 4 and _can_follow(draft, draft.tokens_BN)


@implements(follow_largest, "triton", supports=_can_follow_logits)
def _follow_largest(draft: DraftTree, logits_BNV: Tensor) -> Verdict:
    from polydraft.backends.triton import follow_kernels as kernels

    batch, nodes, size = logits_BNV.shape
    logits_BNV = side_by_side(logits_BNV)
    parts = -(-size // _PART)
    keys_BNM = torch.empty((batch, nodes, parts), dtype=torch.int64, device=logits_BNV.device)
    kernels.largest_of_parts[(batch * nodes, parts)](
        logits_BNV, keys_BNM, nodes, size, *logits_BNV.stride()[:2], BLOCK=_PART, num_warps=8
    )
    return _followed(draft, keys_BNM, parts)


@implements(follow_tokens, "triton", supports=_can_follow)
def _follow_tokens(draft: DraftTree, tokens_BN: Tensor) -> Verdict:
    return _followed(draft, tokens_BN, 0)


def _followed(draft: DraftTree, given: Tensor, parts: int) -> Verdict:
    """Follow tokens, or keys if there are `parts`."""
    from polydraft.backends.triton import follow_kernels as kernels

    batch, nodes = draft.tokens_BN.shape
    assert given.shape[:2] == (batch, nodes)
    given, tokens_BN, table_BNK = map(side_by_side, (given, draft.tokens_BN, draft.child_table_BNK))
    extra_BNK = table_BNK if draft.extra_table_BNK is None else side_by_side(draft.extra_table_BNK)
    count, extra_count = table_BNK.shape[2], extra_BNK.shape[2]
    path_BD, emitted_BD = given.new_empty(2, batch, draft.depth + 1)
    accepted_B, offered_B, fault_B = given.new_empty(3, batch)
    block_nodes = power_of_two(nodes, _LEAST_NODES)
    most_children, widest = max(count, extra_count), _TILE // block_nodes
    kernels.follow[(batch,)](
        given, tokens_BN, table_BNK, extra_BNK, path_BD, accepted_B, emitted_BD, offered_B, fault_B,
        nodes, count, extra_count, draft.depth, parts, given.stride(0), tokens_BN.stride(0),
        *table_BNK.stride()[:2], *extra_BNK.stride()[:2],
        KEYED=parts > 0, EXTRA=draft.extra_table_BNK is not None, BLOCK_N=block_nodes,
        BLOCK_K=min(power_of_two(most_children, LEAST_CHILDREN), widest), BLOCK_M=min(power_of_two(parts or 1), widest),
        BLOCK_D=power_of_two(draft.depth + 1, _LEAST_DEPTH), num_warps=4,
    )  # fmt: skip
    return Verdict(path_BD, accepted_B, emitted_BD, offered_B, fault_B)


@implements(conclude, "triton", supports=runs_on_tensors)
def _conclude(draft: DraftTree, verdict: Verdict, tail_B2: Tensor, active_B: Tensor) -> tuple[Outcome, Tensor]:
    from polydraft.backends.triton import follow_kernels as kernels

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
        BLOCK_D=power_of_two(draft.depth + 1, _LEAST_DEPTH), BLOCK=_COUNTED, num_warps=4,
    )  # fmt: skip
    return Outcome(packed_BX, draft.depth), keep_B
