"""Requests in the scheduler: their sequences, their events, and the order in which they get slots."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polydraft.engine.sequence import Emitted, TokenSequence

AUTO, OFF = "auto", "off"
_GRAMMAR = "+grammar"


@dataclass(frozen=True, slots=True)
class Progress:
    """What one round added to one sequence of a request."""

    index: int
    """Which sequence."""
    emitted: Emitted
    error: Exception | None = None
    """Why the sequence failed, if it did."""


@dataclass(eq=False)
class Request:
    """A request's sequences, and the queue of events that its handler reads.

    The scheduler's thread calls `deliver` through the event loop; the handler awaits `next`. The queue is unbounded (a sequence
    has at most one event per token), so a slow reader never blocks the scheduler.
    """

    sequences: Sequence[TokenSequence]
    speculative: str = AUTO
    """``"auto"``, ``"off"``, or a tree."""
    loop: asyncio.AbstractEventLoop | None = None
    """Event loop of the handler; None if nobody listens."""
    constrained: bool = False
    """Whether its sequences follow a grammar."""
    arrived: float = field(default_factory=time.perf_counter)
    admitted: dict[int, float] = field(default_factory=dict)
    """When each sequence got its slot."""
    last_emitted: dict[int, float] = field(default_factory=dict)
    """When each sequence got its last tokens."""
    cancelled: bool = False
    _events: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)

    @property
    def lane(self) -> str:
        """Name of the lane that it needs: a grammar's masks come from the host, and would keep rounds from being captured."""
        return self.speculative + (_GRAMMAR if self.constrained else "")

    async def next(self) -> Progress:
        """Wait for the next event."""
        return await self._events.get()

    def deliver(self, progress: Progress) -> None:
        """Add an event; call it in the event loop only."""
        self._events.put_nowait(progress)


class SlotQueue:
    """Sequences that wait for slots. The next slot goes to the request that holds the fewest.

    So a request of many sequences yields the next free slot to a request that has none, but always keeps at least one. Ties go
    to the request that has waited longest since it arrived, or since its last turn.
    """

    def __init__(self) -> None:
        self._waiting: dict[Request, list[int]] = {}
        """Indices of waiting sequences, by request; requests in the order of their turns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: Request) -> None:
        """Queue all sequences of a request."""
        self._waiting[request] = list(range(len(request.sequences)))

    def next(self, held: Mapping[Request, int]) -> tuple[Request, int]:
        """Take the next sequence out, given how many slots each request holds."""
        request = min(self._waiting, key=lambda one: held.get(one, 0))
        index, *rest = self._waiting.pop(request)
        if rest:
            self._waiting[request] = rest
        return request, index

    def remove(self, request: Request) -> list[tuple[Request, int]]:
        """Take all sequences of a request out."""
        return [(request, index) for index in self._waiting.pop(request, ())]

    def clear(self) -> list[tuple[Request, int]]:
        """Take everything out."""
        return [pair for request in tuple(self._waiting) for pair in self.remove(request)]
