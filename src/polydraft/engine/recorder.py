"""CUDA graphs of whole rounds, or of the passes of beams."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_MOST_RECORDINGS = 16
_LOGGER = logging.getLogger("polydraft")
_TOLD: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Why passes of a model are not recorded, as far as it was said."""


def tell_obstacle(model: Any, obstacle: str) -> None:
    """Log, once for each model, why nothing is recorded."""
    told = _TOLD.setdefault(model, set())
    if obstacle not in told:
        told.add(obstacle)
        _LOGGER.warning("rounds run without CUDA graphs: %s", obstacle)


@dataclass(frozen=True, eq=False)
class Recording:
    """One recorded function of some tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run it on new values; the output is overwritten by the next replay."""
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.output


class Recorder:
    """Record a kind of round when it has come a few times, and replay it from then on.

    The first times it runs as it is: libraries set themselves up and kernels are compiled, which no recording may contain.
    What a function leaves behind must be in tensors that stay where they are; recordings share the memory for everything
    in between. The longest unused recording goes when there are too many.

    Parameters
    ----------
    before : int
        Runs before a recording.
    device : torch.device, optional
        Where inputs are brought that may come from the host, page-locked; they need be nowhere else if not given.
    """

    def __init__(self, before: int = 1, device: torch.device | None = None) -> None:
        self._before, self._device = before, device
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._known: Counter[Hashable] = Counter()
        self._refused: set[Hashable] = set()
        self._pool: Any = None
        self.obstacle: str | None = None
        """Why the last recording failed."""

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, kind: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, bool]:
        """Return `function(*inputs)`, and whether it was replayed."""
        if kind in self._recordings:
            self._recordings.move_to_end(kind)
            return self._recordings[kind].replay(inputs), True
        if self._device is not None:
            inputs = tuple(tensor.to(self._device, non_blocking=True) for tensor in inputs)
        if self._known[kind] < self._before or kind in self._refused:
            self._known[kind] += 1
            return function(*inputs), False
        recording = self._record(function, inputs)
        if recording is None:
            self._refused.add(kind)
            return function(*inputs), False
        self._recordings[kind] = recording
        if len(self._recordings) > _MOST_RECORDINGS:
            self._recordings.popitem(last=False)
        return recording.replay(inputs), True

    def _record(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Recording | None:
        graph, static = torch.cuda.CUDAGraph(), tuple(tensor.clone() for tensor in inputs)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads may go on allocating meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function(*static)
        except torch.OutOfMemoryError:
            self.clear()
            self.obstacle = "too little GPU memory to record a round; use a smaller batch, a smaller tree or a shorter context"
        except RuntimeError as error:
            self._pool = None  # it may still think that it records
            self.obstacle = f"recording a round failed: {str(error).splitlines()[0]}"
        else:
            return Recording(graph, static, output)
        _LOGGER.warning("rounds run without CUDA graphs: %s", self.obstacle)
        return None

    def clear(self) -> None:
        """Give back all memory."""
        self._recordings.clear()
        self._pool = None
        torch.cuda.empty_cache()
