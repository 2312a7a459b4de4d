"""What comes in by standard input."""

import sys
from typing import TextIO

from polydraft.errors import UsageError


def standard_input() -> TextIO:
    """Return standard input, refusing one that is closed."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; give the text as an argument, or by a file or a pipe")
    return sys.stdin


def read_all() -> str:
    """Return all of it."""
    try:
        return standard_input().read()
    except UnicodeDecodeError as error:
        raise not_text(error) from None


def read_line() -> str | None:
    """Return the next line, or None at the end; one that is no text spoils none before it."""
    source = standard_input()
    if not hasattr(source, "buffer"):
        return source.readline() or None
    # Text streams decode many lines at a time.
    try:
        line: str = source.buffer.readline().decode(source.encoding)
    except UnicodeDecodeError as error:
        raise not_text(error) from None
    return line or None


def not_text(error: UnicodeDecodeError) -> UsageError:
    """Say that what came in is no text."""
    where = f"at byte {error.start} of what was read"
    return UsageError(f"standard input is not valid {error.encoding} ({where}); give it in UTF-8")
