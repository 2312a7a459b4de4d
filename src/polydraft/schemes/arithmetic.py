"""The few operations on laws that verifiers share, in float64."""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN


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
