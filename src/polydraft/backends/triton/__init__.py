"""Where kernels of our own run, and what those who launch them share; the kernels themselves are with whom they serve."""

import importlib.util
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import first_line

_LOGGER = logging.getLogger("polydraft")
_COMPILED_SECONDS = 0.3
"""Compiling the smallest kernel takes longer than that, finding it in Triton's cache does not."""
_first_seconds: dict[torch.device, float] = {}
"""What the first kernel took."""
_INTERPRETED = False
"""Whether Triton interprets kernels on the CPU, see `interpreting`."""
LEAST_CHILDREN = 4
"""Nodes of fewer children share the kernel of these."""


def kernels_run(tensor: Tensor) -> bool:
    """Whether kernels of our own work on a tensor."""
    return _compiles(tensor.device) if tensor.device.type == "cuda" else _INTERPRETED


def runs_on_tensors(*args: object, **kwargs: object) -> bool:
    """Whether kernels of our own work on the first tensor of an operation: all that many forms need."""
    return kernels_run(next(one for one in args if isinstance(one, Tensor)))


@contextmanager
def interpreting(on: bool = True) -> Iterator[None]:
    """Say whether kernels run on a CPU, in Triton's interpreter, for tests; it must be turned on before Triton is imported."""
    global _INTERPRETED
    before, _INTERPRETED = _INTERPRETED, on
    try:
        yield
    finally:
        _INTERPRETED = before


def are_new(device: torch.device) -> bool:
    """Whether a GPU meets our kernels for the first time, so that they have to be compiled."""
    return device.type == "cuda" and triton_obstacle(device) is None and _first_seconds.get(device, 0.0) > _COMPILED_SECONDS


def _compiles(device: torch.device) -> bool:
    return triton_obstacle(device) is None


@cache
def triton_obstacle(device: torch.device) -> str | None:
    """Return why kernels of our own cannot run on a GPU, or None; found out once, and logged where it is a surprise."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the GPU's compute capability {capability[0]}.{capability[1]} is below 8.0"
    try:
        seconds = _first_seconds[device] = _launch_one(device)
    except Exception as error:  # a missing C compiler most often, but Triton fails in many ways
        reason = first_line(error)
        _LOGGER.warning("Triton cannot compile on this machine, so decoding runs without our GPU kernels, slower: %s", reason)
        return f"Triton cannot compile here ({reason})"
    if seconds > _COMPILED_SECONDS:
        _LOGGER.info("compiling kernels for this GPU, once: the first request waits for some 10 to 20 seconds ...")
    return None


def _launch_one(device: torch.device) -> float:
    """Compile and launch the smallest kernel; return the seconds that it took."""
    from polydraft.backends.triton import keys as kernels

    with torch.cuda.device(device):
        touched = torch.zeros(1, dtype=torch.int32, device=device)
        start = time.perf_counter()
        kernels.touch[(1,)](touched)
        return time.perf_counter() - start


def overlapping(tensor: Tensor) -> dict[str, Any]:
    """Return how to launch a kernel that begins with `wait_for_others`: a GPU that can gets it ready while others run."""
    return {"PDL": True, "launch_pdl": True} if _overlaps(tensor.device) else {"PDL": False}


@cache
def _overlaps(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    from triton.language.extra import cuda  # older releases have no dependent launches

    return hasattr(cuda, "gdc_wait")


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is not below either."""
    return max(1 << (number - 1).bit_length(), least)


def side_by_side(table: Tensor) -> Tensor:
    """Return a table whose last axis lies in one piece; rows may be expanded."""
    return table if table.stride(-1) == 1 or table.shape[-1] == 1 else table.contiguous()
