"""Launching rounds: as CUDA graphs where they can be captured, and ahead of the host where nothing depends on it."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from polydraft.devices import captures
from polydraft.draft.session import Capturable
from polydraft.engine.outcome import Outcome, RowOutcome
from polydraft.engine.round import State, run_round
from polydraft.engine.stats import Stats
from polydraft.engine.warm_up import compiling_ahead
from polydraft.errors import first_line
from polydraft.models import Context
from polydraft.trees import DraftTree
from polydraft.verify import Walk

_MOST_CAPTURES = 256
_TABLES = ("tokens_BN", "depths_BN", "ancestors_BNN", "child_table_BNK")
"""Tensors of a tree of the host's, which are inputs of a capture."""
_LOGGER = logging.getLogger("polydraft")
_TOLD: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Obstacles that were logged already, by model."""


def tell_obstacle(model: Any, obstacle: str) -> None:
    """Log, once for each model, why nothing is captured."""
    told = _TOLD.setdefault(model, set())
    if obstacle not in told:
        told.add(obstacle)
        _LOGGER.warning("rounds run without CUDA graphs: %s", obstacle)


@dataclass(frozen=True, eq=False)
class Capture:
    """One captured function of some tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run it on new values; the output is overwritten by the next replay."""
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.output


class GraphCache:
    """Capture a kind of round after a few runs, and replay it from then on.

    The first runs are not captured: libraries set themselves up and kernels are compiled, which no capture may contain.
    A function may leave results only in tensors that stay where they are; captures share the memory for everything in between.
    When there are too many, the least recently used capture goes.

    Parameters
    ----------
    before : int
        Runs before a capture.
    device : torch.device, optional
        Where to copy inputs that may be in page-locked memory of the host; not copied if not given.
    """

    def __init__(self, before: int = 1, device: torch.device | None = None) -> None:
        self._before, self._device = before, device
        self._captures: OrderedDict[Hashable, Capture] = OrderedDict()
        self._known: Counter[Hashable] = Counter()
        self._refused: set[Hashable] = set()
        self._pool: Any = None
        self.obstacle: str | None = None
        """Why the last capture failed."""

    def __len__(self) -> int:
        return len(self._captures)

    def run(self, kind: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, bool]:
        """Return `function(*inputs)`, and whether it was replayed."""
        if kind in self._captures:
            self._captures.move_to_end(kind)
            return self._captures[kind].replay(inputs), True
        if self._device is not None:
            inputs = tuple(tensor.to(self._device, non_blocking=True) for tensor in inputs)
        if self._known[kind] < self._before or kind in self._refused:
            self._known[kind] += 1
            return function(*inputs), False
        capture = self._capture(function, inputs)
        if capture is None:
            self._refused.add(kind)
            return function(*inputs), False
        self._captures[kind] = capture
        if len(self._captures) > _MOST_CAPTURES:
            self._captures.popitem(last=False)
        return capture.replay(inputs), True

    def _capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Capture | None:
        graph, static = torch.cuda.CUDAGraph(), tuple(tensor.clone() for tensor in inputs)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads may go on allocating meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function(*static)
        except torch.OutOfMemoryError:
            self.clear()
            self.obstacle = "too little GPU memory to capture a round; use a smaller batch, a smaller tree or a shorter context"
        except RuntimeError as error:
            self._pool = None  # it may still think that it captures
            self.obstacle = f"capturing a round failed: {first_line(error)}"
        else:
            return Capture(graph, static, output)
        _LOGGER.warning("rounds run without CUDA graphs: %s", self.obstacle)
        return None

    def clear(self) -> None:
        """Give back all memory."""
        self._captures.clear()
        self._pool = None
        torch.cuda.empty_cache()


@dataclass(frozen=True, eq=False)
class Arriving:
    """A tensor on its way to the host, which may do something else meanwhile."""

    values_BX: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def send(cls, values_BX: Tensor) -> "Arriving":
        """Start copying a tensor to the host; it may be overwritten from now on."""
        pinned = captures(values_BX.device)
        # Torch lends page-locked memory anew only when the copies into it are over, so any number may be under way.
        arriving_BX = torch.empty(values_BX.shape, dtype=values_BX.dtype, pin_memory=pinned)
        arriving_BX.copy_(values_BX, non_blocking=pinned)
        copied = None
        if pinned:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(values_BX.device))
        return cls(arriving_BX, copied)

    def arrived(self) -> Tensor:
        """Wait for the copy and return it; work that was launched later goes on meanwhile."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values_BX


