"""Every reason for which the server refuses or fails a request, and how clients are told.

To find out why a request was refused, look up the `code` or the message of its error here; the function that builds it is
called by the check. Sampling parameters, prompts, trees and grammars are checked by the library: its message passes through
`from_library`, with the name of the parameter.
"""

import json
from collections.abc import Iterable
from typing import Any

from starlette.types import Send

from polydraft.errors import FailureError, PolydraftError, UsageError, shown, unknown_name

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_PATHS = "/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /metrics"


class RequestError(UsageError):
    """A request that the client has to change.

    Parameters
    ----------
    message : str
        For the client; it may repeat what the client sent.
    status : int
    param, code : str, optional
        Of the error object.
    reason : str, optional
        For the log, where the message repeats what the client sent; the message if not given.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.reason = status, param, code, reason or message


class UnavailableError(FailureError):
    """The server cannot do this now; the same request may succeed later."""


class BusyError(UnavailableError):
    """The queue is full."""


# Before a request reaches its handler.


def wrong_host() -> RequestError:
    """Refuse another host name where there are no API keys: a web page could get in by DNS rebinding."""
    message = "without API keys this server answers to localhost only; use that name, or start it with --api-keys"
    return RequestError(message, status=403, code="wrong_host")


def invalid_api_key() -> RequestError:
    """Refuse a request without one of the server's API keys."""
    return RequestError("no valid API key; send one as 'Authorization: Bearer KEY'", status=401, code="invalid_api_key")


def request_too_large(most: int) -> RequestError:
    """Refuse a body that is larger than ``--max-body-bytes``."""
    message = f"the request is too large; allowed: {most} bytes; shorten it, or raise --max-body-bytes"
    return RequestError(message, status=413, code="request_too_large")


def too_many_bytes() -> RequestError:
    """Refuse a body while those of other requests take all the memory that is meant for them."""
    return RequestError("too many large requests at the same time; try again later", status=429, code="too_many_bytes")


def wrong_content_type(kind: str) -> RequestError:
    """Refuse forms and plain text, which any web page may send without permission."""
    return RequestError(f"content type {shown(kind)}; allowed: application/json", status=415, code="wrong_content_type")


def unknown_path(path: str, status: int, detail: str) -> RequestError:
    """Refuse a path that does not exist, or not with this method."""
    return RequestError(f"{shown(path)}: {detail}; see {_PATHS}", status=status, reason=detail)


# The body.


def request_too_slow() -> RequestError:
    """Refuse a body that does not arrive within ``--client-seconds``."""
    return RequestError("the request took too long to arrive; send it faster", status=408, code="request_too_slow")


def not_utf8() -> RequestError:
    """Refuse a body that cannot be decoded, or has unpaired surrogates."""
    message = "the body is not UTF-8; send JSON in UTF-8, with escaped surrogates (\\ud800) in pairs"
    return RequestError(message, code="invalid_json")


def not_json(why: object) -> RequestError:
    """Refuse a body that cannot be parsed."""
    return RequestError(f"the body is not JSON ({why}); send a JSON object", code="invalid_json")


def not_an_object(example: str) -> RequestError:
    """Refuse JSON that is not an object."""
    return RequestError(f"the body is not a JSON object; send one, such as {example}", code="invalid_json")


# Parameters.


def unknown_parameter(name: str, known: Iterable[str]) -> RequestError:
    """Refuse a parameter that nobody knows: a typo, most likely."""
    return RequestError(str(unknown_name("parameter", name, known)), param=name, code="unknown_parameter")


def unsupported_parameter(name: str) -> RequestError:
    """Refuse a parameter that the API or another server has, and this server has not."""
    return RequestError(
        f"parameter {shown(name)} is not supported here; leave it out", param=name, code="unsupported_parameter"
    )


def missing_parameter(name: str, example: str) -> RequestError:
    """Refuse a request with nothing to continue."""
    return RequestError(f"{name} is missing or empty; send {example}", param=name, code="missing_parameter")


def invalid_value(name: str, value: object, allowed: str) -> RequestError:
    """Refuse a value of the wrong type, or out of range."""
    rest = f" is invalid; allowed: {allowed}"
    return RequestError(f"{name}={shown(value)}{rest}", param=name, code="invalid_value", reason=name + rest)


def conflicting_parameters(names: Iterable[str]) -> RequestError:
    """Refuse parameters that exclude each other."""
    found = list(names)
    message = f"{' and '.join(found)} cannot be combined; send one of them"
    return RequestError(message, param=found[-1], code="conflicting_parameters")


