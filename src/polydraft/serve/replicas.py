"""Replicas on Ray Serve: a front forwards requests to replicas, which are complete servers.

``serve run polydraft.serve.replicas:application target=smollm2 replicas=2`` starts it; so does ``polydraft serve --ray``.
"""

import asyncio
import hashlib
import json
import logging
import signal
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from polydraft.described import options_in
from polydraft.errors import FailureError, first_line, unknown_name
from polydraft.loading import load_with
from polydraft.options import LoadOptions
from polydraft.serve.app import METRICS_TYPE, make_app
from polydraft.serve.cluster import cluster_with_room
from polydraft.serve.errors import RequestError, error_object, send_error
from polydraft.serve.logs import log_as
from polydraft.serve.memory import LEAST_TOKENS
from polydraft.serve.options import ReplicaOptions, ServeOptions, host_and_port
from polydraft.serve.service import Service
from polydraft.serve.streaming import disconnected, framed

_LOGGER = logging.getLogger("polydraft.serve")
_NAME, _REPLICA, _FRONT = "polydraft", "polydraft-replica", "polydraft-front"
_MOST_AT_FRONT = 4096
_PASSED = ("client", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "root_path")
_AHEAD = 8
"""Messages that a replica buffers per request, so that a client that does not read slows down only its own text."""
_TO = "replica:"
"""Prefix of a key that addresses one particular replica."""


class KeepConversations(RequestRouter):
    """Route all turns of a conversation to the replica that has it cached, by rendezvous hashing.

    Replicas are ranked by a hash of conversation and replica; if the first is full, the next one is used.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request, best first."""
        key = str(pending_request.args[0]) if pending_request is not None and pending_request.args else ""
        if key.startswith(_TO):
            return [[one for one in candidate_replicas if one.replica_id.unique_id == key.removeprefix(_TO)]]
        ranked = sorted(candidate_replicas, key=lambda one: _rank(key, one.replica_id.unique_id), reverse=True)
        return [[one] for one in ranked]


def _rank(key: str, replica: str) -> bytes:
    return hashlib.sha256(f"{key} {replica}".encode()).digest()


