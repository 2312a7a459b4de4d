"""How answers reach clients: in one piece or as a stream, while somebody reads, and no longer than they may take."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive, Scope, Send

from polydraft.errors import PolydraftError
from polydraft.serve.answers import Answer
from polydraft.serve.errors import error_object, reason_of
from polydraft.serve.guard import refuse
from polydraft.serve.protocol import Asked
from polydraft.serve.service import Service
from polydraft.serve.ticket import BusyError, Progress, Ticket, UnavailableError

_LOGGER = logging.getLogger("polydraft.serve")
_DONE = b"data: [DONE]\n\n"


class GoneError(Exception):
    """The client has left, or does not read."""


class Delivery:
    """Answer one request; an ASGI application.

    Parameters
    ----------
    service : Service
    asked : Asked
    """

    def __init__(self, service: Service, asked: Asked) -> None:
        self._service, self._asked = service, asked
        self._ticket: Ticket | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves before."""
        work = asyncio.create_task(self._deliver(scope, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = not work.done()
            for task in (work, gone):
                task.cancel()
            outcome = (await asyncio.gather(work, gone, return_exceptions=True))[0]
            if self._ticket is not None and (left or isinstance(outcome, BaseException)):
                self._service.leave(self._ticket)
            if left or isinstance(outcome, GoneError):
                scope["state"]["reason"] = "the client left, or did not read"
                self._service.metrics.cancelled.inc()
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _deliver(self, scope: Scope, send: Send) -> None:
        """Send the answer, or what went wrong as long as nothing was sent."""
        timeout = asyncio.timeout(self._service.options.request_seconds)
        started = False
        try:
            async with timeout:
                self._ticket, answer = await self._service.submit(self._asked)
                events = self._events(self._ticket, answer)
                if self._asked.stream:
                    first = await anext(events)
                    await _start(send, b"text/event-stream", (b"cache-control", b"no-store"))
                    started = True
                    await self._stream(send, first, events, answer)
                else:
                    async for _ in events:
                        pass
                    await self._send(send, json.dumps(answer.whole(), ensure_ascii=False).encode(), whole=True)
                self._log(scope, answer)
        except GoneError:
            raise
        except Exception as error:
            if self._ticket is not None:
                self._service.leave(self._ticket)
            told = TimeoutError(_slow(self._service.options.request_seconds)) if timeout.expired() else error
            scope["state"]["reason"] = reason_of(told)
            if not isinstance(told, PolydraftError | TimeoutError):  # nobody foresaw it
                _LOGGER.error("request %s failed", scope["state"]["request_id"], exc_info=told)
            if started:
                scope["state"]["level"] = logging.ERROR  # the status says that all is well
                await self._send(send, b"data: " + json.dumps(error_object(told)).encode() + b"\n\n")
                await send({"type": "http.response.body", "body": b""})
            else:
                await refuse(told, send, self._headers(told))

    def _headers(self, error: BaseException) -> tuple[tuple[bytes, bytes], ...]:
        if isinstance(error, BusyError | UnavailableError):
            return ((b"retry-after", str(self._service.scheduler.retry_after()).encode()),)
        return ()

    async def _events(self, ticket: Ticket, answer: Answer) -> AsyncIterator[Progress]:
        """Give out what happens until all texts have ended; raise what went wrong with any of them."""
        left = len(ticket.sequences)
        while left:
            progress = await ticket.next()
            if progress.error is not None:
                raise progress.error
            answer.take(progress)
            left -= progress.emitted.stop_reason is not None
            yield progress

    async def _stream(self, send: Send, first: Progress, events: AsyncIterator[Progress], answer: Answer) -> None:
        opening = b"".join(map(_event, answer.opening()))
        await self._send(send, opening + _event(answer.chunk(first)))
        async for progress in events:
            await self._send(send, _event(answer.chunk(progress)))
        closing = _event(answer.closing()) if self._asked.include_usage else b""
        await self._send(send, closing + _DONE)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, body: bytes, *, whole: bool = False) -> None:
        """Send bytes, as long as the client takes them in time."""
        try:
            async with asyncio.timeout(self._service.options.client_seconds):
                if whole:
                    await _start(send, b"application/json", (b"content-length", str(len(body)).encode()))
                await send({"type": "http.response.body", "body": body, "more_body": not whole})
        except (TimeoutError, OSError) as error:
            raise GoneError from error

    def _log(self, scope: Scope, answer: Answer) -> None:
        usage, state = answer.usage, scope["state"]
        state["usage"] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        if self._service.options.log_texts and self._ticket is not None:
            for sequence in self._ticket.sequences:
                told = {"request_id": state["request_id"], "prompt": list(sequence.prompt), "answer": sequence.assembler.text}
                _LOGGER.info("%s prompt %r answer %r", *told.values(), extra={"fields": told})


async def _start(send: Send, kind: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *headers]})


def _slow(seconds: float) -> str:
    return f"the answer was not complete after {seconds:g} seconds; ask for fewer tokens, or later"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
