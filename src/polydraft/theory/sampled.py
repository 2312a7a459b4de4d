"""Acceptance of any scheme by drawing children: what a new scheme gets without doing anything for it.

Given the children, the chance to emit one of them is summed exactly from `Scheme.law`; only the drawing is random.
"""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.schemes import Race, Scheme
from polydraft.schemes.arithmetic import normalised, ratio
from polydraft.theory.laws import chunk_size


def sampled_acceptance(
    scheme: Scheme, target_RV: Tensor, draft_RV: Tensor, count: int, generator: torch.Generator, samples: int
) -> Tensor:
    """Mean and standard error over `samples` drawings, side by side, of each row."""
    rows, device, values = len(draft_RV), draft_RV.device, []
    at_once = max(1, chunk_size(device) // draft_RV.numel())
    picks = scheme.select_uniforms or 0 if isinstance(scheme, Race) else 0
    for begin in range(0, samples, at_once):
        copies = min(at_once, samples - begin)
        many_target_RV, many_draft_RV = target_RV.repeat(copies, 1), draft_RV.repeat(copies, 1)
        uniforms_RU = torch.rand(copies * rows, count + picks, generator=generator, dtype=torch.float64).to(device)
        children_RK = scheme.draw(many_draft_RV, uniforms_RU[:, :count])
        if picks:
            value_R = _race_acceptance(scheme, many_target_RV, many_draft_RV, children_RK, uniforms_RU[:, count:])
        else:
            value_R = _mass(scheme.law(many_target_RV, many_draft_RV, children_RK), children_RK)
        values.append(value_R.view(copies, rows).T)
    return moments(torch.cat(values, dim=1))


def moments(values_RX: Tensor) -> Tensor:
    """Mean and its standard error over X, side by side."""
    return torch.stack([values_RX.mean(-1), values_RX.std(-1) / values_RX.shape[1] ** 0.5], dim=1)


def _race_acceptance(scheme: Scheme, target_RV: Tensor, draft_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
    """Return the acceptance of a race, with far less noise than by its law.

    The selected child is accepted with chance Σ min(p, r), whatever is drawn. All that hangs on the children is whether the
    residual hits another of them after a rejection: never if cells are single tokens, seldom if they are buckets.
    """
    selection = scheme.select(target_RV, draft_RV, children_RK, uniforms_RU)
    target_RV, token_R1 = normalised(target_RV), selection.token_R.clamp(min=0)[:, None]
    accepted_R = ratio(target_RV.gather(1, token_R1), selection.law_RV.gather(1, token_R1)).clamp(max=1.0)[:, 0]
    residual_RV = normalised((target_RV - selection.law_RV).clamp(min=0))
    return torch.minimum(target_RV, selection.law_RV).sum(-1) + (1 - accepted_R) * _mass(residual_RV, children_RK)


def _mass(law_RV: Tensor, children_RK: Tensor) -> Tensor:
    """Mass on the children; one drawn twice counts once."""
    again_RKK = (children_RK[:, :, None] == children_RK[:, None, :]).tril(-1)
    counted_RK = (children_RK != NO_TOKEN) & ~again_RKK.any(-1)
    return (law_RV.gather(1, children_RK.clamp(min=0)) * counted_RK).sum(-1)
