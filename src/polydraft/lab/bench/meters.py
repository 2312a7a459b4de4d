"""Clocks, and meters of memory and energy: NVML on NVIDIA GPUs, RAPL on CPUs that let users read it."""

import ctypes
import ctypes.util
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from polydraft.devices import cpu_name, wait_for

_POWERCAP = Path("/sys/class/powercap")


def synchronised_clock(device: torch.device) -> float:
    """Wait for all work queued on `device`, then return the time."""
    wait_for(device)
    return time.perf_counter()


class MemoryMeter:
    """Peak memory since `start`: the device's on a GPU, this process's elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Forget earlier peaks."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # on Linux: resets the high-water mark of resident memory
        except OSError:
            return

    def peak(self) -> int | None:
        """Return the peak in bytes; None if the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return None
        marks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
        return marks[0] if marks else None


def machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine, for results."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "cpu": cpu_name(),
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


class EnergyMeter:
    """A machine's energy counter, if it has one.

    Attributes
    ----------
    source : str
        Which counter it is, or why there is none.
    """

    def __init__(self, device: torch.device, powercap: Path = _POWERCAP) -> None:
        self._nvml: _NvmlCounter | None = None
        self._rapl: list[_RaplCounter] = []
        if device.type == "cuda":
            try:
                self._nvml = _NvmlCounter(device)
                self.source = "NVML energy counter of the GPU"
            except (OSError, AttributeError, RuntimeError) as error:
                self.source = f"not available: {error}"
            return
        counters = sorted(powercap.glob("intel-rapl:?/energy_uj")) if device.type == "cpu" else []
        self._rapl = [_RaplCounter(path) for path in counters if os.access(path, os.R_OK)]
        if self._rapl:
            self.source = "RAPL energy counter of the CPU packages"
        elif counters:
            self.source = "not available: the RAPL counters may not be read by this user"
        else:
            self.source = f"not available: no energy counter for device {device.type!r}"

    def joules(self) -> float | None:
        """Return a reading, of which only differences mean anything; None if there is no counter."""
        if self._nvml is not None:
            return self._nvml.joules()
        return sum(counter.joules() for counter in self._rapl) if self._rapl else None


class _RaplCounter:
    """The counter of one CPU package; `joules` corrects for its wrapping around."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._range = int((path.parent / "max_energy_range_uj").read_text()) + 1
        except (OSError, ValueError):
            self._range = 2**32
        self._last, self._turns = 0, 0

    def joules(self) -> float:
        now = int(self._path.read_text())
        self._turns += now < self._last
        self._last = now
        return (now + self._turns * self._range) / 1e6


class _NvmlCounter:
    """The counter of one GPU, read through the NVML library that comes with the driver."""

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL(ctypes.util.find_library("nvidia-ml") or "libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is not None:  # not by index, because CUDA_VISIBLE_DEVICES renumbers devices for CUDA only
            self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._handle))
        else:
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(device.index or 0), ctypes.byref(self._handle))
        self.joules()

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} of the NVIDIA driver returned error {code}")
