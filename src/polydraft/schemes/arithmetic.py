"""The few operations on laws that verifiers share, in float64."""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN


def normalised(weights_RV: Tensor) -> Tensor:
    """Scale rows to sum one; rows without mass stay zero."""
    weights_RV = weights_RV.double()
    total_R1 = weights_RV.sum(-1, keepdim=True)
    return weights_RV / torch.where(total_R1 > 0, total_R1, 1.0)


def residual(target_RV: Tensor, draft_RV: Tensor) -> Tensor:
    """Return (p − q)₊ normalised; p itself where that has no mass."""
    excess_RV = (target_RV - draft_RV).clamp_(min=0)
    total_R1 = excess_RV.sum(-1, keepdim=True)
    return torch.where(total_R1 > 0, excess_RV / torch.where(total_R1 > 0, total_R1, 1.0), target_RV)


def without(draft_RV: Tensor, tokens_RJ: Tensor) -> Tensor:
    """Remove tokens from a law and renormalise what is left."""
    if tokens_RJ.shape[1] == 0:
        return draft_RV
    present_RJ = (tokens_RJ != NO_TOKEN).to(draft_RV.dtype)
    removed_RV = torch.zeros_like(draft_RV).scatter_add_(1, tokens_RJ.clamp(min=0), present_RJ)
    return normalised(draft_RV.masked_fill(removed_RV > 0, 0.0))
