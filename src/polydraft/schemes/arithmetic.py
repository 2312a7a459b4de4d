"""The few operations on laws that verifiers share, in float64."""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.schemes.arrays import Array, arange, as_array, can_sync, take, top

_BLOCK = 256
_SHORT = 2**14
"""Tokens of a law up to which torch finds its largest weights on a CPU in a third of the time that blocks take."""


Ranked = tuple[Array, Array]
"""The largest weights of each row in order, and their tokens."""


def normalised(weights_RV: Tensor) -> Tensor:
    """Scale rows to sum one; rows without mass stay zero."""
    weights_RV = weights_RV.double()
    return ratio(weights_RV, weights_RV.sum(-1, keepdim=True))


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, giving 0 where the denominator is 0; no epsilon, which would make a law inexact."""
    positive = denominator > 0
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), 0.0)


def without(draft_RV: Tensor, tokens_RJ: Tensor) -> Tensor:
    """Remove tokens from a law and renormalise what is left."""
    if tokens_RJ.shape[1] == 0:
        return draft_RV
    present_RJ = (tokens_RJ != NO_TOKEN).to(draft_RV.dtype)
    removed_RV = torch.zeros_like(draft_RV).scatter_add_(1, tokens_RJ.clamp(min=0), present_RJ)
    return normalised(draft_RV.masked_fill(removed_RV > 0, 0.0))


def largest(weights_RV: Tensor, count: int) -> Ranked:
    """Return the largest weights of each row in order, and their tokens; all of them where there are fewer than `count`.

    The `count` largest of a long row lie in the blocks with the `count` largest maxima, which takes one cheap pass to find;
    `topk` over the row takes several dear ones.
    """
    weights_RV = weights_RV.to(torch.promote_types(weights_RV.dtype, torch.float32))  # numpy knows no bfloat16
    rows, vocabulary = weights_RV.shape
    count = min(count, vocabulary)
    if vocabulary <= _SHORT and can_sync(weights_RV) and not torch.compiler.is_compiling():
        found = weights_RV.topk(count)
        return as_array(found.values), as_array(found.indices)
    blocks = vocabulary // _BLOCK
    if blocks * _BLOCK != vocabulary or blocks < 2 * count:
        return top(as_array(weights_RV), count)
    maxima_RM = as_array(weights_RV.reshape(rows, blocks, _BLOCK).amax(-1))
    block_RK = top(maxima_RM, count)[1]
    token_RX = (block_RK[:, :, None] * _BLOCK + arange(_BLOCK, block_RK)).reshape(rows, count * _BLOCK)
    value_RK, index_RK = top(take(as_array(weights_RV), token_RX), count)
    return value_RK, take(token_RX, index_RK)


def likeliest(weights_RV: Tensor) -> Tensor:
    """Return the token with the largest weight of each row, of equal ones that with the smallest id."""
    rows, vocabulary = weights_RV.shape
    if vocabulary % _BLOCK:
        return weights_RV.argmax(-1, keepdim=True)
    weights_RMC = weights_RV.reshape(rows, -1, _BLOCK)
    block_R1 = weights_RMC.amax(-1).argmax(-1, keepdim=True)
    inside_RC = weights_RMC.gather(1, block_R1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    return block_R1 * _BLOCK + inside_RC.argmax(-1, keepdim=True)