class DeviceClock:
    """Measure how much longer a device works on something than the host takes to launch it, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._spans = device, list[tuple[float, Any, Any]]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is launched here."""
        if not captures(self._device):
            yield
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream, start = torch.cuda.current_stream(self._device), time.perf_counter()
        first.record(stream)
        yield
        last.record(stream)
        self._spans.append((time.perf_counter() - start, first, last))

    def take(self) -> float:
        """Return the device's seconds beyond the host's since the last call; the device must be known to be past all of it."""
        seconds = sum((max(first.elapsed_time(last) / 1e3 - host, 0.0) for host, first, last in self._spans), 0.0)
        self._spans.clear()
        return seconds


@dataclass(frozen=True, eq=False)
class Launched:
    """A round that the device works on; its outcome is the round's only copy to the host."""

    arriving: Arriving
    depth: int
    replayed: bool
    """Whether the round is a replayed capture."""
    kind: Hashable = ()
    """What the host had chosen for it."""

    def wait(self) -> tuple[list[RowOutcome], list[list[int]]]:
        """Return the outcome row by row, and the session's reports."""
        return Outcome(self.arriving.arrived(), self.depth).rows()


class Launcher:
    """Launch the rounds of a batch.

    A round is captured where its device, the target and the drafter allow it. What the host proposes comes first then, and is
    an input of the capture.

    Parameters
    ----------
    graphs : GraphCache, optional
        None where nothing is captured.
    ahead : bool
        Allow a replayed round to be launched before the outcome of the last one is known.
    """

    def __init__(self, graphs: GraphCache | None, ahead: bool) -> None:
        self.graphs, self._ahead, self._new = graphs, ahead, True
        self.rounds = Counter[int]()
        """Rounds that were launched, by their rows."""

    def launch(
        self, state: State, contexts: Sequence[Context], walk: Walk, uniforms_BU: Tensor, stats: Stats, *, ahead: bool
    ) -> Launched:
        """Launch a round without reading any values; `ahead` if the outcome of the last one is not known yet."""
        state.session.wake(ahead=ahead)
        self.rounds[len(uniforms_BU)] += 1
        depth, can = state.session.depth, state.session.capturable
        if self.graphs is None or _obstacle(state, can):
            for context in contexts:
                context.span = None
            return Launched(Arriving.send(run_round(state, walk, uniforms_BU, stats).packed_BX), depth, replayed=False)
        # One span for all contexts: spans of their own would change at different lengths, and each pair would be captured.
        common = max(context.wanted_span() for context in contexts)
        spans = tuple(context.fix_span(common) for context in contexts)
        stored = tuple((context.capacity, context.address) for context in contexts)
        rows, width = uniforms_BU.shape
        shape = (depth, state.session.num_nodes, width, state.session.scheme.name, can.kind, *state.warper.kind, rows)
        kind: tuple[Hashable, ...] = (type(walk), *vars(walk).values(), shape, spans, stored)
        inputs: tuple[Tensor, ...] = (uniforms_BU,)
        host_tree: DraftTree | None = None
        if can.host_tree is not None:
            with stats.clock("draft"):
                host_tree = can.host_tree(state.tail_B2, uniforms_BU[:, : state.session.num_uniforms])
            inputs += tuple(getattr(host_tree, name) for name in _TABLES)
            kind += (host_tree.depth, *host_tree.child_table_BNK.shape)

        def function(values_BU: Tensor, *tables: Any) -> Tensor:
            # Later replays may reach further.
            tree = host_tree and replace(host_tree, **dict(zip(_TABLES, tables, strict=True)), reach=None)
            return run_round(state, walk, values_BU, Stats(), tree).packed_BX

        first, self._new = compiling_ahead(state, walk) if self._new else nullcontext(), False
        with stats.clock("graph"), first:
            outcome_BX, replayed = self.graphs.run(kind, function, *inputs)
        return Launched(Arriving.send(outcome_BX), depth, replayed, can.kind)

    def runs_ahead(self, state: State, contexts: Sequence[Context], last: Launched) -> bool:
        """Whether a round may follow before the host has seen the last one's outcome.

        It needs nothing from the host then but random numbers, and is a replay of the same capture, with room enough,
        however many tokens the last one yields.
        """
        state.session.wake(ahead=True)
        # Penalties depend on emitted tokens, which the host adds to what they count.
        can = state.session.capturable
        alone = self._ahead and last.replayed and not can.waits and not state.warper.params.needs_history
        return alone and can.kind == last.kind and all(context.steady(state.session.reach + 1) for context in contexts)


def _obstacle(state: State, can: Capturable) -> str | None:
    """Return why the next round cannot be captured, and log it if it is permanent."""
    if state.watched:
        return "log-probabilities are looked at on the host"
    lasting = can.never or ("logits processors work on the host" if state.warper.params.has_processors else None)
    lasting = lasting or state.target.graph_obstacle or (None if can.static else state.target.shape_obstacle)
    if lasting:
        tell_obstacle(state.target, lasting)
    return lasting or can.not_now
