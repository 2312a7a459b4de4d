"""Servers of a tiny model, on a port of their own."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import httpx
import openai
import pytest

from polydraft.engine import Decoder
from polydraft.loading import load
from polydraft.serve.app import make_app
from polydraft.serve.options import ServeOptions
from polydraft.serve.server import Server, listen
from polydraft.serve.service import Service

from .templated import marking_decoder, with_template

CLIENT = httpx.Client(verify=False, timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
"""Reading certificates for each request would take longer than most answers."""


@dataclass
class Live:
    """A server at work."""

    service: Service
    url: str
    server: Server

    @property
    def client(self) -> openai.OpenAI:
        """A client that gives up at the first error."""
        options = {"max_retries": 0, "timeout": 120, "http_client": CLIENT}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none-needed", **options)

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return CLIENT.post(self.url + path, json=body, **options)

    def idle(self) -> bool:
        """Whether nobody's text is left."""
        return not self.service.scheduler.unfinished and not self.service.scheduler.running


@contextmanager
def live(decoder: Decoder, **options: object) -> Iterator[Live]:
    """Serve in a thread of its own until the test is over."""
    logger = logging.getLogger("polydraft")
    for handler in list(logger.handlers):  # of commands that other tests ran, whose standard error is gone
        logger.removeHandler(handler)
    settings = ServeOptions(port=0, **{"slots": 3, "slot_tokens": 512, "chunk_tokens": 64, "drain_seconds": 5, **options})
    listening = listen(settings)
    service, started = Service(decoder, settings), threading.Event()
    address: list[str] = []

    def announce(url: str) -> None:
        address.append(url)
        started.set()

    server = Server(make_app(service), service, listening, announce)
    thread = threading.Thread(target=server.serve_until_drained, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield Live(service, address[0], server)
    finally:
        server.drain()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny_decoder(roomy: str) -> Decoder:
    return load(roomy, draft="early-exit:1", tree="3x2x1", dtype="float32")


@pytest.fixture(scope="session")
def shared(tiny_decoder: Decoder) -> Iterator[Live]:
    """One server for all tests that need nothing special."""
    with live(tiny_decoder) as server:
        yield server


@pytest.fixture(scope="session")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Live]]:
    """A server for each chat template that is asked for, made once."""
    with ExitStack() as stack:
        decoder = marking_decoder(tmp_path_factory.mktemp("templated"))
        yield cache(lambda name: stack.enter_context(live(with_template(decoder, name), slot_tokens=1000)))


@pytest.fixture
def serving(tiny_decoder: Decoder) -> Iterator[Callable[..., Live]]:
    """A server with settings of its own."""
    with ExitStack() as stack:
        yield lambda decoder=None, **options: stack.enter_context(live(decoder or tiny_decoder, **options))
