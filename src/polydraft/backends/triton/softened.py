"""Probabilities from logits on a GPU in one kernel; torch converts, divides and normalises one after the other."""

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run, power_of_two, side_by_side
from polydraft.operations import implements
from polydraft.sampling.softened import softened

_MOST_AT_ONCE, _BLOCK = 2**16, 2**13
"""Columns that one program holds, and that it looks at in turn where there are more."""


def _supports(logits_BGV: Tensor, temperature_B: Tensor | None) -> bool:
    return kernels_run(logits_BGV)


@implements(softened, "triton", supports=_supports)
def _soften(logits_BGV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Return the softmax of logits over each row's temperature, in float32; what is not a number spreads over its node."""
    from polydraft.backends.triton import softened_kernels as kernels

    batch, nodes, columns = logits_BGV.shape
    logits_BGV = side_by_side(logits_BGV)
    probs_BGV = torch.empty(logits_BGV.shape, dtype=torch.float32, device=logits_BGV.device)
    at_once = columns <= _MOST_AT_ONCE
    block = power_of_two(columns) if at_once else _BLOCK
    assert temperature_B is None or (temperature_B.numel() == batch and temperature_B.dtype == torch.float32)
    kernels.soften[(batch * nodes,)](
        logits_BGV, probs_BGV if temperature_B is None else temperature_B.contiguous(), probs_BGV,
        nodes, columns, *logits_BGV.stride()[:2],
        TEMPERED=temperature_B is not None, AT_ONCE=at_once, BLOCK=block, num_warps=min(max(block // 2048, 4), 32),
    )  # fmt: skip
    return probs_BGV
