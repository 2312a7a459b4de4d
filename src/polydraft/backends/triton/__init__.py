"""Where our Triton kernels can run, and helpers to launch them."""

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
"""Compiling the smallest kernel takes longer than this; finding it in Triton's cache mostly does not."""
_new: set[torch.device] = set()
"""GPUs for which our first kernel had to be compiled."""
_INTERPRETED = False
"""Whether Triton interprets kernels on the CPU, see `interpreting`."""
LEAST_CHILDREN = 4
"""Nodes with fewer children use the kernel compiled for this many."""


def kernels_run(tensor: Tensor) -> bool:
    """Whether our kernels work on a tensor."""
    return triton_obstacle(tensor.device) is None if tensor.device.type == "cuda" else _INTERPRETED


def runs_on_tensors(*args: object, **kwargs: object) -> bool:
    """Whether our kernels work on an operation's first tensor; that is all that many forms need."""
    return kernels_run(next(one for one in args if isinstance(one, Tensor)))


@contextmanager
def interpreting(on: bool = True) -> Iterator[None]:
    """Let kernels run on a CPU, in Triton's interpreter, for tests; the interpreter must be on before Triton is imported."""
    global _INTERPRETED
    before, _INTERPRETED = _INTERPRETED, on
    try:
        yield
    finally:
        _INTERPRETED = before


def are_new(device: torch.device) -> bool:
    """Whether our kernels still have to be compiled for a GPU."""
    return device.type == "cuda" and triton_obstacle(device) is None and device in _new


@cache
def triton_obstacle(device: torch.device) -> str | None:
    """Return why our kernels cannot run on a GPU, or None; checked once, and logged if it comes as a surprise."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the GPU's compute capability {capability[0]}.{capability[1]} is below 8.0"
    try:
        compiled = _launch_one(device)
    except Exception as error:  # mostly a missing C compiler, but Triton fails in many ways
        reason = first_line(error)
        _LOGGER.warning("Triton cannot compile on this machine, so decoding runs without our GPU kernels, slower: %s", reason)
        return f"Triton cannot compile here ({reason})"
    if compiled:
        _new.add(device)
        _LOGGER.info("compiling kernels for this GPU, once: the first request waits for some 10 to 20 seconds ...")
    return None


def _launch_one(device: torch.device) -> bool:
    """Launch the smallest kernel; return whether it had to be compiled, which old versions of Triton show only by the time."""
    from polydraft.backends.triton import keys as kernels

    with torch.cuda.device(device), _cache_hits() as hits:
        touched = torch.zeros(1, dtype=torch.int32, device=device)
        start = time.perf_counter()
        kernels.touch[(1,)](touched)
        seconds = time.perf_counter() - start
    return not all(hits) if hits else seconds > _COMPILED_SECONDS


@contextmanager
def _cache_hits() -> Iterator[list[bool]]:
    """Collect, for each kernel that Triton looks up, whether it was in Triton's cache; nothing if Triton does not tell."""
    hits: list[bool] = []
    try:
        from triton.knobs import compilation
    except ImportError:  # before Triton 3.4
        compilation = None
    if not hasattr(compilation, "listener"):
        yield hits
        return
    before = compilation.listener
    compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    try:
        yield hits
    finally:
        compilation.listener = before


def overlapping(tensor: Tensor) -> dict[str, Any]:
    """Return launch options for kernels that begin with `wait_for_others`: some GPUs prepare them while others still run."""
    return {"PDL": True, "launch_pdl": True} if _overlaps(tensor.device) else {"PDL": False}


@cache
def _overlaps(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    from triton.language.extra import cuda  # older releases have no dependent launches

    return hasattr(cuda, "gdc_wait")


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and at least `least`."""
    return max(1 << (number - 1).bit_length(), least)


def side_by_side(table: Tensor) -> Tensor:
    """Return a table whose last axis is contiguous; rows may be expanded."""
    return table if table.stride(-1) == 1 or table.shape[-1] == 1 else table.contiguous()
