"""What every request passes first: request id, limits and API keys; and its line in the log."""

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polydraft.errors import shown
from polydraft.serve.errors import RequestError, reason_of, send_error
from polydraft.serve.logs import as_text, request_fields
from polydraft.serve.metrics import Metrics
from polydraft.serve.options import ServeOptions, host_and_port, is_local

_LOGGER = logging.getLogger("polydraft.serve")
_OPEN_PATHS = re.compile(r"/(health|ready|page/[^/]+)?")
"""Paths that need no API key, as they reveal nothing."""
_MOST_DIGITS = 20
"""Most digits of a content length: Python refuses to parse thousands."""
_CLIENT_CLOSED_REQUEST = 499
"""The status that proxies log for clients that left before an answer."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class AdmissionMiddleware:
    """Check every request before it reaches the application, and log its outcome."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self.held_bytes, self.most_held_bytes = 0, options.max_body_bytes * (options.slots + options.max_queue)
        """Bytes of the bodies of all requests, and how many are allowed."""
        self._keys = [_digest(key) for key in options.read_keys()]
        if warning := options.key_file_warning():
            _LOGGER.warning("%s", warning)
        self._checks_host = is_local(options.host) and not self._keys
        """Without keys, only requests for a local host name are served: this stops DNS rebinding by web pages."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        wanted = headers.get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        start, status, reason = time.perf_counter(), 0, None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        body = _LimitedBody(receive, self, self._options.max_body_bytes)
        try:
            self._check(scope["path"], scope["method"], headers)
            scope["state"]["client"] = _digest(_key(headers)).hex() if self._keys else ""
            await self._app(scope, body, send_with_id)
        except RequestError as error:
            reason = reason_of(error)
            if status:  # the response has begun
                raise
            await send_error(error, send_with_id)
        except asyncio.CancelledError:  # not raised again: uvicorn would log a traceback
            cancelled = RequestError("cancelled")
            reason = str(cancelled)
            if not status:
                await send_error(cancelled, send_with_id)
        except Exception as error:
            status, reason = status or 500, reason_of(error)
            raise
        finally:
            self.held_bytes -= body.read
            if status >= 400:
                self._metrics.failures.labels(status=status).inc()
            seconds = round(time.perf_counter() - start, 6)
            self._log(scope, status=status or _CLIENT_CLOSED_REQUEST, seconds=seconds, reason=reason)

    def _log(self, scope: Scope, *, status: int, seconds: float, reason: str | None) -> None:
        """Write the request's line. Handlers leave `reason`, `usage` and `level` in the scope's state."""
        state, client = scope["state"], scope.get("client")
        fields = request_fields(
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
        _LOGGER.log(state.get("level", level), "%s", as_text(fields), extra={"fields": fields})

    def _check(self, path: str, method: str, headers: Mapping[str, str]) -> None:
        host = _host(headers.get("host", ""))
        if self._checks_host and host and not is_local(host):
            raise RequestError("wrong_host")
        if method == "OPTIONS":
            return
        if self._keys and not _OPEN_PATHS.fullmatch(path) and not self._has_key(headers):
            raise RequestError("invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > self._options.max_body_bytes:
            raise RequestError("request_too_large", most=self._options.max_body_bytes)
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise RequestError("wrong_content_type", kind=shown(kind))

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        scheme = headers.get("authorization", "").partition(" ")[0]
        digest = _digest(_key(headers))
        # All digests are compared, each in constant time: the time taken reveals nothing.
        matches = sum(hmac.compare_digest(digest, known) for known in self._keys)
        return scheme.lower() == "bearer" and matches > 0


class _LimitedBody:
    """Receive a request's body, up to its own limit (whatever its header said) and that of all bodies."""

    def __init__(self, receive: Receive, all_bodies: AdmissionMiddleware, most: int) -> None:
        self._receive, self._all, self._most, self.read = receive, all_bodies, most, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        size = len(message.get("body", b""))
        self.read += size
        self._all.held_bytes += size
        if self.read > self._most:
            raise RequestError("request_too_large", most=self._most)
        if self._all.held_bytes > self._all.most_held_bytes:
            raise RequestError("too_many_bytes")
        return message


def _key(headers: Mapping[str, str]) -> str:
    return headers.get("authorization", "").partition(" ")[2].strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _host(header: str) -> str:
    """Return the host of a header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header
