"""What devices can do: the one place that looks at a device's type."""

import torch


def is_host(device: torch.device) -> bool:
    """Whether the host computes there: it can read values without waiting, and pays for every further token of a pass."""
    return device.type == "cpu"


def captures(device: torch.device) -> bool:
    """Whether work on a device can be captured once and replayed (CUDA graphs)."""
    return device.type == "cuda"
