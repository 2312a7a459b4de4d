"""A server from its first request to its last: listening, and leaving in good order."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import cast

import uvicorn

from polydraft.serve.app import make_app
from polydraft.serve.connections import Connection, Door, most_connections
from polydraft.serve.options import host_and_port
from polydraft.serve.service import Service

_LOGGER = logging.getLogger("polydraft.serve")
_LAST_SECONDS = 5
"""For the last bytes to go out after the last token."""
_IDLE_SECONDS = 75
"""A connection may be idle: longer than clients and proxies keep theirs (5 to 60 seconds), so that they are the ones to close
it. A server that closes first may do so while a request is on its way, and the client sees it fail."""

Announce = Callable[[str], None]


class Server(uvicorn.Server):
    """Serves until it is told to leave, by a signal or by `leave`; then it finishes what was begun.

    While it finishes, new requests are told to ask another server. A second signal ends it at once: after the
    round under way, unfinished answers end with an error.
    """

    def __init__(self, config: uvicorn.Config, service: Service, listening: socket.socket, announce: Announce) -> None:
        super().__init__(config)
        self._service, self._listening, self._announce = service, listening, announce
        self._leaving: threading.Thread | None = None
        self._hurrying = False
        self._at_door: list[asyncio.Task[None]] = []

    def run_until_left(self) -> None:
        """Serve."""
        self._service.scheduler.start()
        if not self._service.scheduler.ready:
            _LOGGER.info("warming up; /ready says when requests are answered")
        try:
            asyncio.run(self.serve(sockets=[self._listening]))
        finally:
            self._service.scheduler.drain(0.0)
            self._listening.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let connections in, and say where."""
        await super().startup([])  # not by asyncio: where files run out, it fills the log, and it knows no limit
        connections = cast(set[Connection], self.server_state.connections)
        door = Door(self._listening, self._connection, connections, self._service.options.client_seconds)
        self._at_door = [asyncio.create_task(door.let_in()), asyncio.create_task(door.watch())]
        self._announce(f"http://{host_and_port(*self._listening.getsockname()[:2])}")

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nobody in any more, and end connections in good order."""
        for task in self._at_door:
            task.cancel()
        await asyncio.gather(*self._at_door, return_exceptions=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Leave in good order at the first signal, telling who is not done at the second, and without a word at the third."""
        if self._leaving is None:
            self.leave()
        elif not (self._hurrying or self.should_exit):
            self._hurrying = True
            _LOGGER.info("leaving at once: requests under way are told so")
            self._finish(0.0)
        else:
            self.should_exit = self.force_exit = True

    def leave(self) -> None:
        """Take nothing more on, finish what runs, and end."""
        seconds = self._service.options.drain_seconds
        _LOGGER.info("leaving: requests under way have %g seconds", seconds)
        self._leaving = self._finish(seconds)

    def _finish(self, seconds: float) -> threading.Thread:
        def drain() -> None:
            self._service.scheduler.drain(seconds)
            self.should_exit = True

        thread = threading.Thread(target=drain, name="polydraft-drain", daemon=True)
        thread.start()
        return thread


def server_of(service: Service, listening: socket.socket, announce: Announce) -> Server:
    """Return a server.

    Parameters
    ----------
    service : Service
    listening : socket
        As `polydraft.serve.connections.listen` returns it.
    announce : callable
        Told the address once requests are taken.
    """
    config = uvicorn.Config(
        make_app(service),
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=most_connections() + 1,  # reached where not one of them is idle
        timeout_graceful_shutdown=_LAST_SECONDS,
        timeout_keep_alive=_IDLE_SECONDS,
    )
    return Server(config, service, listening, announce)