def from_library(error: UsageError, param: str | None, *, private: bool = False) -> RequestError:
    """Refuse what the library refuses; `private` if its message repeats what the client sent."""
    message = str(error) if param is None or param in str(error) else f"{param}: {error}"
    return RequestError(message, param=param, code="invalid_value", reason=f"{param} is invalid" if private else None)


def model_not_found(name: str, served: str) -> RequestError:
    """Refuse a request for another model."""
    message = f"model {shown(name)} is not served here; allowed: {served!r}, or leave it out"
    return RequestError(message, status=404, param="model", code="model_not_found")


def too_many_texts(count: int, most: int) -> RequestError:
    """Refuse a request for more texts than ``--max-choices``."""
    message = f"{count} texts in one request; allowed: at most {most} (n times prompts); send several requests"
    return RequestError(message, param="n", code="too_many_texts")


def several_prompts() -> RequestError:
    """Refuse several prompts for ``/tokenize``."""
    return RequestError("several prompts; allowed: one; send several requests", param="prompt", code="invalid_value")


def context_length_exceeded(param: str, length: str, new_tokens: int | None, most: int) -> RequestError:
    """Refuse a prompt that, with its new tokens, exceeds ``--slot-tokens`` or the model's context."""
    new = "" if new_tokens is None else f" and {new_tokens} new ones"
    message = f"a prompt of {length} tokens{new} does not fit into {most}; shorten it, or ask for fewer"
    return RequestError(message, param=param, code="context_length_exceeded")


def own_trees_off(tree: str) -> RequestError:
    """Refuse a tree where the server runs with ``--no-own-trees``."""
    message = f"speculative tree {shown(tree)}: this server runs with --no-own-trees; allowed: auto, off"
    return RequestError(message, param="speculative", code="unsupported_parameter")


def grammars_off(param: str) -> RequestError:
    """Refuse a grammar in tensor-parallel processes, which cannot share it."""
    message = f"{param} does not work where several processes share a model; leave it out"
    return RequestError(message, param=param, code="unsupported_parameter")


# The scheduler.


def queue_full(limit: int) -> BusyError:
    """Refuse a request where all slots and all places in the queue (``--max-queue``) are taken."""
    return BusyError(f"the queue is full: {limit} texts are running or waiting; try again later")


def shutting_down() -> UnavailableError:
    """Refuse new requests while the server drains."""
    return UnavailableError("the server is shutting down; ask another one, or try again later")


def stopped() -> UnavailableError:
    """End a text that is not complete when the server stops."""
    return UnavailableError("the server was stopped before the answer was complete; ask another one, or try again later")


def cancelled() -> UnavailableError:
    """End a request whose handler was cancelled."""
    return UnavailableError("the client left, or the server was stopped")


def out_of_memory() -> UnavailableError:
    """End the texts of a round that ran out of memory."""
    return UnavailableError("out of memory; try again later, with a shorter prompt, or restart the server with fewer slots")


def round_failed() -> FailureError:
    """End the texts of a round that failed in another way."""
    return FailureError("the round of this text failed; the server's log says why; try again")


def timed_out(seconds: float) -> TimeoutError:
    """End an answer that takes longer than ``--request-seconds``."""
    return TimeoutError(f"the answer was not complete after {seconds:g} seconds; ask for fewer tokens, or try again later")


def replica_lost() -> UnavailableError:
    """End an answer whose replica died."""
    return UnavailableError("the replica that wrote this answer is gone; try again")


def unforeseen() -> RuntimeError:
    """End a request whose handler failed unexpectedly."""
    return RuntimeError("this request failed; the server's log says why")


# How clients and the log are told.


def reason_of(error: BaseException) -> str:
    """Return why a request failed, for the log; unforeseen errors may quote texts, so only their type is named."""
    if isinstance(error, RequestError):
        return error.reason
    return str(error) if isinstance(error, PolydraftError | TimeoutError) else type(error).__name__


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    match error:
        case RequestError():
            return error.status
        case UsageError():
            return 400
        case BusyError():
            return 429
        case UnavailableError():
            return 503
        case TimeoutError():
            return 504
        case _:
            return 500


def error_object(error: BaseException) -> dict[str, Any]:
    """Return an error as the API has it."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    message = str(error) or type(error).__name__
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(error: BaseException) -> bytes:
    """Return an error as an event of a stream that has begun."""
    return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n"


async def send_error(error: BaseException, send: Send, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """Send an error as a whole response."""
    body = json.dumps(error_object(error)).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status_of(error), "headers": head})
    await send({"type": "http.response.body", "body": body})
