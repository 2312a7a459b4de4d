"""The paths of the API."""

import asyncio
import json
import re
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polydraft.errors import PolydraftError, shown, unknown_name
from polydraft.serve.delivery import Delivery
from polydraft.serve.errors import RequestError, error_object, reason_of, status_of, too_slow
from polydraft.serve.guard import Guard
from polydraft.serve.protocol import Asked, read_request
from polydraft.serve.service import Service

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAGE_RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Paths:
    """What each path does."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Any:
        """Continue a conversation."""
        return Delivery(self._service, read_request(await self._body(request), chat=True))

    async def completions(self, request: Request) -> Any:
        """Continue texts."""
        return Delivery(self._service, read_request(await self._body(request), chat=False))

    async def _body(self, request: Request) -> Any:
        try:
            async with asyncio.timeout(self._service.options.client_seconds):
                body = await request.body()
        except TimeoutError:
            raise too_slow() from None
        try:
            found = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
            if _SURROGATE.search(body):  # halves of characters: no text, and nothing that we could answer with
                json.dumps(found, ensure_ascii=False).encode()
        except UnicodeError:
            raise RequestError(
                "the body is not UTF-8; send JSON in UTF-8, and halves of characters (\\ud800) in pairs"
            ) from None
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON ({error}); send a JSON object", code="invalid_json") from None
        return found

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the one model."""
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model,
            "object": "model",
            "created": 0,
            "owned_by": "polydraft",
            "max_model_len": service.slot_tokens,
            "drafter": service.decoder.drafter.name,
            "lossless": service.decoder.lossless,
        }

    async def tokenize(self, request: Request) -> Response:
        """Turn text, or a conversation, into tokens."""
        body = await self._body(request)
        if not isinstance(body, dict):
            raise RequestError('the body is not a JSON object; send {"prompt": "..."} or {"messages": [...]}')
        for name in body:
            if name not in ("prompt", "messages", "model"):
                raise RequestError(str(unknown_name("parameter", name, ("prompt", "messages", "model"))), param=name)
        asked: Asked = read_request(body, chat="messages" in body)
        self._service.check_model(asked.model)
        return Response(await self._service.tokenized(asked), media_type="application/json")

    async def health(self, request: Request) -> Response:
        """Say that the process is there."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Say whether requests are taken."""
        ready = self._service.scheduler.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Show figures."""
        return Response(self._service.metrics.text(), media_type=_METRICS_TYPE)

    async def page(self, request: Request) -> Response:
        """Show a page to talk to the model."""
        text = resources.files("polydraft.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"content-security-policy": _PAGE_RULES, "x-content-type-options": "nosniff"})


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = RequestError(_known(request.url.path, error), status=error.status_code, reason=error.detail)
    request.scope["state"]["reason"] = reason_of(error)
    return JSONResponse(error_object(error), status_code=status_of(error))


def _known(path: str, error: HTTPException) -> str:
    return f"{shown(path)}: {error.detail}; see /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /metrics"


async def _broken(request: Request, error: Exception) -> Response:
    request.scope["state"]["reason"] = reason_of(error)
    return JSONResponse(error_object(RuntimeError("this request failed; the server's log says why")), status_code=500)


def make_app(service: Service) -> ASGIApp:
    """Return the application of a service."""
    paths, post, get = Paths(service), ["POST"], ["GET"]
    app: ASGIApp = Starlette(
        routes=[
            Route("/v1/chat/completions", paths.chat, methods=post),
            Route("/v1/completions", paths.completions, methods=post),
            Route("/v1/models", paths.models, methods=get),
            Route("/v1/models/{name:path}", paths.model, methods=get),
            Route("/tokenize", paths.tokenize, methods=post),
            Route("/health", paths.health, methods=get),
            Route("/ready", paths.ready, methods=get),
            Route("/metrics", paths.metrics, methods=get),
            Route("/", paths.page, methods=get),
        ],
        exception_handlers={PolydraftError: _told, HTTPException: _told, Exception: _broken},
    )
    app = Guard(app, service.options, service.metrics)
    if service.options.cors:
        app = CORSMiddleware(
            app,
            allow_origins=service.options.cors,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients add their own, and a page that may call may say what it likes
            expose_headers=("retry-after", "x-request-id"),
            allow_private_network=True,  # browsers ask before pages of the internet call this machine
        )
    return app
