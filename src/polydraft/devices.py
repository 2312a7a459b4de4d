"""What devices can do: the one place that looks at a device's type."""

import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """Whether the host computes there: it can read values without waiting, and pays for every further token of a pass."""
    return device.type == "cpu"


def can_sync(tensor: Tensor) -> bool:
    """Whether the host may read values: free on a CPU, where it saves useless work; elsewhere it stalls the device."""
    return is_host(tensor.device)


def captures(device: torch.device) -> bool:
    """Whether work on a device can be captured once and replayed (CUDA graphs)."""
    return device.type == "cuda"
