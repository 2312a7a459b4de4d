"""One request on its way: its texts, what they have got, and how the asynchronous side hears of it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from polydraft.engine.sequence import Emitted, TokenSequence
from polydraft.errors import FailureError

AUTO, OFF = "auto", "off"
CONSTRAINED = "+grammar"


class UnavailableError(FailureError):
    """The server cannot do this now; the same request may succeed later."""


class BusyError(UnavailableError):
    """Too many texts wait already."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one round brought one text of a request."""

    index: int
    """Which text."""
    emitted: Emitted
    error: Exception | None = None
    """Why the text has ended, where that is not an end of its own."""


@dataclass(eq=False)
class Ticket:
    """A request's texts, and the queue by which its handler hears of them.

    The scheduler's thread calls `deliver` through the event loop; the handler awaits `next`. As many events fit as there can be
    tokens, so whoever reads slowly keeps nobody waiting.
    """

    sequences: Sequence[TokenSequence]
    speculative: str = AUTO
    """``"auto"``, ``"off"``, or a tree."""
    loop: asyncio.AbstractEventLoop | None = None
    """Whose handler waits; None for tickets that nobody listens to."""
    constrained: bool = False
    """Whether its texts follow a grammar."""
    arrived: float = field(default_factory=time.perf_counter)
    admitted: dict[int, float] = field(default_factory=dict)
    """When each text got its slot."""
    heard: dict[int, float] = field(default_factory=dict)
    """When each text got its last tokens."""
    cancelled: bool = False
    _events: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)

    @property
    def lane(self) -> str:
        """Name of those that it may share rounds with: masks from the host would keep others' rounds from being captured."""
        return self.speculative + (CONSTRAINED if self.constrained else "")

    async def next(self) -> Progress:
        """Wait for what happens next."""
        return await self._events.get()

    def deliver(self, progress: Progress) -> None:
        """Put an event into the queue; in the event loop only."""
        self._events.put_nowait(progress)
