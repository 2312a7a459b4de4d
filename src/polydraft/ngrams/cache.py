"""The one interface of everything that proposes tokens from text that was seen before, and its options."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from polydraft.errors import UsageError
from polydraft.registry import Registry

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


class Match(NamedTuple):
    """A continuation, and how much of the text's end it was found by."""

    prefix: int
    """Tokens at the end of the text that were matched: the more, the likelier the continuation."""
    tokens: Sequence[int]
    """What came next where they stood before; at least one token."""


Way = tuple[int, float]
"""A token that may come next, and the chance that it does."""


class GramMemory(ABC):
    """What was seen of one text (one row of a batch, one conversation).

    Proposals depend on what was read and learnt before, and on nothing else, so that verification by one draw from the
    target's law per node of the merged trie stays exact (candidates may depend on anything past, never on the random
    numbers of the round that verifies them).
    """

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Append certain text: the prompt first, then whatever is emitted."""

    def learn(self, tokens: Sequence[int]) -> None:  # noqa: B027 (most memories have no use for it)
        """Take note of an n-gram that is no part of the text, such as a draft branch and its continuation."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the text and everything learnt, for another conversation."""

    @abstractmethod
    def matches(self, count: int, length: int) -> list[Match]:
        """Return up to `count` different continuations of the text, best first, each of 1 to `length` tokens."""

    @abstractmethod
    def end(self) -> Any:
        """Return the place where the text ends, as `step` and `ways` want it; good until something is read or learnt."""

    @abstractmethod
    def step(self, place: Any, token: int) -> Any:
        """Return the place one token further, as if the text went on with it."""

    @abstractmethod
    def ways(self, place: Any, width: int) -> Sequence[Way]:
        """Return up to `width` different tokens that may come next at a place, with their chances, best matches first."""

    def propose(self, count: int, length: int) -> list[Sequence[int]]:
        """Return the tokens of `matches`."""
        return [match.tokens for match in self.matches(count, length)]


class GramCache(ABC):
    """A kind of memory, free of any one text; what several memories may share, such as a corpus, is loaded once here."""

    name: ClassVar[str]

    def __init__(self, options: GramOptions) -> None:
        self._options = options

    @property
    def is_empty(self) -> bool:
        """Whether its memories will never propose anything: a corpus cache without a corpus."""
        return False

    @abstractmethod
    def open(self) -> GramMemory:
        """Return the memory of a new text."""


GRAM_CACHES: Registry[Callable[[GramOptions], GramCache]] = Registry("n-gram cache")
"""Ways to make a cache, by name; each is fit for every n-gram drafter, and all are tested by being here."""
