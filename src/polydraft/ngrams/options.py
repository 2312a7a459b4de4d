"""What can be set about n-gram caches."""

from dataclasses import dataclass
from pathlib import Path

from polydraft.errors import UsageError

MOST_ORDER = 16
"""Longest n-gram, prefix and continuation together."""


@dataclass(frozen=True, kw_only=True)
class GramOptions:
    """Settings of all n-gram caches; each reads those that concern it."""

    gram: int = 4
    """Tokens of a stored continuation: G of the Self-Draft paper."""
    max_prefix: int = 4
    """Most tokens at the text's end that the context cache matches (the paper: 1). A corpus cache brings its own."""
    entries_per_key: int = 8
    """Continuations that the context cache keeps for one prefix; the least recently seen one goes first."""
    max_keys: int = 100_000
    """Prefixes that the context cache keeps; the least recently seen one goes first."""
    shared: bool = False
    """Whether all texts share one context cache. Texts then learn from each other: only for texts of one owner."""
    max_match: int = 4
    """Most tokens at the text's end that prompt lookup matches (Hugging Face: `max_matching_ngram_size`)."""
    prefer: str = "frequent"
    """Which continuations the suffix automaton takes first: ``"frequent"`` or ``"recent"`` ones."""
    corpus: str | Path = "auto"
    """File of the corpus cache; ``"auto"`` for the one that ships with this package if it fits the tokenizer, else none."""
    fingerprint: str | None = None
    """Mark of the tokenizer (`polydraft.ngrams.tokenizer_fingerprint`); without it ``corpus="auto"`` means none."""

    def __post_init__(self) -> None:
        for name in ("gram", "max_prefix", "entries_per_key", "max_keys", "max_match"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)!r} is out of range; allowed: whole numbers from 1")
        check_order(self.max_prefix, self.gram)
        if self.prefer not in ("frequent", "recent"):
            raise UsageError(f"prefer={self.prefer!r} is unknown; allowed: frequent, recent")


def check_order(max_prefix: int, gram: int) -> None:
    """Refuse n-grams that are too long to be counted."""
    if min(max_prefix, gram) < 1 or max_prefix + gram > MOST_ORDER:
        raise UsageError(
            f"a prefix of {max_prefix} and a continuation of {gram} tokens are out of range; "
            f"allowed: 1 or more each, {MOST_ORDER} together"
        )
