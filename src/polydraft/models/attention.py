"""Which of torch's attention kernels passes with a mask may use."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_STEADY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def steady_attention(device: torch.device) -> AbstractContextManager[None]:
    """Leave cuDNN's attention out, for a while: it takes 0.1 to 1.3 s to plan for every length that it has not met before.

    Its kernels are no faster than the others on masked prompts (docs/LOG.md), and prompts come in all lengths.
    """
    if device.type != "cuda":
        return nullcontext()
    steady: AbstractContextManager[None] = sdpa_kernel(_STEADY)
    return steady
