"""What devices can do: the one place that looks at a device's type."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_hidden = False


def is_host(device: torch.device) -> bool:
    """Whether the host computes there: it can read values without waiting, and pays for every further token of a pass."""
    return device.type == "cpu"


def can_sync(tensor: Tensor) -> bool:
    """Whether the host may read values: free on a CPU, where it saves useless work; elsewhere it stalls the device."""
    return is_host(tensor.device) and not _hidden


def captures(device: torch.device) -> bool:
    """Whether work on a device can be captured once and replayed (CUDA graphs)."""
    return device.type == "cuda"


def wait_for(device: torch.device) -> None:
    """Let the host wait until a device has done all that was asked of it."""
    if captures(device):
        torch.cuda.synchronize(device)


def cpu_features() -> str:
    """Return model and instruction sets of the CPU, as far as the system tells."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in names}))


@contextmanager
def values_hidden() -> Iterator[None]:
    """Treat a CPU like a device whose values the host may not read, to test on a CPU what a GPU runs.

    It holds for the whole process.
    """
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before
