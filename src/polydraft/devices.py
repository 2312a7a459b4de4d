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


def cpu_facts() -> dict[str, str]:
    """Return what the system tells of its CPU (``"model name"``, ``"flags"`` and more); nothing where it is silent."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_name() -> str:
    """Return the model of the CPU."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_features() -> str:
    """Return model and instruction sets of the CPU, as far as the system tells."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    return "\n".join(f"{name}: {value}" for name, value in cpu_facts().items() if name in names) or platform.processor()


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
