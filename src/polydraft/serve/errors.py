"""What goes wrong with a request, as clients of the API expect to be told."""

from typing import Any

from polydraft.errors import PolydraftError, UsageError
from polydraft.serve.ticket import BusyError, UnavailableError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(UsageError):
    """A request that is refused; `reason` is for the log, where the message may repeat what the client wrote."""

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


def too_slow() -> RequestError:
    """Return what is said of a body that does not come."""
    return RequestError("the request took too long to arrive; send it faster", status=408)


def reason_of(error: BaseException) -> str:
    """Return why a request failed, for the log; of errors that nobody foresaw only the name, as they may hold texts."""
    if isinstance(error, RequestError):
        return error.reason
    return str(error) if isinstance(error, PolydraftError | TimeoutError) else type(error).__name__


def status_of(error: BaseException) -> int:
    """Return the HTTP status that an error means."""
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
    """Return the object that stands for an error in an answer."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    message = str(error) or type(error).__name__
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
