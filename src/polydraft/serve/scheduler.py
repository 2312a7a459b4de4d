"""The one thread that computes: requests come in from the event loop, tokens go back to it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from polydraft.draft import Plain, TreeDrafter
from polydraft.draft.forced import with_forced
from polydraft.engine import Decoder, StopReason
from polydraft.engine.sequence import Emitted
from polydraft.errors import FailureError, UsageError
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.serve.followers import Company
from polydraft.serve.lane import Lane, LaneOptions
from polydraft.serve.ticket import AUTO, OFF, BusyError, Progress, Ticket, UnavailableError
from polydraft.trees import DynamicShape, Topology, parse_dynamic, parse_tree

_LOGGER = logging.getLogger("polydraft.serve")
_MOST_NODES, _MOST_LEVELS = 128, 16
"""Of a tree that a request asks for: room for its candidates is reserved beforehand."""
_LARGEST = (
    Topology(Topology.fork(-(-_MOST_NODES // _MOST_LEVELS), _MOST_LEVELS).parents[:_MOST_NODES]),
    DynamicShape(nodes=_MOST_NODES, depth=_MOST_LEVELS, adaptive=False),
)
_MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError)
_HEARTBEAT = 60.0
"""Seconds after which other processes hear that nothing has happened: they do not wait for ever."""

Observer = Callable[[Ticket, Progress], None]


class Scheduler:
    """Drive the engine for requests that come and go; one thread computes, any thread may ask.

    Requests that leave drafting to the server have a lane of their own. All others (with grammars, without drafts, with trees
    of their own) share the slots of a second lane: each way of drafting has it in turn, first come, first served.

    Parameters
    ----------
    decoder : Decoder
    options : LaneOptions
    other_slots : int, optional
        Slots of the second lane; as many as the first one has if not given.
    own_trees : bool
        Whether to reserve room for the candidates of requests' own trees.
    max_queue : int
        Texts that may wait beyond those that have slots.
    observer : callable, optional
        Sees all that happens, in the scheduler's thread.
    warm_up : sequence of SamplingParams
        Rehearse rounds with these before any request is served.
    company : Company, optional
        Of processes that share the model.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: LaneOptions,
        *,
        other_slots: int | None = None,
        own_trees: bool = True,
        max_queue: int,
        observer: Observer | None = None,
        warm_up: Sequence[SamplingParams] = (),
        company: Company | None = None,
    ) -> None:
        self.decoder, self.options, self._observer, self.company = decoder, options, observer, company
        self._rehearsed, self._cold = warm_up, bool(warm_up)
        self._limit = options.slots + max_queue
        self._others = replace(options, slots=other_slots or options.slots)
        self._own_trees = own_trees
        self._lanes = {AUTO: Lane(decoder, options)}
        """The first lane, and the one of the others whose turn it is."""
        self._queue: deque[Ticket] = deque()
        """Requests that wait for the turn of another lane, and those behind them."""
        self._changed = threading.Condition()
        self._inbox: deque[Ticket] = deque()
        self._leaving: deque[Ticket] = deque()
        self._open: dict[Ticket, int] = {}
        """Requests that are not answered yet, and how many of their texts have not ended."""
        self._draining, self._stopping = False, False
        self._round_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="polydraft-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def follow(self) -> None:
        """Do as the scheduler of another process does, until it ends."""
        assert self.company is not None and not self.company.leads
        self._run()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._draining and not self._cold

    def reserve(self) -> None:
        """Take all memory that the texts of all lanes will ever have, before there are any.

        Raises
        ------
        FailureError
            If there is too little.
        """
        try:
            self._turn(Ticket((), constrained=True))  # the largest memory of those that all may have
            for lane in self._lanes.values():
                lane.reserve()
        except Exception as error:
            if not _is_about_memory(error):
                raise
            raise FailureError(
                f"too little memory for {self.options.slots} + {self._others.slots} slots of {self.options.slot_tokens} "
                "tokens; use smaller --slots, --other-slots or --slot-tokens"
            ) from error

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are reserved, for all slots."""
        return sum(lane.cache_bytes for lane in tuple(self._lanes.values()))

    @property
    def running(self) -> int:
        """Texts that have slots."""
        return sum(len(lane.running) for lane in tuple(self._lanes.values()))

    @property
    def waiting(self) -> int:
        """Texts that wait for one."""
        return max(sum(self._open.copy().values()) - self.running, 0)

    def submit(self, ticket: Ticket) -> None:
        """Take a request on.

        Raises
        ------
        BusyError
            If too many texts wait already.
        UnavailableError
            If no more requests are taken.
        """
        with self._changed:
            if self._draining or not self._thread.is_alive():
                raise UnavailableError("the server is shutting down; ask another one, or later")
            if sum(self._open.values()) + len(ticket.sequences) > self._limit:
                raise BusyError(f"{self._limit} texts are being written or wait already; come back later")
            self._open[ticket] = len(ticket.sequences)
            self._inbox.append(ticket)
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Let a request go: its slots are free after the round that is under way."""
        with self._changed:
            if ticket in self._open and not ticket.cancelled:
                ticket.cancelled = True
                self._leaving.append(ticket)
                self._changed.notify()

    def retry_after(self) -> int:
        """Guess after how many seconds there may be room again."""
        longest = max((one.max_new_tokens for ticket in self._open.copy() for one in ticket.sequences), default=0)
        return min(max(int(longest * self._round_seconds / 2), 1), 60)

    def drain(self, seconds: float) -> None:
        """Take nothing more on; wait for what runs, then end the rest with an error, and the thread."""
        with self._changed:
            self._draining = True
            self._changed.notify()
            self._changed.wait_for(lambda: not self._open or not self._thread.is_alive(), seconds)
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._cold:
            self._warm_up()
        while self._has_work():
            self._give_turns()
            for lane in tuple(self._lanes.values()):
                if lane.busy:
                    start = time.perf_counter()
                    try:
                        happened = lane.step(any(one.running for one in self._lanes.values() if one is not lane))
                    # Whatever it was, only those whose texts were at work are to suffer.
                    except Exception as error:
                        happened = self._lost(lane, error)
                    self._round_seconds = 0.9 * self._round_seconds + 0.1 * (time.perf_counter() - start)
                    self._tell(happened)
        gone = UnavailableError("the server was stopped before the answer was complete")
        for lane in tuple(self._lanes.values()):
            self._tell(_ended(lane.reset(waiting_too=True), gone))
        for ticket in self._queue:
            self._tell(_ended(_texts_of(ticket), gone))

    def _warm_up(self) -> None:
        start, lane = time.perf_counter(), self._lanes[AUTO]
        try:
            # Processes that share a model go through with it together.
            lane.warm_up(self._rehearsed, lambda: self._draining and self.company is None)
        except Exception as error:  # requests will meet it again, and are told then
            _LOGGER.error("warming up failed: %s: %s", type(error).__name__, error)
            lane.reset()
        _LOGGER.info("warmed up in %.1f seconds", time.perf_counter() - start)
        self._cold = False

    def _has_work(self) -> bool:
        """Wait for something to do, take in who came and let go who left; say whether to go on."""
        company = self.company
        with self._changed:
            if company is None or company.leads:
                self._changed.wait_for(
                    lambda: self._stopping or self._inbox or self._leaving or self._queue or self._busy,
                    None if company is None else _HEARTBEAT,
                )
            came, left = list(self._inbox), list(self._leaving)
            self._inbox.clear()
            self._leaving.clear()
            stopping = self._stopping
        if company is not None:
            came, left, stopping = company.agree(came, left, stopping, self._open)
            if not company.leads:
                self._open |= {ticket: len(ticket.sequences) for ticket in came}
        for ticket in came:
            if self._key(ticket) == AUTO:
                self._lanes[AUTO].waiting.add(ticket)
            else:
                self._queue.append(ticket)
        for ticket in left:
            self._let_go(ticket)
        return not stopping

    @property
    def _busy(self) -> bool:
        return any(lane.busy for lane in self._lanes.values())

    def _let_go(self, ticket: Ticket) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
            for sequence in ticket.sequences:
                sequence.cut(StopReason.CANCELLED, 0)
        for lane in tuple(self._lanes.values()):
            try:
                lane.cancel(ticket)
            except Exception as error:  # the device, most likely: nobody's text in this lane can go on
                self._tell(self._lost(lane, error))
        with self._changed:
            self._open.pop(ticket, None)
            self._changed.notify_all()

    def _key(self, ticket: Ticket) -> str:
        """Return which lane a request is for."""
        plain = ticket.speculative == OFF and isinstance(self.decoder.drafter, Plain)
        return ticket.lane.replace(OFF, AUTO) if plain else ticket.lane

    def _give_turns(self) -> None:
        """Let requests into the second lane, first come, first served: who drafts in another way waits until it is idle."""
        while self._queue:
            ticket, key = self._queue[0], self._key(self._queue[0])
            try:
                if key not in self._lanes:
                    if any(lane.busy for name, lane in self._lanes.items() if name != AUTO):
                        return
                    self._turn(ticket)
                self._lanes[key].waiting.add(ticket)
            except Exception as error:
                self._tell(_ended(_texts_of(ticket), error))
            self._queue.popleft()

    def _turn(self, ticket: Ticket) -> None:
        """Let the second lane draft as a request asks, in the memory that it had for others."""
        decoder = drafting(self.decoder, ticket.speculative)
        if ticket.constrained:
            decoder = decoder.replace(drafter=with_forced(decoder.drafter))
        size = replace(self._others, places=self._places)
        memory = [one for name in [*self._lanes][1:] for one in self._lanes.pop(name).release()]
        self._lanes[self._key(ticket)] = Lane(decoder, size, memory)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """Most places for candidates that rounds of the second lane need: in the target's memory, then in the draft's."""
        drafter, target = self.decoder.drafter, self.decoder.target
        trees = [] if drafter.model is None or not self._own_trees else [TreeDrafter(drafter.model, one) for one in _LARGEST]
        params = RowParams((IDLE,) * self._others.slots)
        sessions = [with_forced(one).start(params, target) for one in (drafter, *trees)]
        found = [(session.num_nodes, *(context.places for context in session.contexts)) for session in sessions]
        return tuple(map(max, zip(*found, strict=True)))

    def _lost(self, lane: Lane, error: Exception) -> list[tuple[Ticket, Progress]]:
        """Tell those whose texts were at work that they are lost; others go on with new memory."""
        _LOGGER.error("a round failed: %s: %s", type(error).__name__, error, exc_info=error)
        lost = lane.reset()
        if _is_about_memory(error):
            return _ended(
                lost, UnavailableError("out of memory; come back later, with a shorter prompt, or restart with fewer slots")
            )
        return _ended(lost, FailureError("the round of this text failed; the server's log says why; try again"))

    def _tell(self, happened: list[tuple[Ticket, Progress]]) -> None:
        """Hand out what happened, one call per event loop."""
        with self._changed:
            told = [(ticket, progress) for ticket, progress in happened if ticket in self._open]
            for ticket, progress in told:
                if progress.emitted.stop_reason is not None:
                    self._open[ticket] -= 1
                    if not self._open[ticket]:
                        del self._open[ticket]
            self._changed.notify_all()
        for ticket, progress in told:
            if self._observer is not None:
                self._observer(ticket, progress)
        loops = {ticket.loop for ticket, _ in told if ticket.loop is not None}
        for loop in loops:
            own = [(ticket, progress) for ticket, progress in told if ticket.loop is loop]
            try:
                loop.call_soon_threadsafe(_deliver, own)
            except RuntimeError:  # the loop is closed: nobody listens any more
                _LOGGER.debug("an event loop was closed before its answers were complete")


