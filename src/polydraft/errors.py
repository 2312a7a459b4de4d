"""All errors that polydraft raises on purpose.

::

    PolydraftError
    ├── UsageError (also ValueError)        the caller asked for something impossible; the command line exits with 2
    └── FailureError (also RuntimeError)    the request was fine, but the work failed; the command line exits with 1

A message is one line: what is wrong, which value, what is allowed, what to do.
"""

import difflib
import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeVar

Member = TypeVar("Member", bound=StrEnum)

_MOST_SHOWN = 80
"""Most characters of a wrong value that a message shows."""
_MOST_SAID = 200
"""Most characters of another library's error that a message shows."""


class PolydraftError(Exception):
    """Root of all errors raised by this package."""


class UsageError(PolydraftError, ValueError):
    """An option, name or prompt that cannot be used as given."""


class FailureError(PolydraftError, RuntimeError):
    """Work that failed although the request was fine."""


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the most similar allowed name first."""
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UsageError(f"unknown {kind} {shown(name)}; {hint}allowed: {', '.join(names)}")


def member(kind: type[Member], what: str, value: Any) -> Member:
    """Return the member of an enumeration with this value, or raise an error that lists all values."""
    try:
        return kind(value)
    except ValueError:
        raise unknown_name(what, str(value), [one.value for one in kind]) from None


def shown(value: Any) -> str:
    """Return a wrong value for a message: on one line, and cut if it is long."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print very long numbers
        return f"a number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def first_line(error: BaseException, *, kind: bool = False) -> str:
    """Return the first line of an error's message, or its type if there is no message.

    If the first line ends in a colon, the second is added. With `kind`, the type always comes first: errors of transformers or
    of a user's module often make no sense without it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:_MOST_SAID]
    name = type(error).__name__
    if not said:
        return name
    return f"{name}: {said}" if kind else said


def duration(seconds: float) -> str:
    """Return a time in a convenient unit, for a message."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def check_ranges(options: object, ranges: Iterable[tuple[str, float, float]]) -> None:
    """Refuse options that are out of range, with infinity for "as many as you like"; messages name their flags."""
    for name, low, high in ranges:
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            allowed = f"{low} to {high}" if high < math.inf else f"whole numbers from {low}"
            raise UsageError(f"--{name.replace('_', '-')} {shown(value)} is out of range; allowed: {allowed}")