class Replica:
    """A server without a socket: the front hands it requests as messages.

    Parameters
    ----------
    loading, options : mapping
        Arguments of `LoadOptions` and `ServeOptions`.
    threads : int
        CPU threads to compute with.
    """

    def __init__(self, loading: Mapping[str, Any], options: Mapping[str, Any], threads: int) -> None:
        torch.set_num_threads(threads)
        settings = ServeOptions(**options)
        log_as(settings.log_format)
        self._service = Service(load_with(LoadOptions(**loading), batch=settings.slots), settings)
        self._service.scheduler.start()
        self._app = make_app(self._service)

    async def ask(self, key: str, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Yield the messages that a server would send for one request; a caller that stops iterating has disconnected."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
        left, given = asyncio.Event(), False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await self._app({**scope, "type": "http"}, receive, messages.put)
            finally:
                await messages.put(None)

        work = asyncio.create_task(answer())
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            left.set()
            while not messages.empty():  # unblock a sender that waits for space
                messages.get_nowait()
            work.cancel()

    def check_health(self) -> None:
        """Fail if the scheduler's thread has ended, so that Ray replaces this replica."""
        if not self._service.scheduler.ready:
            raise FailureError("the scheduler's thread has ended")


class Front:
    """Forward requests to replicas. The front holds no model, so it survives the loss of any replica."""

    def __init__(self, replicas: Any, options: ServeOptions) -> None:
        self._replicas, self._options = replicas.options(method_name="ask", stream=True), options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an ASGI application."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        if scope["type"] != "http":
            return
        try:
            async with asyncio.timeout(self._options.client_seconds):
                body = await _body(receive, self._options.max_body_bytes)
        except TimeoutError:
            await send_error(RequestError("request_too_slow"), send)
            return
        passed = {name: scope[name] for name in _PASSED if name in scope}
        if scope["path"] == "/metrics":
            await self._metrics(scope, passed, receive, send)
            return
        await self._forward(_conversation(body), passed, body, receive, send)

    async def _forward(self, key: str, scope: dict[str, Any], body: bytes, receive: Receive, send: Send) -> None:
        answer = self._replicas.remote(key, scope, body)
        gone, started = asyncio.create_task(disconnected(receive)), False
        work = asyncio.create_task(_relay(answer, send))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # the client has left
                answer.cancel()
                return
            started, error = work.result()
            if error is None:
                return
            _LOGGER.error("a replica did not answer: %s", first_line(error))
            lost = RequestError("replica_lost")
            if started:
                await send({"type": "http.response.body", "body": framed([error_object(lost)])})
            else:
                await send_error(lost, send, ((b"retry-after", b"1"),))
        finally:
            for task in (work, gone):
                task.cancel()

    async def _metrics(self, scope: Scope, passed: dict[str, Any], receive: Receive, send: Send) -> None:
        """Return the metrics of all replicas, each sample labelled with its replica's name."""
        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        replicas = sorted(
            name.rpartition("#")[2] for name in names if name.startswith("SERVE_REPLICA") and f"#{_REPLICA}#" in name
        )
        pages = {}
        for replica in replicas:
            parts: list[bytes] = []

            async def keep(message: Message, parts: list[bytes] = parts) -> None:
                parts.append(message.get("body", b""))

            _, error = await _relay(self._replicas.remote(f"{_TO}{replica}", passed, b""), keep)
            if error is None:
                pages[replica] = b"".join(parts).decode()
        await Response(labelled(pages), media_type=METRICS_TYPE)(scope, receive, send)


async def _relay(answer: Any, send: Send) -> tuple[bool, BaseException | None]:
    """Forward messages; return whether any came, and the error that ended them early, or None."""
    started = False
    try:
        async for message in answer:
            await send(message)
            started = True
    except Exception as error:  # whatever broke the replica or the connection to it
        return started, error
    return started, None


async def _body(receive: Receive, most: int) -> bytes:
    """Read a body. One that is too large is cut one byte above the limit, and the replica then refuses it."""
    parts, size, more = [], 0, True
    while more and size <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
    return b"".join(parts)[: most + 1]


async def _lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge startup and shutdown: the front has nothing to do for either."""
    kind = ""
    while kind != "lifespan.shutdown":
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})


def _conversation(body: bytes) -> str:
    """Return the routing key that all turns of a conversation share: a hash of its first messages, or of the prompt."""
    try:
        content = json.loads(body)
        messages = content.get("messages")
        if isinstance(messages, list):
            first = next((number for number, one in enumerate(messages) if one.get("role") == "user"), len(messages))
            return _digest(messages[: first + 1])
        return _digest(content.get("prompt"))
    except (ValueError, AttributeError, RecursionError):
        return ""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def labelled(pages: Mapping[str, str]) -> str:
    """Merge Prometheus pages: label every sample with its replica, and describe every metric once."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = line.split()[2]
            about, figures = families.setdefault(family, ([], []))
            if line.startswith("#"):
                if line not in about:
                    about.append(line)
            elif line:
                name, brace, rest = line.partition("{")
                label = f'replica="{replica}"'
                if brace:
                    figures.append(f"{name}{{{label},{rest}")
                else:
                    name, _, value = line.partition(" ")
                    figures.append(f"{name}{{{label}}} {value}")
    return "".join("\n".join([*about, *figures, ""]) for about, figures in families.values())


_fronts: list[Front] = []
"""The last one is this process's front: Ray takes a function that returns the application, not the application itself."""


def _front() -> Front:
    return _fronts[-1]


@serve.ingress(_front)
class _Ingress:
    def __init__(self, replicas: Any, options: Mapping[str, Any]) -> None:
        settings = ServeOptions(**options)
        log_as(settings.log_format)
        _fronts.append(Front(replicas, settings))


def application(arguments: Mapping[str, Any]) -> Any:
    """Return the application, for ``serve run`` and config files.

    Parameters
    ----------
    arguments : mapping
        Fields of `LoadOptions`, `ServeOptions` and `ReplicaOptions` by name; values may be strings, as from ``serve run``.
    """
    kinds = {"loading": LoadOptions, "options": ServeOptions, "replicas": ReplicaOptions}
    known = {option.name: (group, option) for group, kind in kinds.items() for option in options_in(kind) if option.has_text}
    given: dict[str, dict[str, Any]] = {group: {} for group in kinds}
    for name, value in arguments.items():
        if name not in known:
            raise unknown_name("argument", name, known)
        group, option = known[name]
        given[group][name] = option.read(value) if isinstance(value, str) else value
    replicas = ReplicaOptions(**{**given["replicas"], "ray": True})
    settings = ServeOptions(**given["options"])
    given["options"]["slot_tokens"] = settings.slot_tokens or LEAST_TOKENS  # the same for all, whatever memory they find
    LoadOptions(**given["loading"])  # refuse wrong options here, not in a remote process
    scaled: dict[str, Any] = {"num_replicas": replicas.replicas}
    if replicas.max_replicas is not None and replicas.max_replicas > replicas.replicas:
        limits = {"min_replicas": replicas.replicas, "max_replicas": replicas.max_replicas}
        scaled = {"autoscaling_config": {**limits, "target_ongoing_requests": settings.slots}}
    workers = serve.deployment(
        Replica,
        name=_REPLICA,
        max_ongoing_requests=settings.slots + settings.max_queue,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": replicas.replica_cpus, "num_gpus": replicas.replica_gpus},
        request_router_config=RequestRouterConfig(request_router_class=KeepConversations),
        health_check_period_s=2,
        **scaled,
    ).bind(given["loading"], given["options"], max(int(replicas.replica_cpus), 1))
    front = serve.deployment(
        _Ingress,
        name=_FRONT,
        max_ongoing_requests=_MOST_AT_FRONT,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(workers, given["options"])


def _until_signalled() -> None:
    """Block until SIGTERM or Ctrl-C."""
    signalled = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: signalled.set())
    while not signalled.wait(1.0):
        pass


def run_replicas(arguments: Mapping[str, Any], options: ServeOptions, replicas: ReplicaOptions, announce: Any) -> None:
    """Serve until a signal, on this machine's cluster or on a new one."""
    app = application(arguments)
    room = {"cpus": replicas.replica_cpus, "gpus": replicas.replica_gpus}
    with cluster_with_room("replica", replicas.replicas, **room), ExitStack() as at_the_end:
        at_the_end.callback(serve.shutdown)
        serve.start(http_options={"host": options.host, "port": options.port})
        serve.run(app, name=_NAME, blocking=False)
        announce(f"http://{host_and_port(options.host, options.port)}")
        _until_signalled()
        serve.delete(_NAME)  # waits for running answers; shutdown alone would cut them off
