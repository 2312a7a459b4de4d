"""The routes of the API."""

import asyncio
import json
import re
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polydraft.errors import PolydraftError, shown
from polydraft.serve.errors import RequestError, error_object, reason_of, status_of, unknown_parameter
from polydraft.serve.middleware import AdmissionMiddleware
from polydraft.serve.protocol import read_request
from polydraft.serve.response_api import read_response_request
from polydraft.serve.service import Service
from polydraft.serve.streaming import CompletionResponse

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CHAT_PATH = "/v1/chat/completions"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATHS = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /tokenize, /metrics"
_ELSEWHERE = re.compile(
    "/v1/(embeddings|audio|images|videos|moderations|rerank|score|files|uploads|batches|fine_tuning|assistants|threads|vector_stores"
    "|conversations|realtime|responses)(/|$)"
)
"""Paths of the OpenAI API that this server does not serve."""
_EXAMPLE = '{"prompt": "..."} or {"messages": [...]}'
_TOKENIZE_NAMES = ("prompt", "messages", "tools", "model")
_PAGE_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # after an upgrade, all files must be of the same version
}


class Handlers:
    """One handler per route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def complete(self, request: Request) -> Any:
        """Continue a conversation, or texts."""
        chat, most = request.scope["path"].endswith(_CHAT_PATH), self._service.options.max_choices
        return CompletionResponse(self._service, read_request(await self._body(request), chat=chat, max_choices=most))

    async def responses(self, request: Request) -> Any:
        """Continue a conversation, in the format of the newer API."""
        return CompletionResponse(self._service, *read_response_request(await self._body(request)))

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._service.options.client_seconds):
                body = await request.body()
        except TimeoutError:
            raise RequestError("request_too_slow") from None
        try:
            content = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
            if _SURROGATE.search(body):  # unpaired surrogates parse, but cannot be tokenized or sent back
                json.dumps(content, ensure_ascii=False).encode()
        except UnicodeError:
            raise RequestError("invalid_utf8") from None
        except (ValueError, RecursionError) as error:
            raise RequestError("invalid_json", why=error, example=_EXAMPLE) from None
        if not isinstance(content, dict):
            raise RequestError("invalid_json", why=f"it is a {type(content).__name__}", example=_EXAMPLE)
        return content

    async def models(self, request: Request) -> Response:
        """List the model under each of its names."""
        return JSONResponse({"object": "list", "data": list(map(self._model, self._service.names))})

    async def model(self, request: Request) -> Response:
        """Describe the model under one of its names."""
        name = request.path_params["name"]
        self._service.check_model(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "polydraft",
            "max_model_len": service.slot_tokens,
            "drafter": service.decoder.drafter.name,
            "lossless": service.decoder.lossless,
        }

    async def tokenize(self, request: Request) -> Response:
        """Tokenize a text or a conversation."""
        body = await self._body(request)
        for name in body:
            if name not in _TOKENIZE_NAMES:
                raise unknown_parameter(name, _TOKENIZE_NAMES)
        wanted = read_request(body, chat="messages" in body)
        return Response(await self._service.tokenize(wanted), media_type="application/json")

    async def health(self, request: Request) -> Response:
        """Report that the process is up."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report whether requests are accepted."""
        ready = self._service.scheduler.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Return all metrics for Prometheus."""
        return Response(self._service.metrics.text(), media_type=METRICS_TYPE)

    async def page(self, request: Request) -> Response:
        """Return the chat page, or one of its files."""
        files = {one.name: one for one in resources.files("polydraft.serve").joinpath("page").iterdir()}
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404)
        kind = _PAGE_KINDS[name.rpartition(".")[2]]
        return Response(files[name].read_bytes(), media_type=kind, headers=_PAGE_HEADERS)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        missing = "not_served" if _ELSEWHERE.match(request.url.path) else "not_found"
        code = "method_not_allowed" if error.status_code == 405 else missing
        names = {"path": shown(request.url.path), "method": request.method, "paths": _PATHS}
        error = RequestError(code, reason=error.detail, **names)
    request.scope["state"]["reason"] = reason_of(error)
    return JSONResponse(error_object(error), status_code=status_of(error))


def make_app(service: Service) -> ASGIApp:
    """Return the ASGI application of a service, middleware included."""
    handlers, post, get = Handlers(service), ["POST"], ["GET"]
    app: ASGIApp = Starlette(
        routes=[
            Route(_CHAT_PATH, handlers.complete, methods=post),
            Route("/v1/completions", handlers.complete, methods=post),
            Route("/v1/responses", handlers.responses, methods=post),
            Route("/v1/models", handlers.models, methods=get),
            Route("/v1/models/{name:path}", handlers.model, methods=get),
            Route("/tokenize", handlers.tokenize, methods=post),
            Route("/health", handlers.health, methods=get),
            Route("/ready", handlers.ready, methods=get),
            Route("/metrics", handlers.metrics, methods=get),
            Route("/", handlers.page, methods=get),
            Route("/page/{name}", handlers.page, methods=get),
        ],
        exception_handlers=dict.fromkeys((PolydraftError, HTTPException, Exception), _error_response),
    )
    app = AdmissionMiddleware(app, service.options, service.metrics)
    if service.options.cors:
        app = CORSMiddleware(
            app,
            allow_origins=service.options.cors,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients add their own
            expose_headers=("retry-after", "x-request-id", "x-polydraft-max-tokens"),
            allow_private_network=True,  # browsers ask before a public page calls a private address
        )
    return app
