"""What the host may do with a device's memory: the one place that asks which device a tensor is on."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_hidden = False


def can_sync(tensor: Tensor) -> bool:
    """Whether the host may look at values: free on a CPU, where it saves work; elsewhere it stalls the device."""
    return tensor.device.type == "cpu" and not _hidden


@contextmanager
def values_hidden() -> Iterator[None]:
    """Treat a CPU like a device whose values the host may not look at, to test on a CPU what a GPU runs.

    It holds for the whole process.
    """
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before
