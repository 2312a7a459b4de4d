"""Responses to completion requests, whole or streamed: they end at a deadline, or when the client stops reading."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from polydraft.errors import PolydraftError
from polydraft.serve.errors import RequestError, reason_of, send_error, status_of
from polydraft.serve.protocol import CompletionRequest
from polydraft.serve.request import Progress, Request
from polydraft.serve.responses import ResponseBuilder
from polydraft.serve.service import Builds, Service

_LOGGER = logging.getLogger("polydraft.serve")
_END = {"type": "http.response.body", "body": b""}
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Clients that split a stream into lines by Unicode's rules (httpx, for one) would cut JSON at these characters."""


class ClientGoneError(Exception):
    """The client disconnected or stopped reading."""


class CompletionResponse:
    """The response to one request: an ASGI application, like Starlette's own responses."""

    def __init__(self, service: Service, wanted: CompletionRequest, build: Builds = ResponseBuilder) -> None:
        self._service, self._options, self._wanted, self._build = service, service.options, wanted, build
        self._request: Request | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond, unless the client disconnects first."""
        work = asyncio.create_task(self._respond(scope, send))
        disconnect = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not work.done()
            for task in (work, disconnect):
                task.cancel()
            outcome = (await asyncio.gather(work, disconnect, return_exceptions=True))[0]
            self._cancel()
            if left or isinstance(outcome, ClientGoneError):
                scope["state"]["reason"] = "the client left, or did not read"
                self._service.metrics.cancelled.inc()
            elif isinstance(outcome, BaseException):
                raise outcome

    def _cancel(self) -> None:
        """Free the request's slots, if it still has any."""
        if self._request is not None:
            self._service.scheduler.cancel(self._request)

    async def _respond(self, scope: Scope, send: Send) -> None:
        """Send the answer or an error. If a stream has begun, the error is its last event."""
        timeout, begun = asyncio.timeout(self._options.request_seconds), False
        try:
            async with timeout:
                key, (address, *_) = scope["state"]["client"], scope.get("client") or ("",)
                self._request, builder = await self._service.submit(self._wanted, self._build, key, address)
                events = _events(self._request, builder)
                if self._wanted.stream:
                    first = await anext(events)  # before the status is sent, so that a request that fails by then gets its own
                    await self._start(send, b"text/event-stream", (b"cache-control", b"no-store"))
                    begun = True
                    await self._stream(send, first, events, builder)
                else:
                    async for _ in events:
                        pass
                    await self._send(send, json.dumps(builder.complete(), ensure_ascii=False).encode(), whole=True)
                self._log(scope, self._request, builder)
        except ClientGoneError:
            raise
        except Exception as raised:
            self._cancel()
            error = RequestError("timed_out", seconds=self._options.request_seconds) if timeout.expired() else raised
            scope["state"]["reason"] = reason_of(error)
            if not isinstance(error, PolydraftError):
                _LOGGER.error("request %s failed", scope["state"]["request_id"], exc_info=error)
            if begun:
                scope["state"]["level"] = logging.ERROR  # the status was sent before, and says 200
                self._service.metrics.failures.labels(status=status_of(error)).inc()
                await self._send(send, framed([builder.failure(error)]))
                await send(_END)
            else:
                await send_error(error, send, self._headers(error))

    def _headers(self, error: BaseException) -> tuple[tuple[bytes, bytes], ...]:
        if isinstance(error, RequestError) and error.status in (429, 503):  # the same request may succeed later
            return ((b"retry-after", str(self._service.scheduler.retry_after()).encode()),)
        return ()

    async def _stream(self, send: Send, first: Progress, events: AsyncIterator[Progress], builder: ResponseBuilder) -> None:
        await self._send(send, framed([*builder.opening(), *builder.events(first)]))
        async for progress in events:
            await self._send(send, framed(builder.events(progress)))
        await self._send(send, framed(builder.closing()) + builder.last)
        await send(_END)

    async def _send(self, send: Send, body: bytes, *, whole: bool = False) -> None:
        """Send bytes; raise `ClientGoneError` if the client does not read them in time."""
        try:
            async with asyncio.timeout(self._options.client_seconds):
                if whole:
                    await self._start(send, b"application/json", (b"content-length", str(len(body)).encode()))
                await send({"type": "http.response.body", "body": body, "more_body": not whole})
        except (TimeoutError, OSError) as error:
            raise ClientGoneError from error

    async def _start(self, send: Send, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send the head of the response; a header says if texts get fewer tokens than requested."""
        assert self._request is not None, "it has been submitted"
        given = min(one.max_new_tokens for one in self._request.sequences)
        if given < (self._wanted.max_new_tokens or given):
            headers += ((b"x-polydraft-max-tokens", str(given).encode()),)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *headers]})

    def _log(self, scope: Scope, request: Request, builder: ResponseBuilder) -> None:
        usage, state = builder.usage, scope["state"]
        state["usage"] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        if self._options.log_texts:
            for sequence in request.sequences:
                fields = {"request_id": state["request_id"], "prompt": list(sequence.prompt), "answer": sequence.assembler.text}
                _LOGGER.info("%s prompt %r answer %r", *fields.values(), extra={"fields": fields})


async def _events(request: Request, builder: ResponseBuilder) -> AsyncIterator[Progress]:
    """Yield a request's events until all its texts have ended; raise the error of the first text that fails."""
    left = len(request.sequences)
    while left:
        progress = await request.events.get()
        if progress.error is not None:
            raise progress.error
        builder.add(progress)
        left -= progress.emitted.stop_reason is not None
        yield progress


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def framed(events: Sequence[dict[str, Any]]) -> bytes:
    """Return events in the format of a stream, named by their types if they have one."""
    names = (f"event: {event['type']}\n" if "type" in event else "" for event in events)
    data = (json.dumps(event, ensure_ascii=False).translate(_LINE_ENDS) for event in events)
    return "".join(f"{name}data: {line}\n\n" for name, line in zip(names, data, strict=True)).encode()
