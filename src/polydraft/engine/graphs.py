"""Launching rounds: as CUDA graphs where they can be captured, and ahead of the host where nothing depends on the host."""

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
_LOGGER = logging.getLogger("polydraft")
_TOLD: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Obstacles already logged, by model."""


def tell_obstacle(model: Any, obstacle: str) -> None:
    """Log, once per model, why nothing is captured."""
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
    """Run each kind of round eagerly a few times, then capture it, and replay the capture from then on.

    The first runs are not captured because libraries initialise and kernels are compiled in them, which a capture may not
    contain. A captured function may leave results only in tensors that never move; captures share memory for all else. When
    there are too many captures, the least recently used one is dropped.

    Parameters
    ----------
    before : int
        Eager runs before a capture.
    device : torch.device, optional
        Where to copy inputs that may be in page-locked host memory; not copied if not given.
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
            # Other threads may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function(*static)
        except torch.OutOfMemoryError:
            self.clear()
            self.obstacle = "too little GPU memory to capture a round; use a smaller batch, a smaller tree or a shorter context"
        except RuntimeError as error:
            self._pool = None  # it may still be marked as capturing
            self.obstacle = f"capturing a round failed: {first_line(error)}"
        else:
            return Capture(graph, static, output)
        _LOGGER.warning("rounds run without CUDA graphs: %s", self.obstacle)
        return None

    def clear(self) -> None:
        """Free all captures and their memory."""
        self._captures.clear()
        self._pool = None
        torch.cuda.empty_cache()


@dataclass(frozen=True, eq=False)
class Arriving:
    """A tensor being copied to the host, which does not wait for it."""

    values_BX: Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def send(cls, values_BX: Tensor) -> "Arriving":
        """Start copying a tensor to the host; later work may overwrite it."""
        pinned = captures(values_BX.device)
        # Torch reuses page-locked memory only after the copies into it are done, so any number may be in flight.
        arriving_BX = torch.empty(values_BX.shape, dtype=values_BX.dtype, pin_memory=pinned)
        arriving_BX.copy_(values_BX, non_blocking=pinned)
        copied = None
        if pinned:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(values_BX.device))
        return cls(arriving_BX, copied)

    def arrived(self) -> Tensor:
        """Wait for the copy, not for work launched after it, and return it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values_BX


class DeviceClock:
    """Measure how much longer the device takes for some work than the host takes to launch it, without waiting for it."""

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
        """Return the device's extra seconds since the last call; all of the timed work must be done."""
        seconds = sum((max(first.elapsed_time(last) / 1e3 - host, 0.0) for host, first, last in self._spans), 0.0)
        self._spans.clear()
        return seconds


@dataclass(frozen=True, eq=False)
class Launched:
    """A round in flight; its outcome is its only copy to the host."""

    arriving: Arriving
    depth: int
    replayed: bool
    """Whether the round is a replayed capture."""
    kind: Hashable = ()
    """What the host chose for it, see `Capturable.kind`."""

    def wait(self) -> tuple[list[RowOutcome], list[list[int]]]:
        """Return the outcome row by row, and the session's reports."""
        return Outcome(self.arriving.arrived(), self.depth).rows()


class Launcher:
    """Launch the rounds of a batch.

    A round is captured if the device, the target and the drafter allow it. If the host proposes the tree, it does so first,
    and the tree is an input of the capture.

    Parameters
    ----------
    graphs : GraphCache, optional
        None to capture nothing.
    ahead : bool
        Allow launching a replayed round before the outcome of the last one is known.
    """

    def __init__(self, graphs: GraphCache | None, ahead: bool) -> None:
        self.graphs, self._ahead, self._new = graphs, ahead, True
        self.rounds = Counter[int]()
        """Rounds launched so far, by number of rows."""

    def launch(
        self, state: State, contexts: Sequence[Context], walk: Walk, uniforms_BU: Tensor, stats: Stats, *, ahead: bool
    ) -> Launched:
        """Launch a round without reading any values; `ahead` says that the last one's outcome is not known yet."""
        state.session.wake(ahead=ahead)
        self.rounds[len(uniforms_BU)] += 1
        depth, can = state.session.depth, state.session.capturable
        if self.graphs is None or _obstacle(state, can):
            for context in contexts:
                context.span = None
            return Launched(Arriving.send(run_round(state, walk, uniforms_BU, stats).packed_BX), depth, replayed=False)
        # One span for all contexts: separate spans would change at different lengths, and each pair would need a capture.
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
            inputs += (host_tree.tokens_BN, host_tree.depths_BN, host_tree.ancestors_BNN, host_tree.child_table_BNK)
            kind += (host_tree.depth, *host_tree.child_table_BNK.shape)

        def function(values_BU: Tensor, *tables: Tensor) -> Tensor:
            static = None if host_tree is None else _with_tables(host_tree, *tables)
            return run_round(state, walk, values_BU, Stats(), static).packed_BX

        first, self._new = compiling_ahead(state, walk) if self._new else nullcontext(), False
        with stats.clock("graph"), first:
            outcome_BX, replayed = self.graphs.run(kind, function, *inputs)
        return Launched(Arriving.send(outcome_BX), depth, replayed, can.kind)

    def runs_ahead(self, state: State, contexts: Sequence[Context], last: Launched) -> bool:
        """Whether the next round may be launched before the host has seen the last one's outcome.

        It may if it needs nothing from the host but random numbers, replays the same capture, and has room however many tokens
        the last round yields.
        """
        state.session.wake(ahead=True)
        # Penalties count emitted tokens, and the host does the counting.
        can = state.session.capturable
        alone = self._ahead and last.replayed and not can.waits and not state.warper.params.needs_history
        return alone and can.kind == last.kind and all(context.steady(state.session.reach + 1) for context in contexts)


def _with_tables(
    tree: DraftTree, tokens_BN: Tensor, depths_BN: Tensor, ancestors_BNN: Tensor, child_table_BNK: Tensor
) -> DraftTree:
    """Return the host's tree with a capture's inputs as its tensors."""
    return replace(
        tree,
        tokens_BN=tokens_BN,
        depths_BN=depths_BN,
        ancestors_BNN=ancestors_BNN,
        child_table_BNK=child_table_BNK,
        reach=min(tree.depth, tokens_BN.shape[1] - 1),  # as far as any replay with as many nodes can reach
    )


def _obstacle(state: State, can: Capturable) -> str | None:
    """Return why the next round cannot be captured, or None; log it if it is permanent."""
    if state.watched:
        return "the host computes log-probabilities"
    lasting = can.never or ("logits processors run on the host" if state.warper.params.has_processors else None)
    lasting = lasting or state.target.graph_obstacle or (None if can.static else state.target.shape_obstacle)
    if lasting:
        tell_obstacle(state.target, lasting)
    return lasting or can.not_now
