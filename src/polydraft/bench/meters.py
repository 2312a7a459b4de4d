"""Clocks and memory, as far as a machine lets itself be read."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from polydraft.bench.energy import EnergyMeter


def synchronised_clock(device: torch.device) -> float:
    """Return the time once all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class MemoryMeter:
    """Peak memory since `start`: of the device on a GPU, of this process elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Forget earlier peaks."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the high-water mark of resident memory
        except OSError:
            return

    def peak(self) -> int | None:
        """Return the peak in bytes; None where it cannot be read."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return None
        marks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
        return marks[0] if marks else None


def machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine, for results."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": pages,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "energy": EnergyMeter(device).source,
    }


def git_revision() -> str | None:
    """Return the revision of the checkout this package runs from; None outside one."""
    folder = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
