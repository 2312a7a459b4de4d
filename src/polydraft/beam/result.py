"""What beams give back."""

from dataclasses import dataclass, field
from typing import Any

from polydraft.engine import Stats, StopReason
from polydraft.errors import FailureError


@dataclass(frozen=True, slots=True)
class ScoredText:
    """One finished text with its exact log-probabilities."""

    text: str
    """Cut before its stop string, if one ended it."""
    token_ids: list[int]
    """New tokens; the one that ended it, by itself or by completing a stop string, is included."""
    log_probs: list[float]
    """The target's own log-probability of each of them, before temperature, truncation and penalties."""
    sources: list[str]
    stop_reason: StopReason
    score: float | None = None
    """What beams are ranked by: the sum of their tokens' scores over length to the power of the length penalty."""

    @property
    def log_prob(self) -> float:
        """The target's log-probability of the whole text."""
        return sum(self.log_probs)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "log_probs": self.log_probs,
            "log_prob": self.log_prob,
            "score": self.score,
            "sources": self.sources,
            "stop_reason": self.stop_reason.value,
        }


@dataclass(frozen=True, slots=True)
class BeamGeneration:
    """The finished texts of one prompt, best first."""

    texts: list[ScoredText]
    stats: Stats
    settings: dict[str, Any] = field(default_factory=dict)
    """What they were made with, the seed included."""

    @property
    def best(self) -> ScoredText:
        """The first of them."""
        if not self.texts:
            raise FailureError("there is no text: decoding was cancelled before its first token")
        return self.texts[0]
