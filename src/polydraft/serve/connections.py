"""Connections: where they come in, how many there may be, and how long clients may keep them for nothing."""

import asyncio
import heapq
import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from polydraft.errors import FailureError
from polydraft.serve.options import ServeOptions, host_and_port

_LOGGER = logging.getLogger("polydraft.serve")
_MOST_CONNECTIONS = 4096
_PAUSE_SECONDS = 1.0
"""Between two attempts to let somebody in when the system refuses."""
_QUIET_SECONDS = 60.0
"""Between two lines of the log that say the same."""


class Connection(H11Protocol):
    """A connection that knows for how long it has been its client's turn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since = time.monotonic()
        """When it became the client's turn: to send a request, or to read an answer."""
        self._begun, self._unsent = True, 0
        """Whether a request is due: a new connection's first, or one that has begun to arrive."""

    @property
    def working(self) -> bool:
        """Whether it is the server's turn, or about to be: a request's head is here, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()

    @property
    def spare(self) -> bool:
        """Whether it may be closed where there are too many: nobody computes for it."""
        return not self.transport.is_closing() and (not self.working or self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; a head that begins has its time from here, whatever follows."""
        super().data_received(data)
        begun = not self.working
        if begun and not self._begun:
            self.since = time.monotonic()
        self._begun = begun

    def on_response_complete(self) -> None:
        """Let the client have its turn."""
        self.since = time.monotonic()
        super().on_response_complete()

    def is_overdue(self, now: float, seconds: float) -> bool:
        """Whether the client neither completes a request's head nor reads its answer; bodies have a deadline elsewhere."""
        if self.working:
            return False
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:  # nothing is added any more: the client reads
            self._unsent, self.since = unsent, now
        return (self._begun or unsent > 0) and now - self.since > seconds


class Door:
    """Let connections in, as many as there may be, and close those whose clients take too long.

    Where all are taken, a new one takes the place of those that have waited for their clients the longest: whoever holds
    connections without using them shuts nobody out.

    Parameters
    ----------
    listening : socket
        As `listen` returns it.
    make : callable
        Makes a connection.
    connections : set of Connection
        Those that are open.
    seconds : float
        That a client may take.
    """

    def __init__(
        self, listening: socket.socket, make: Callable[[], Connection], connections: set[Connection], seconds: float
    ) -> None:
        self._listening, self._make, self._connections, self._seconds = listening, make, connections, seconds
        self._most = most_connections()
        self._told: dict[str, float] = {}

    async def let_in(self) -> None:
        """Let connections in until cancelled."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        while True:
            try:
                line, _ = await loop.sock_accept(self._listening)
                if len(self._connections) >= self._most:
                    self._make_room()
                await loop.connect_accepted_socket(self._make, line)
            except ConnectionError:  # whoever knocked has left
                continue
            except Exception as error:  # too many open files, most often; one connection's fault must not close the door
                self._tell(f"cannot let connections in ({error}); trying again every {_PAUSE_SECONDS:g} seconds")
                await asyncio.sleep(_PAUSE_SECONDS)

    async def watch(self) -> None:
        """Close connections whose clients take too long, until cancelled."""
        while True:
            await asyncio.sleep(min(self._seconds / 4, 1.0))
            now = time.monotonic()
            overdue = [one for one in self._connections if one.is_overdue(now, self._seconds)]
            for one in overdue:
                one.transport.abort()  # closing would wait until the client has read what is left
            if overdue:
                _LOGGER.info(
                    "closed %d connections: no request, or an answer unread, for %g seconds", len(overdue), self._seconds
                )

    def _make_room(self) -> None:
        """Close those that have waited the longest, several at once: to look for them takes time. Others are told "503"."""
        spare = [one for one in self._connections if one.spare]
        for one in heapq.nsmallest(max(self._most // 64, 1), spare, key=lambda one: one.since):
            one.transport.abort()
        self._tell(f"all {self._most} connections are taken; new ones take the place of idle ones")

    def _tell(self, what: str) -> None:
        """Say something once in a while, however often it happens."""
        now = time.monotonic()
        if now - self._told.get(what, -_QUIET_SECONDS) >= _QUIET_SECONDS:
            self._told[what] = now
            _LOGGER.warning("%s", what)


def most_connections() -> int:
    """Return how many connections may be open: half of the files that this process may open, so that others get theirs."""
    if sys.platform == "win32":  # there is no such limit
        return _MOST_CONNECTIONS
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if files < 0 else max(min(_MOST_CONNECTIONS, files // 2), 1)


def listen(options: ServeOptions) -> socket.socket:
    """Return a socket that listens where the options say."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listening = socket.create_server((options.host, options.port), family=family, backlog=512)
    except OSError as error:
        where = host_and_port(options.host, options.port)
        reason = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address again
        raise FailureError(f"cannot listen on {where} ({reason}); choose another --port or --host") from None
    # Connections inherit it. asyncio would set it for each, but not where a socket was made without naming its protocol; and
    # without it the body of an answer waits 40 ms until the client has acknowledged the head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
