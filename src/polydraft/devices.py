"""What devices can do."""

from torch import Tensor

_HOSTS = ("cpu",)
"""Devices whose memory the host can use; tests empty it, to run on a CPU what other devices run."""


def can_sync(tensor: Tensor) -> bool:
    """Whether the host may look at values: it costs nothing on a CPU and saves idle work; elsewhere it stalls the device."""
    return tensor.device.type in _HOSTS
