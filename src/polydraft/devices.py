"""What devices can do, and copies to them: the one place that looks at the type of a device."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux shows a container's limits."""
_hidden = False


def is_host(device: torch.device) -> bool:
    """Whether the device is the CPU: reading values is free there, and every token of a pass takes time."""
    return device.type == "cpu"


def can_sync(tensor: Tensor) -> bool:
    """Whether the host may read values: free on a CPU, where it saves useless work; elsewhere it would stall the device."""
    return is_host(tensor.device) and not _hidden


def captures(device: torch.device) -> bool:
    """Whether the device can capture work and replay it (CUDA graphs)."""
    return device.type == "cuda"


def brought(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy of host numbers on a device. It queues behind the device's other work, and the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if captures(device) else values.to(device)


def assign(tensor: Tensor, values: Sequence[Any]) -> None:
    """Overwrite a tensor with host numbers, nested like its shape; the host does not wait."""
    pinned = captures(tensor.device)
    tensor.copy_(torch.tensor(values, dtype=tensor.dtype, pin_memory=pinned), non_blocking=pinned)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a number format, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all of its work."""
    if captures(device):
        torch.cuda.synchronize(device)


def cpu_facts() -> dict[str, str]:
    """Return what the system knows about its CPU (``"model name"``, ``"flags"`` and more); empty if it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_name() -> str:
    """Return the CPU's model name."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_features() -> str:
    """Return model and instruction sets of the CPU, as far as they are known."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
    return "\n".join(f"{name}: {value}" for name, value in cpu_facts().items() if name in names) or platform.processor()


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes of memory are free on a device; None if the system does not say."""
    if not is_host(device):
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None
    left = _left_in_container()
    return free if left is None else min(free, left)


def _left_in_container() -> int | None:
    """Return how many bytes a container's limit leaves, as the system's figures ignore it; None without a limit."""
    try:
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat["inactive_file"]), 0)  # cached files can be dropped
    except (OSError, ValueError, LookupError):
        return None


@contextmanager
def values_hidden() -> Iterator[None]:
    """Treat the CPU like a device whose values the host may not read, so that tests on a CPU run what a GPU runs.

    This affects the whole process.
    """
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before
