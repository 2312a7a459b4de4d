"""Asynchronous copies from the host to a device: they queue behind the device's other work, and the host does not wait."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polydraft.devices import captures


def brought(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of host numbers on a device."""
    return values.pin_memory().to(device, non_blocking=True) if captures(device) else values.to(device)


def assign(tensor: Tensor, values: Sequence[Any]) -> None:
    """Overwrite a tensor with host numbers, nested like its shape."""
    pinned = captures(tensor.device)
    tensor.copy_(torch.tensor(values, dtype=tensor.dtype, pin_memory=pinned), non_blocking=pinned)