def _is_about_memory(error: Exception) -> bool:
    return isinstance(error, _MEMORY_ERRORS) or "memory" in str(error)


def _texts_of(ticket: Ticket) -> list[tuple[Ticket, int]]:
    return [(ticket, index) for index in range(len(ticket.sequences))]


def _deliver(own: Iterable[tuple[Ticket, Progress]]) -> None:
    for ticket, progress in own:
        ticket.deliver(progress)


def _ended(texts: Iterable[tuple[Ticket, int]], error: Exception) -> list[tuple[Ticket, Progress]]:
    """Return what is told of texts that are lost."""
    return [
        (ticket, Progress(index, Emitted(ticket.sequences[index].row, [], [], [], StopReason.FAILED), error))
        for ticket, index in texts
    ]


def drafting(decoder: Decoder, speculative: str) -> Decoder:
    """Return a decoder that drafts as a request asks: not at all, or with a tree of its own."""
    if speculative == AUTO:
        return decoder
    if speculative == OFF:
        return decoder.replace(drafter=None)
    model = decoder.drafter.model
    if model is None:
        raise UsageError(f"speculative tree {speculative!r}: this server has no draft; allowed: auto, off")
    shape = parse_dynamic(speculative) or parse_tree(speculative)
    nodes = shape.nodes if isinstance(shape, DynamicShape) else shape.num_nodes
    for count, most, name in ((nodes, _MOST_NODES, "nodes"), (shape.depth, _MOST_LEVELS, "levels")):
        if count > most:
            raise UsageError(f"speculative tree {speculative!r} has {count} {name}; allowed: at most {most}")
    return decoder.replace(drafter=TreeDrafter(model, shape), walk="auto")
