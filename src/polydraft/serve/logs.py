"""The server's log, as text or JSON: one line per event, which no client can break or forge."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

_LEVELS = {"": logging.WARNING, "polydraft": logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.WARNING}
"""Lowest level written, by logger. The root logger writes all lines, so that other libraries' look like ours."""
_UNQUOTED = "/:@!$&'()*+,;=~[]"
_LONGEST = {"client": 64, "method": 16, "path": 200, "reason": 300}
"""Most characters of the fields that clients choose."""


def request_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request's line, without those that are None; what clients chose is quoted and cut."""
    given = {name: value for name, value in fields.items() if value is not None}
    given |= {name: quote(given[name], safe=_UNQUOTED, errors="replace") for name in ("client", "path") if name in given}
    return given | {name: _cut(given[name], most) for name, most in _LONGEST.items() if name in given}


def as_text(fields: Mapping[str, Any]) -> str:
    """Return a request's line as text."""
    tokens = f" {fields['prompt_tokens']}+{fields['completion_tokens']} tokens" if "completion_tokens" in fields else ""
    reason = f": {fields['reason']}" if "reason" in fields else ""
    head = f"{fields.get('client', '-')} {fields['request_id']} {fields['method']} {fields['path']} {fields['status']}"
    return f"{head} {fields['seconds']:.3f}s{tokens}{reason}"


class TextLines(logging.Formatter):
    """Time, level, message. Unprintable characters are escaped and tracebacks indented, so nobody can forge a line."""

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
        line = {"time": _time(record), "level": record.levelname.lower()} | (fields or {"message": record.getMessage().strip()})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as(style: str) -> None:
    """Write the log to standard error from now on, as ``"text"`` or as ``"json"``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    for name, level in _LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers[:] = [logging.NullHandler()] if name else [handler]  # commands add handlers to loggers without any
        logger.setLevel(level)
    logging.captureWarnings(True)


@contextmanager
def logging_as(style: str) -> Iterator[None]:
    """Write the log as `log_as` does, until the block ends."""
    loggers = [logging.getLogger(name) for name in _LEVELS]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    log_as(style)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _printable(text: str) -> str:
    """Escape characters that break the line, move the cursor or reverse the reading direction."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
