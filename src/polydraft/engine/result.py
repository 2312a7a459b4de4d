"""What a generation gives back."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polydraft.engine.stats import Stats


class StopReason(StrEnum):
    """Why a text ended."""

    EOS = "eos"
    STOP = "stop"
    """A stop string, or a Hugging Face stopping criterion."""
    LENGTH = "length"
    CONTEXT = "context"
    """The model's context is full."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a stream, as soon as it is certain."""

    row: int
    token_id: int
    text: str
    """Text that became certain with this token; may be empty while a character or a stop string is incomplete."""
    source: str
    """`"target"`, or the name of the drafter that proposed it."""
    round: int
    """Which round, so which target pass, made it certain; counted from 0."""
    stop_reason: StopReason | None = None
    """Set on the last token of a row."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished text."""

    text: str
    token_ids: list[int]
    """New tokens; an end-of-text token that ended it is included."""
    sources: list[str]
    stop_reason: StopReason
    stats: Stats
    """Of the whole batch this text was made in."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it was made with, the seed included."""
