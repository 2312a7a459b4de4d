"""Verification at temperature 0 on a GPU, in two kernels; the same verdicts as torch's operations give.

Torch's are some forty operations on a few hundred numbers, each of which takes a GPU as long as one of these kernels. See
`polydraft.backends.triton.follow_kernels` for what they do and `polydraft.verify.node` for why that is exact.
"""

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, side_by_side
from polydraft.operations import implements
from polydraft.trees import DraftTree
from polydraft.verify.node import follow_largest, follow_tokens
from polydraft.verify.walk import Verdict

_PART = 4096
"""Tokens that one program looks at."""
_LEAST_NODES, _MOST_NODES = 16, 1024
"""Smaller trees share the kernel of these; of larger ones a program would hold too much at once."""
_LEAST_DEPTH = 8
_TILE = 4096
"""Most children of all nodes, or parts of their logits, that a program looks at in one go."""


def _supports(draft: DraftTree, tokens_BN: Tensor) -> bool:
    return draft.tokens_BN.shape[1] <= _MOST_NODES and kernels_run(draft.tokens_BN)


def _supports_logits(draft: DraftTree, logits_BNV: Tensor) -> bool:
    return logits_BNV.dtype.itemsize <= 4 and _supports(draft, draft.tokens_BN)


@implements(follow_largest, "triton", supports=_supports_logits)
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


@implements(follow_tokens, "triton", supports=_supports)
def _follow_tokens(draft: DraftTree, tokens_BN: Tensor) -> Verdict:
    return _followed(draft, tokens_BN, 0)


def _followed(draft: DraftTree, given: Tensor, parts: int) -> Verdict:
    """Follow tokens, or keys of so many parts."""
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
