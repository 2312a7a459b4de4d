"""Lines of the server's log: each in one line, with its time and level, whatever clients sent; as text or as JSON."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

TEXT, JSON = "text", "json"
_LOGGERS = {"polydraft": logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.WARNING}
"""Who writes, from which level on."""
_UNQUOTED = "/:@!$&'()*+,;=~[]"
_LONGEST = {"client": 64, "method": 16, "path": 200, "reason": 300}
"""Characters of what clients may have chosen."""


def request_line(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a line of the log says of a request, within limits.

    Parameters
    ----------
    fields : mapping
        As `Guard` collects them; what is None is left out.
    """
    told = {name: value for name, value in fields.items() if value is not None}
    told |= {name: quote(told[name], safe=_UNQUOTED, errors="replace") for name in ("client", "path") if name in told}
    return told | {name: _brief(told[name], most) for name, most in _LONGEST.items() if name in told}


def as_text(told: Mapping[str, Any]) -> str:
    """Return the line about a request for people."""
    tokens = f" {told['prompt_tokens']}+{told['completion_tokens']} tokens" if "completion_tokens" in told else ""
    reason = f": {told['reason']}" if "reason" in told else ""
    head = f"{told.get('client', '-')} {told['request_id']} {told['method']} {told['path']} {told['status']}"
    return f"{head} {told['seconds']:.3f}s{tokens}{reason}"


class TextLines(logging.Formatter):
    """Time, level, message; what is not printable is written out, and tracebacks are indented: nobody can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        lines = [f"{_time(record)} {record.levelname} {_printable(record.getMessage().strip())}"]
        if record.exc_info:
            lines += [f"    {_printable(line)}".rstrip() for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """One JSON object per line, with a request's fields by name."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        fields = getattr(record, "fields", None)
        told = {"time": _time(record), "level": record.levelname.lower()} | (fields or {"message": record.getMessage().strip()})
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def log_as(style: str) -> None:
    """Write the log to standard error from here on, in a format: ``"text"`` or ``"json"``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if style == JSON else TextLines())
    for name, level in _LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)


@contextmanager
def logging_as(style: str) -> Iterator[None]:
    """Write the log as `log_as` does, until the end of the context."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    log_as(style)
    try:
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _printable(text: str) -> str:
    """Write out what would break a line, move a cursor or turn the direction of reading."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _brief(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
