"""The HTTP server: a limit on connections, deadlines for slow clients, and an orderly shutdown.

This module does not import torch, so that the command finds a port in use before it loads anything.
"""

import asyncio
import heapq
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from polydraft.errors import FailureError
from polydraft.serve.options import ServeOptions, host_and_port

if TYPE_CHECKING:
    from polydraft.serve.service import Service

_LOGGER = logging.getLogger("polydraft.serve")
_MOST_CONNECTIONS = 4096
_PAUSE_SECONDS = 1.0
"""Pause before accepting connections again, if the system refuses them."""
_QUIET_SECONDS = 60.0
"""Least time between two identical warnings in the log."""
_FLUSH_SECONDS = 5
"""Time for the last bytes to be sent after the last token."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients and proxies keep idle connections (5 to 60 seconds), so that they close them first. A server that closes
first may do so while a request is on its way, and that request fails."""

Announce = Callable[[str], None]


def listen(options: ServeOptions) -> socket.socket:
    """Return a socket that listens at the host and port of the options."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listening = socket.create_server((options.host, options.port), family=family, backlog=512)
    except OSError as error:
        where = host_and_port(options.host, options.port)
        reason = (error.strerror or str(error)).partition(" (while")[0]  # Python repeats the address
        raise FailureError(f"cannot listen on {where} ({reason}); choose another --port or --host") from None
    # Accepted connections inherit TCP_NODELAY. Without it, an answer's body waits 40 ms until the client has acknowledged the
    # head. asyncio sets it as well, but only on sockets that were created with an explicit protocol.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class Connection(H11Protocol):
    """A connection that knows how long it has been waiting for its client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since = time.monotonic()
        """When it began to wait for the client to send a request or to read an answer."""
        self._expecting, self._unsent = True, 0
        """Whether the deadline for a request runs: on a new connection, or once a request has begun to arrive."""

    @property
    def busy(self) -> bool:
        """Whether a request's head has arrived and its answer is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing()

    @property
    def evictable(self) -> bool:
        """Whether it may be closed to make room for another: nothing is being computed for it."""
        return not self.transport.is_closing() and (not self.busy or self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; the deadline for a request's head starts at its first byte."""
        super().data_received(data)
        expecting = not self.busy
        if expecting and not self._expecting:
            self.since = time.monotonic()
        self._expecting = expecting

    def on_response_complete(self) -> None:
        """Note the time: the connection waits for the client again."""
        self.since = time.monotonic()
        super().on_response_complete()

    def is_overdue(self, now: float, seconds: float) -> bool:
        """Whether a request's head has been incomplete, or an answer unread, for too long; bodies have their own deadline."""
        if self.busy:
            return False
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:  # the answer is complete, so a change means that the client is reading
            self._unsent, self.since = unsent, now
        return (self._expecting or unsent > 0) and now - self.since > seconds


