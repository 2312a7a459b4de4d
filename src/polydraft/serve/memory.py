"""Memory of a server: default sizes of slots, texts and shared beginnings, and whether there is enough."""

import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from polydraft.devices import free_bytes, is_host
from polydraft.engine import Decoder
from polydraft.errors import FailureError
from polydraft.models.blocks import Pool
from polydraft.models.language_model import PREFILL_CHUNK
from polydraft.models.placement import agreed
from polydraft.serve.lane import Lane, LaneOptions

_LOGGER = logging.getLogger("polydraft.serve")
LEAST_TOKENS, _MOST_TOKENS, _STEP = 2048, 16384, 256
"""Default tokens per slot: minimum, maximum, and step."""


def fitting_pool(device: torch.device, cache_gb: float | None = None) -> Pool | None:
    """Return the pool of memory for all texts: of the given size, or on a CPU by default what free memory allows.

    On a GPU, slots have memory of their own by default: see docs/decisions/064-memory-by-blocks-is-virtual-memory.md.
    """
    if cache_gb is not None:
        return Pool(int(cache_gb * 1e9))
    return Pool(agreed(_bytes_for_texts(device))) if is_host(device) else None


def fitting_tokens(decoder: Decoder, slots: int, pool: Pool | None) -> int:
    """Return the default size of a slot in tokens: as many as the model reads.

    It is smaller if each slot has memory of its own, and this many slots would otherwise take too much.
    """
    most = min(decoder.target.max_positions or _MOST_TOKENS, _MOST_TOKENS)
    if most <= LEAST_TOKENS:
        return most
    size = LaneOptions(slots=1, slot_tokens=LEAST_TOKENS, chunk_tokens=PREFILL_CHUNK)
    room = _bytes_for_texts(decoder.target.device) if pool is None else pool.size
    one = Lane(decoder, size, pool=None if pool is None else Pool(sys.maxsize))
    one.reserve()
    if not one.cache_bytes:
        return most
    fitting = int(room / slots * LEAST_TOKENS / one.cache_bytes) // _STEP * _STEP
    tokens: int = agreed(min(max(fitting, LEAST_TOKENS), most))
    taken = tokens / LEAST_TOKENS * slots * one.cache_bytes
    _LOGGER.info("--slot-tokens %d: %d slots take %.1f GB, however long their texts are", tokens, slots, taken / 1e9)
    return tokens


def fitting_prefixes(device: torch.device) -> int:
    """Return how many bytes shared beginnings may take by default, once all slots have their memory."""
    fitting: int = agreed(_share(device, on_host=1 / 8, most_on_host=1e9, on_gpu=1 / 4, unknown=2**27))
    return fitting


def _bytes_for_texts(device: torch.device) -> int:
    return _share(device, on_host=1 / 4, most_on_host=4e9, on_gpu=1 / 2, unknown=1e9)


def _share(device: torch.device, *, on_host: float, most_on_host: float, on_gpu: float, unknown: float) -> int:
    """Return a share of the free memory in bytes, on a host up to a limit; `unknown` if free memory is unknown."""
    free = free_bytes(device)
    if free is None:
        return int(unknown)
    return int(min(on_host * free, most_on_host) if is_host(device) else on_gpu * free)


def reserve(lanes: Collection[Lane], pool: Pool | None) -> None:
    """Allocate all memory of lanes; raise `MemoryError` if their pool is too small for the longest text."""
    for lane in lanes:
        lane.reserve()
    if pool is None:
        return
    needs = [lane.least_bytes for lane in lanes]
    pool.idle = sum(idle for idle, _ in needs)
    pool.least = pool.idle + max(longest for _, longest in needs)
    if pool.size < pool.least:
        raise MemoryError


@contextmanager
def enough_memory(slots: str, slot_tokens: int, smaller: str) -> Iterator[None]:
    """Turn an error about memory into one that says what to make smaller."""
    try:
        yield
    except Exception as error:
        if not is_about_memory(error):
            raise
        raise FailureError(f"too little memory for {slots} slots of {slot_tokens} tokens; use smaller {smaller}") from error


def is_about_memory(error: Exception) -> bool:
    """Whether memory has run out; on a CPU, torch raises a mere `RuntimeError`."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error)
