"""What a device can do: asked by ability, so that few places know devices by name."""

import torch


def is_gpu(device: torch.device) -> bool:
    """Whether work on a device is queued behind the host's back, can be captured in CUDA graphs, and meets our GPU kernels."""
    return device.type == "cuda"


def is_host(device: torch.device) -> bool:
    """Whether a device is the host itself, whose memory Python and compiled code can read."""
    return device.type == "cpu"
