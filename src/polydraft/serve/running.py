"""A server from its first request to its last: listening, and leaving in good order."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from polydraft.errors import FailureError
from polydraft.serve.app import make_app
from polydraft.serve.options import ServeOptions
from polydraft.serve.service import Service

_LOGGER = logging.getLogger("polydraft.serve")
_LAST_SECONDS = 5
"""For the last bytes to go out after the last token."""
_MOST_CONNECTIONS = 4096
_IDLE_SECONDS = 75
"""A connection may be idle: longer than clients and proxies keep theirs (5 to 60 seconds), so that they are the ones to close
it. A server that closes first may do so while a request is on its way, and the client sees it fail."""

Announce = Callable[[str], None]


class Server(uvicorn.Server):
    """Serves until it is told to leave, by a signal or by `leave`; then it finishes what was begun.

    While it finishes, new requests are told to ask another server. A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, listening: socket.socket, announce: Announce) -> None:
        super().__init__(config)
        self._service, self._listening, self._announce = service, listening, announce
        self._leaving: threading.Thread | None = None

    def run_until_left(self) -> None:
        """Serve."""
        self._service.scheduler.start()
        try:
            asyncio.run(self.serve(sockets=[self._listening]))
        finally:
            self._service.scheduler.drain(0.0)
            self._listening.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say where."""
        await super().startup(sockets)
        host, port = self._listening.getsockname()[:2]
        self._announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Leave in good order at the first signal, at once at the second."""
        if self._leaving is None:
            self.leave()
        else:
            self.should_exit = self.force_exit = True

    def leave(self) -> None:
        """Take nothing more on, finish what runs, and end."""
        _LOGGER.info("leaving: requests under way have %g seconds", self._service.options.drain_seconds)
        self._leaving = threading.Thread(target=self._drain, name="polydraft-drain", daemon=True)
        self._leaving.start()

    def _drain(self) -> None:
        self._service.scheduler.drain(self._service.options.drain_seconds)
        self.should_exit = True


def listen(options: ServeOptions) -> socket.socket:
    """Return a socket that listens where the options say."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=512)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        reason = (error.strerror or str(error)).partition(" (while")[0]  # Python adds the address again
        raise FailureError(f"cannot listen on {where} ({reason}); choose another --port or --host") from None


def server_of(service: Service, listening: socket.socket, announce: Announce) -> Server:
    """Return a server.

    Parameters
    ----------
    service : Service
    listening : socket
        As `listen` returns it.
    announce : callable
        Told the address once requests are taken.
    """
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_LAST_SECONDS,
        timeout_keep_alive=_IDLE_SECONDS,
    )
    return Server(config, service, listening, announce)
