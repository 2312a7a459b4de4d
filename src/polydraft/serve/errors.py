"""Every error that the server returns, with its status and its JSON.

To find out why a request failed, look up the `code` of its error below, then search for the check that raises it
(`invalid_value` is raised in many places: search for the words of its message). The library itself checks sampling
parameters, prompts, trees and grammars; `from_library` passes its messages on.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Send

from polydraft.errors import PolydraftError, UsageError, shown, unknown_name

_ERRORS = {
    # Before a request reaches its handler: `middleware`, `app`.
    "wrong_host": (403, "without API keys this server answers to localhost only; use that name, or start it with --api-keys"),
    "invalid_api_key": (401, "no valid API key; send one as 'Authorization: Bearer KEY'"),
    "request_too_large": (413, "the request is too large; allowed: {most} bytes; shorten it, or raise --max-body-bytes"),
    "too_many_bytes": (429, "too many large requests at the same time; try again later"),
    "wrong_content_type": (415, "content type {kind}; allowed: application/json; set the header Content-Type"),
    "not_found": (404, "no path {path}; see {paths}"),
    "not_served": (404, "{path} is not served here: this server generates text and stores nothing; its paths: {paths}"),
    "method_not_allowed": (405, "{method} is not allowed for {path}; see {paths}"),
    # The body: `app`.
    "request_too_slow": (408, "the request took too long to arrive; send it faster"),
    "invalid_utf8": (400, "the body is not UTF-8; send JSON in UTF-8, with escaped surrogates (\\ud800) in pairs"),
    "invalid_json": (400, "the body is not a JSON object ({why}); send one, such as {example}"),
    # Parameters: `protocol`, and `service` for what depends on the model.
    "unknown_parameter": (400, "{message}"),
    "unsupported_parameter": (400, "parameter {name} is not supported {where}; leave it out"),
    "missing_parameter": (400, "{name} is missing or empty; send {example}"),
    "invalid_value": (400, "{message}"),
    "conflicting_parameters": (400, "{names} cannot be combined; send one of them"),
    "model_not_found": (404, "model {name} is not served here; allowed: {served}, or leave it out"),
    "tools_unknown": (
        400,
        "this model's chat template {why}; force a call with tool_choice \"required\" or a function's name, or leave tools out",
    ),
    "too_many_texts": (400, "{count} texts in one request; allowed: at most {most} (n times prompts); send several requests"),
    "context_length_exceeded": (
        400,
        "a prompt of {length} tokens leaves no room for new ones in {most} (--slot-tokens of this server); shorten it",
    ),
    # The scheduler, and answers that end early: `scheduler`, `streaming`, `replicas`.
    "queue_full": (429, "the queue is full: {limit} texts are running or waiting; try again later"),
    "shutting_down": (503, "the server is shutting down; ask another one, or try again later"),
    "stopped": (503, "the server was stopped before the answer was complete; ask another one, or try again later"),
    "cancelled": (503, "the client left, or the server was stopped"),
    "out_of_memory": (503, "out of memory; try again later, shorten the prompt, or restart the server with fewer slots"),
    "replica_lost": (503, "the replica that wrote this answer is gone; try again"),
    "timed_out": (504, "the answer was not complete after {seconds:g} seconds; ask for fewer tokens, or try again later"),
    "round_failed": (500, "the round of this text failed; the server's log says why; try again"),
    "unexpected": (500, "this request failed unexpectedly; the server's log says why"),
}
"""Status and message by code."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(PolydraftError):
    """A request that was refused or that failed.

    Parameters
    ----------
    code : str
        Key of the table above.
    param : str, optional
        The wrong parameter.
    reason : str, optional
        What the log says instead, if the message repeats what the client sent.
    **values
        Fill the placeholders of the message.
    """

    def __init__(self, code: str, *, param: str | None = None, reason: str | None = None, **values: object) -> None:
        self.status, message = _ERRORS[code]
        super().__init__(message.format(**values))
        self.code, self.param, self.reason = code, param, reason or str(self)

    def rename(self, names: Mapping[str, str]) -> None:
        """Replace names of parameters by those that the client used."""
        for name, other in names.items():
            self.args, self.reason = (str(self).replace(name, other),), self.reason.replace(name, other)
        self.param = names.get(self.param or "", self.param)


def invalid_value(name: str, value: object, allowed: str) -> RequestError:
    """Return the error for a value of the wrong type, or out of range."""
    rest = f" is invalid; allowed: {allowed}"
    return RequestError("invalid_value", param=name, message=f"{name}={shown(value)}{rest}", reason=name + rest)


def missing(name: str, example: str) -> RequestError:
    """Return the error for a parameter that is missing or empty."""
    return RequestError("missing_parameter", param=name, name=name, example=example)


def unknown_parameter(name: str, allowed: Iterable[str]) -> RequestError:
    """Return the error for a parameter that no API has."""
    return RequestError("unknown_parameter", param=name, message=unknown_name("parameter", name, allowed))


def unsupported(name: str, where: str = "here", reason: str | None = None) -> RequestError:
    """Return the error for a parameter that the API or another server has, but this one does not."""
    return RequestError("unsupported_parameter", param=name, reason=reason, name=shown(name), where=where)


def from_library(error: UsageError, param: str | None, *, private: bool = False) -> RequestError:
    """Pass on an error of the library; with `private`, keep its message, which repeats what the client sent, out of the log."""
    message = str(error) if param is None or param in str(error) else f"{param}: {error}"
    return RequestError("invalid_value", param=param, message=message, reason=f"{param} is invalid" if private else None)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return 400 if isinstance(error, UsageError) else 500


def reason_of(error: BaseException) -> str:
    """Return why a request failed, for the log. Unexpected errors may quote texts, so only their type is logged."""
    if isinstance(error, RequestError):
        return error.reason
    return str(error) if isinstance(error, PolydraftError) else type(error).__name__


def error_object(error: BaseException) -> dict[str, Any]:
    """Return an error in the API's format. Unexpected errors may quote texts, so clients are only referred to the log."""
    if not isinstance(error, PolydraftError):
        error = RequestError("unexpected")
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


async def send_error(error: BaseException, send: Send, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """Send an error as a complete response."""
    body = json.dumps(error_object(error)).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status_of(error), "headers": head})
    await send({"type": "http.response.body", "body": body})
