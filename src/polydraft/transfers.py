"""Numbers of the host on their way to a device, behind all that it still has to do and without waiting for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def brought(values: Tensor, device: torch.device) -> Tensor:
    """Return numbers of the host on a device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def assign(tensor: Tensor, values: Sequence[Any]) -> None:
    """Overwrite a tensor with numbers of the host, nested as its shape is."""
    pinned = tensor.device.type == "cuda"
    tensor.copy_(torch.tensor(values, dtype=tensor.dtype, pin_memory=pinned), non_blocking=pinned)
