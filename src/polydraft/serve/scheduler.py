"""The scheduler: one thread that computes. Requests come from event loops, and their tokens go back there."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from polydraft.draft import Plain
from polydraft.draft.forced import with_forced
from polydraft.draft.predicted import with_prediction
from polydraft.engine import Decoder, StopReason
from polydraft.engine.sequence import Emitted
from polydraft.models.blocks import Pool
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import SamplingParams
from polydraft.serve.errors import RequestError
from polydraft.serve.lane import Lane, LaneOptions, most_places, with_speculation
from polydraft.serve.memory import enough_memory, is_about_memory, reserve
from polydraft.serve.request import AUTO, OFF, Lockstep, Progress, Request

_LOGGER = logging.getLogger("polydraft.serve")
_HEARTBEAT_SECONDS = 60.0
"""How often an idle leader calls its followers, whose collective would time out otherwise."""

Events = list[tuple[Request, Progress]]
Observer = Callable[[Request, Progress], None]


class Scheduler:
    """Run requests that come and go; one thread computes, any thread may submit.

    Requests that leave drafting to the server run in the first lane. All others (with a grammar, a prediction, a tree of their
    own, or without speculation) share the second lane, which drafts in one way at a time: the ways take turns, first come,
    first served.

    Parameters
    ----------
    decoder : Decoder
    options : LaneOptions
    other_slots : int, optional
        Slots of the second lane, by default as many as the first has.
    own_trees : bool
        Whether requests may choose trees of their own, for which memory is then reserved.
    max_queue : int
        Most sequences that may wait for a slot.
    observer : callable, optional
        Called with every event, in the scheduler's thread.
    warm_up : sequence of SamplingParams
        Sampling parameters to rehearse rounds with before the first request.
    lockstep : Lockstep, optional
        Keeps tensor-parallel processes in step.
    prefixes : Prefixes, optional
        Cache of text beginnings, shared by both lanes.
    pool : Pool, optional
        Memory that the texts of both lanes take blocks from; without it, each slot has memory for the longest text.
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
        lockstep: Lockstep | None = None,
        prefixes: Prefixes | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.decoder, self.options, self._observer, self.lockstep = decoder, options, observer, lockstep
        self._rehearsed, self._cold = warm_up, bool(warm_up)
        self._limit = options.slots + max_queue
        self._second_options = replace(options, slots=other_slots or options.slots)
        self._own_trees = own_trees
        self.prefixes, self.pool = prefixes, pool
        self.lanes = {AUTO: Lane(decoder, options, prefixes=prefixes, pool=pool)}
        """Lanes by name: the first, and the second under the name of its current way of drafting."""
        self._second_queue: deque[Request] = deque()
        """Requests that wait for the second lane to draft in their way."""
        self._changed = threading.Condition()
        """Guards the attributes down to `_stopping`."""
        self._arrived: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._unfinished: dict[Request, int] = {}
        """Unfinished sequences of each request."""
        self._draining, self._stopping = False, False
        self._round_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="polydraft-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def follow(self) -> None:
        """Do what the leader's scheduler does, in this thread, until it stops."""
        assert self.lockstep is not None and not self.lockstep.leads
        self._run()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether requests are accepted and answered; not during warm-up, nor while draining."""
        return self.alive and not self._draining and not self._cold

    def reserve(self) -> None:
        """Allocate all memory that both lanes will ever need.

        Raises
        ------
        FailureError
            If there is too little memory.
        """
        slots = f"{self.options.slots} + {self._second_options.slots}"
        with enough_memory(slots, self.options.slot_tokens, "--slots, --other-slots or --slot-tokens, or more --cache-gb"):
            self._switch_second_lane(Request((), constrained=True))  # this way of drafting needs the most memory
            reserve(self.lanes.values(), self.pool)

    @property
    def cache_bytes(self) -> int:
        """Bytes reserved for keys and values: the pool, and what slots hold outside it."""
        return sum(lane.cache_bytes for lane in tuple(self.lanes.values())) + (0 if self.pool is None else self.pool.size)

    @property
    def cache_usage(self) -> float:
        """Fraction of that memory in use: of the pool, or without one, of the tokens that the slots have room for."""
        if self.pool is not None and self.pool.used:
            return self.pool.usage
        slots = self.options.slots + self._second_options.slots
        return sum(lane.used_tokens for lane in tuple(self.lanes.values())) / (slots * self.options.slot_tokens)

    @property
    def running(self) -> int:
        """Sequences that have slots."""
        return sum(len(lane.running) for lane in tuple(self.lanes.values()))

    @property
    def unfinished(self) -> int:
        """Sequences that run or wait."""
        return sum(self._unfinished.copy().values())

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return max(self.unfinished - self.running, 0)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        RequestError
            If the queue is full, the scheduler is draining, or its thread has ended.
        """
        with self._changed:
            if self._draining or not self.alive:
                raise RequestError("shutting_down")
            if self.unfinished + len(request.sequences) > self._limit:
                raise RequestError("queue_full", limit=self._limit)
            self._unfinished[request] = len(request.sequences)
            self._arrived.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Free a request's slots after the current round; finished requests are ignored."""
        with self._changed:
            if request in self._unfinished and not request.cancelled:
                request.cancelled = True
                self._cancelled.append(request)
                self._changed.notify()

    def retry_after(self) -> int:
        """Estimate in how many seconds a slot may be free."""
        longest = max((one.max_new_tokens for request in self._unfinished.copy() for one in request.sequences), default=0)
        return min(max(int(longest * self._round_seconds / 2), 1), 60)

    def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish within some seconds, fail the rest, and stop the thread."""
        with self._changed:
            self._draining = True
            self._changed.notify()
            self._changed.wait_for(lambda: not self._unfinished or not self.alive, seconds)
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._cold:
            self._warm_up()
        while self._take_in():
            self._serve_second_queue()
            for lane in tuple(self.lanes.values()):
                if lane.busy:
                    start = time.perf_counter()
                    try:
                        events = lane.step(any(one.running for one in self.lanes.values() if one is not lane))
                    except Exception as error:  # whatever it is, it fails only the running sequences
                        events = self._fail_running(lane, error)
                    self._round_seconds = 0.9 * self._round_seconds + 0.1 * (time.perf_counter() - start)
                    self._publish(events)
        left = [pair for lane in self.lanes.values() for pair in (*lane.reset(), *lane.waiting.clear())]
        left += [pair for request in self._second_queue for pair in _sequences_of(request)]
        self._publish(_failed(left, RequestError("stopped")))

    def _warm_up(self) -> None:
        start, lane = time.perf_counter(), self.lanes[AUTO]
        try:
            # Processes in lockstep must all run the same rounds, so they finish warming up.
            lane.warm_up(self._rehearsed, lambda: self._draining and self.lockstep is None)
        except Exception as error:  # requests will run into the same error, and report it
            _LOGGER.error("warming up failed: %s: %s", type(error).__name__, error)
            lane.reset()
        _LOGGER.info("warmed up in %.1f seconds", time.perf_counter() - start)
        self._cold = False

    def _take_in(self) -> bool:
        """Wait for work, queue new requests, and drop cancelled ones; return whether to go on."""
        lockstep = self.lockstep
        with self._changed:
            if lockstep is None or lockstep.leads:
                seconds = None if lockstep is None else _HEARTBEAT_SECONDS
                self._changed.wait_for(lambda: self._stopping or self._unfinished or self._cancelled, seconds)
            arrived, cancelled = list(self._arrived), list(self._cancelled)
            self._arrived.clear()
            self._cancelled.clear()
            stopping = self._stopping
        if lockstep is not None:
            arrived, cancelled, stopping = lockstep.agree(arrived, cancelled, stopping, self._unfinished)
            if not lockstep.leads:
                self._unfinished |= {request: len(request.sequences) for request in arrived}
        for request in arrived:
            if self._lane_name(request) == AUTO:
                self.lanes[AUTO].waiting.add(request)
            else:
                self._second_queue.append(request)
        for request in cancelled:
            self._drop(request)
        return not stopping

    def _drop(self, request: Request) -> None:
        """End all sequences of a request, wherever they are."""
        if request in self._second_queue:
            self._second_queue.remove(request)
            for sequence in request.sequences:
                sequence.cut(StopReason.CANCELLED, 0)
        for lane in tuple(self.lanes.values()):
            try:
                lane.cancel(request)
            except Exception as error:  # most likely the device failed: no sequence of this lane can go on
                self._publish(self._fail_running(lane, error))
        with self._changed:
            self._unfinished.pop(request, None)
            self._changed.notify_all()

    def _lane_name(self, request: Request) -> str:
        """Return the name of the lane that a request needs; without a draft, the first lane serves "off", too."""
        plain = request.speculative == OFF and isinstance(self.decoder.drafter, Plain)
        return request.lane.replace(OFF, AUTO) if plain else request.lane

    def _serve_second_queue(self) -> None:
        """Move requests into the second lane, in order. One that drafts in another way waits until the lane is idle."""
        while self._second_queue:
            request = self._second_queue[0]
            name = self._lane_name(request)
            try:
                if name not in self.lanes:
                    if any(lane.busy for other, lane in self.lanes.items() if other != AUTO):
                        return
                    self._switch_second_lane(request)
                self.lanes[name].waiting.add(request)
            except Exception as error:
                self._publish(_failed(_sequences_of(request), error))
            self._second_queue.popleft()

    def _switch_second_lane(self, request: Request) -> None:
        """Replace the second lane by one that drafts as a request needs, in the same memory."""
        decoder = with_speculation(self.decoder, request.speculative)
        if request.predicted:
            decoder = decoder.replace(drafter=with_prediction(decoder.drafter), walk="auto")
        elif request.constrained:
            decoder = decoder.replace(drafter=with_forced(decoder.drafter))
        options = replace(self._second_options, places=self._places)
        memory = [one for name in [*self.lanes][1:] for one in self.lanes.pop(name).release()]
        self.lanes[self._lane_name(request)] = Lane(decoder, options, memory, self.prefixes, self.pool)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        return most_places(self.decoder, self._second_options.slots, own_trees=self._own_trees)

    def _fail_running(self, lane: Lane, error: Exception) -> Events:
        """Fail all running sequences of a lane; waiting ones will run in wiped memory."""
        _LOGGER.error("a round failed: %s: %s", type(error).__name__, error, exc_info=error)
        if self.prefixes is not None:
            self.prefixes.clear()  # to free memory, and because the failed round may have left garbage in them
        return _failed(lane.reset(), RequestError("out_of_memory" if is_about_memory(error) else "round_failed"))

    def _publish(self, events: Events) -> None:
        """Pass events to the observer and to the requests' event loops, in one call per loop."""
        with self._changed:
            current = [(request, progress) for request, progress in events if request in self._unfinished]
            for request, progress in current:
                if progress.emitted.stop_reason is not None:
                    self._unfinished[request] -= 1
                    if not self._unfinished[request]:
                        del self._unfinished[request]
            self._changed.notify_all()
        for request, progress in current:
            if self._observer is not None:
                self._observer(request, progress)
        for loop in {request.loop for request, _ in current if request.loop is not None}:
            try:
                loop.call_soon_threadsafe(_deliver, [pair for pair in current if pair[0].loop is loop])
            except RuntimeError:  # the loop is closed, so nobody is listening
                _LOGGER.debug("an event loop was closed before its answers were complete")


def _sequences_of(request: Request) -> list[tuple[Request, int]]:
    return [(request, index) for index in range(len(request.sequences))]


def _deliver(events: Events) -> None:
    for request, progress in events:
        request.events.put_nowait(progress)


def _failed(sequences: Iterable[tuple[Request, int]], error: Exception) -> Events:
    """Return the events that end failed sequences."""
    return [
        (request, Progress(index, Emitted(request.sequences[index].row, [], [], [], StopReason.FAILED), error))
        for request, index in sequences
    ]
