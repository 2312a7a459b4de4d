"""What every request passes first: names for it, limits, keys, and one line in the log."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polydraft.serve.errors import RequestError, error_object, reason_of, status_of
from polydraft.serve.logs import as_text, request_line
from polydraft.serve.metrics import Metrics
from polydraft.serve.options import ServeOptions, host_and_port, is_local
from polydraft.serve.ticket import UnavailableError

_LOGGER = logging.getLogger("polydraft.serve")
_OPEN_PATHS = ("/", "/health", "/ready")
"""Paths that need no key: they tell nothing."""
_MOST_DIGITS = 20
"""Of a length: Python does not read numbers of thousands of them."""
_LEFT = 499
"""What proxies write into their logs for clients that left before there was an answer."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """Check every request before it reaches the application, and say how it went.

    Parameters
    ----------
    app : ASGI application
    options : ServeOptions
    metrics : Metrics
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._bodies = _Bodies(options.max_body_bytes * (options.slots + options.max_queue))
        self._keys = [_digest(key) for key in options.read_keys()]
        if risk := options.risk_of_keys():
            _LOGGER.warning("%s", risk)
        self._local = is_local(options.host) and not self._keys
        """Whether only this machine is served, and nobody shows a key: then pages of others must not get in by a trick."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        wished = headers.get("x-request-id", "")
        name = wished if _REQUEST_ID.fullmatch(wished) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = name
        start, status, reason = time.perf_counter(), 0, None

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name.encode())]
            await send(message)

        body = _Limited(receive, self._options.max_body_bytes, self._bodies)
        try:
            self._check(scope["path"], scope["method"], headers)
            await self._app(scope, body, named_send)
        except RequestError as error:
            reason = reason_of(error)
            if status:  # too late to say so
                raise
            await refuse(error, named_send)
        except asyncio.CancelledError:  # uvicorn would print where the request was
            reason = "the client left, or the server was stopped"
            if not status:
                await refuse(UnavailableError(reason), named_send)
        except Exception as error:
            status, reason = status or 500, reason_of(error)
            raise
        finally:
            self._bodies.held -= body.read
            if status >= 400:
                self._metrics.failures.labels(status=status).inc()
            self._log(scope, status=status or _LEFT, seconds=round(time.perf_counter() - start, 6), reason=reason)

    def _log(self, scope: Scope, *, status: int, seconds: float, reason: str | None) -> None:
        """Say how a request went: a line for all that is known of it."""
        state, client = scope["state"], scope.get("client")
        told = request_line(
            {
                "client": None if client is None else host_and_port(*client),
                "request_id": state["request_id"],
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": seconds,
                "reason": reason or state.get("reason"),
                **state.get("usage", {}),
            }
        )
        level = logging.ERROR if status >= 500 else logging.WARNING if status >= 400 else logging.INFO
        _LOGGER.log(state.get("level", level), "%s", as_text(told), extra={"fields": told})

    def _check(self, path: str, method: str, headers: MutableMapping[str, str]) -> None:
        host = _host(headers.get("host", ""))
        if self._local and host and not is_local(host):
            raise RequestError(
                "this server answers to localhost only; use that name, or start it with --api-keys",
                status=403,
                code="wrong_host",
            )
        if method == "OPTIONS":
            return
        if self._keys and path not in _OPEN_PATHS:
            self._check_key(headers.get("authorization", ""))
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > self._options.max_body_bytes:
            raise _too_large(self._options.max_body_bytes)
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        # Pages of others may send forms and plain text without being asked first, but no JSON.
        if method == "POST" and kind != "application/json":
            raise RequestError(f"content type {kind!r}; allowed: application/json", status=415, code="wrong_content_type")

    def _check_key(self, given: str) -> None:
        scheme, _, key = given.partition(" ")
        digest = _digest(key.strip())
        # Digests of equal length, compared one and all: how long it takes tells nothing.
        known = sum(hmac.compare_digest(digest, own) for own in self._keys)
        if scheme.lower() != "bearer" or not known:
            raise RequestError("no valid API key; send one as 'Authorization: Bearer KEY'", status=401, code="invalid_api_key")


@dataclass
class _Bodies:
    """Bytes of all requests' bodies: at most those of as many requests as there may be texts."""

    most: int
    held: int = 0


class _Limited:
    """Hand on a request's body as long as it is not too large, whatever its header said, and there is room for it."""

    def __init__(self, receive: Receive, most: int, bodies: _Bodies) -> None:
        self._receive, self._most, self._bodies, self.read = receive, most, bodies, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        size = len(message.get("body", b""))
        self.read += size
        self._bodies.held += size
        if self.read > self._most:
            raise _too_large(self._most)
        if self._bodies.held > self._bodies.most:
            raise RequestError("too many large requests at the same time; come back later", status=429, code="too_many_bytes")
        return message


def _too_large(most: int) -> RequestError:
    return RequestError(f"the request is too large; allowed: {most} bytes", status=413, code="request_too_large")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _host(header: str) -> str:
    """Return the host of a header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


async def refuse(error: Exception, send: Send, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """Answer with an error."""
    body = json.dumps(error_object(error)).encode()
    start: dict[str, Any] = {"type": "http.response.start", "status": status_of(error)}
    start["headers"] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send(start)
    await send({"type": "http.response.body", "body": body})
