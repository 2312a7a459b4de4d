"""Rows of weights, which are unnormalised distributions: scale and divide them, remove tokens, find the largest."""

import torch
from torch import Tensor

from polydraft.operations import operation
from polydraft.sampling import NO_TOKEN

Ranked = tuple[Tensor, Tensor]
"""The largest weights of each row in order, and their tokens."""
_BLOCK = 256
_LEAST = 1e-300
"""Replaces a denominator of zero; smaller than any sum of float32 numbers."""


def normalised(weights_RV: Tensor) -> Tensor:
    """Scale rows to sum one; rows without mass stay zero."""
    weights_RV = weights_RV.double()
    return ratio(weights_RV, weights_RV.sum(-1, keepdim=True))


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, with 0 where the denominator is 0; no epsilon, which would make a distribution inexact."""
    positive = denominator > 0
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), 0.0)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide with fewer operations than `ratio`, for numerators that are 0 or unused where the denominator is 0."""
    return numerator / denominator.clamp(min=_LEAST)


def without(draft_RV: Tensor, tokens_RJ: Tensor) -> Tensor:
    """Remove tokens from a distribution and renormalise what is left."""
    if tokens_RJ.shape[1] == 0:
        return draft_RV
    present_RJ = (tokens_RJ != NO_TOKEN).to(draft_RV.dtype)
    removed_RV = torch.zeros_like(draft_RV).scatter_add_(1, tokens_RJ.clamp(min=0), present_RJ)
    return normalised(draft_RV.masked_fill(removed_RV > 0, 0.0))


@operation
def largest(weights_RV: Tensor, count: int) -> Ranked:
    """Return the largest weights of each row in order, and their tokens; all weights if there are fewer than `count`.

    The `count` largest weights of a long row are in the blocks with the `count` largest maxima, which one cheap pass finds;
    `topk` over the whole row takes several expensive ones.
    """
    weights_RV = weights_RV.to(torch.promote_types(weights_RV.dtype, torch.float32))
    rows, vocabulary = weights_RV.shape
    count = min(count, vocabulary)
    blocks = vocabulary // _BLOCK
    if blocks * _BLOCK != vocabulary or blocks < 2 * count:
        value_RK, token_RK = weights_RV.topk(count, dim=1)
        return value_RK, token_RK
    block_RK = weights_RV.reshape(rows, blocks, _BLOCK).amax(-1).topk(count, dim=1).indices
    token_RX = (block_RK[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=block_RK.device)).flatten(1)
    value_RK, index_RK = weights_RV.gather(1, token_RX).topk(count, dim=1)
    return value_RK, token_RX.gather(1, index_RK)


def likeliest(weights_RV: Tensor) -> Tensor:
    """Return the token with the largest weight in each row; of equal ones, the smallest id."""
    rows, vocabulary = weights_RV.shape
    if vocabulary % _BLOCK:
        return weights_RV.argmax(-1, keepdim=True)
    weights_RMC = weights_RV.reshape(rows, -1, _BLOCK)
    block_R1 = weights_RMC.amax(-1).argmax(-1, keepdim=True)
    inside_RC = weights_RMC.gather(1, block_R1[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    return block_R1 * _BLOCK + inside_RC.argmax(-1, keepdim=True)