class Listener:
    """Accept connections up to a limit, and close those whose clients take too long.

    At the limit, a new connection replaces those that have waited longest for their clients, so idle connections lock no one
    out.

    Parameters
    ----------
    listening : socket
        What `listen` returned.
    make : callable
        Returns a new connection.
    connections : set of Connection
        All open connections.
    seconds : float
        How long a client may take.
    """

    def __init__(
        self, listening: socket.socket, make: Callable[[], Connection], connections: set[Connection], seconds: float
    ) -> None:
        self._listening, self._make, self._connections, self._seconds = listening, make, connections, seconds
        self._most = most_connections()
        self._warned: dict[str, float] = {}

    async def accept(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
                if len(self._connections) >= self._most:
                    self._evict()
                await loop.connect_accepted_socket(self._make, accepted)
            except ConnectionError:  # the client has left already
                continue
            except Exception as error:  # usually too many open files; the server must go on
                self._warn(f"cannot accept connections ({error}); trying again every {_PAUSE_SECONDS:g} seconds")
                await asyncio.sleep(_PAUSE_SECONDS)

    async def close_overdue(self) -> None:
        """Close connections whose clients take too long, until cancelled."""
        while True:
            await asyncio.sleep(min(self._seconds / 4, 1.0))
            now = time.monotonic()
            overdue = [one for one in self._connections if one.is_overdue(now, self._seconds)]
            for one in overdue:
                one.transport.abort()  # close() would wait until the client has read the rest
            if overdue:
                _LOGGER.info(
                    "closed %d connections: no request, or an answer unread, for %g seconds", len(overdue), self._seconds
                )

    def _evict(self) -> None:
        """Close the connections that have waited longest, several at once because the search is slow.

        If none can be closed, uvicorn answers the new one with a 503.
        """
        evictable = [one for one in self._connections if one.evictable]
        for one in heapq.nsmallest(max(self._most // 64, 1), evictable, key=lambda one: one.since):
            one.transport.abort()
        self._warn(f"all {self._most} connections are taken; new ones replace idle ones")

    def _warn(self, text: str) -> None:
        """Log a warning, unless the same one was logged recently."""
        now = time.monotonic()
        if now - self._warned.get(text, -_QUIET_SECONDS) >= _QUIET_SECONDS:
            self._warned[text] = now
            _LOGGER.warning("%s", text)


def most_connections() -> int:
    """Return the limit on connections: at most half of the files that this process may open."""
    if sys.platform == "win32":  # which has no such limit
        return _MOST_CONNECTIONS
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if files < 0 else max(min(_MOST_CONNECTIONS, files // 2), 1)


class Server(uvicorn.Server):
    """Serve until a signal or `drain`, then finish the running requests.

    While draining, new requests get a 503. A second signal stops the server after the current round, and unfinished answers end
    with an error.

    Parameters
    ----------
    app : ASGI application
        The application of the service.
    service : Service
    listening : socket
        What `listen` returned.
    announce : callable
        Called with the address once connections are accepted.
    """

    def __init__(self, app: ASGIApp, service: "Service", listening: socket.socket, announce: Announce) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                limit_concurrency=most_connections() + 1,  # reached only if none of them can be evicted
                timeout_graceful_shutdown=_FLUSH_SECONDS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )
        self._scheduler, self._options = service.scheduler, service.options
        self._listening, self._announce = listening, announce
        self._draining = self._hurrying = False
        self._tasks: list[asyncio.Task[None]] = []

    def serve_until_drained(self) -> None:
        """Serve, and return once all requests have ended."""
        self._scheduler.start()
        if not self._scheduler.ready:
            _LOGGER.info("warming up; /ready says when requests are answered")
        try:
            asyncio.run(self.serve(sockets=[self._listening]))
        finally:
            self._scheduler.drain(0.0)
            self._listening.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and announce the address."""
        await super().startup([])  # without sockets: asyncio's own accept has no limit, and floods the log when files run out
        connections = cast(set[Connection], self.server_state.connections)
        make = partial(Connection, self.config, self.server_state, self.lifespan.state)
        listener = Listener(self._listening, make, connections, self._options.client_seconds)
        self._tasks = [asyncio.create_task(listener.accept()), asyncio.create_task(listener.close_overdue())]
        self._announce(f"http://{host_and_port(*self._listening.getsockname()[:2])}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and close the open ones."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end unfinished answers at the second, and exit at once at the third."""
        if not self._draining:
            self.drain()
        elif not (self._hurrying or self.should_exit):
            self._hurrying = True
            _LOGGER.info("shutting down at once: running requests end with an error")
            self._drain_within(0.0)
        else:
            self.should_exit = self.force_exit = True

    def drain(self) -> None:
        """Refuse new requests, finish running ones, and exit."""
        seconds = self._options.drain_seconds
        _LOGGER.info("shutting down: running requests have %g seconds to finish", seconds)
        self._draining = True
        self._drain_within(seconds)

    def _drain_within(self, seconds: float) -> None:
        def drain() -> None:
            self._scheduler.drain(seconds)
            self.should_exit = True

        threading.Thread(target=drain, name="polydraft-drain", daemon=True).start()
