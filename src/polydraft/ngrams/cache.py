"""The one interface of everything that proposes tokens from text that was seen before."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from polydraft.ngrams.options import GramOptions
from polydraft.registry import Registry


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

    @property
    def is_empty(self) -> bool:
        """Whether its memories will never propose anything: a corpus cache without a corpus."""
        return False

    @abstractmethod
    def open(self) -> GramMemory:
        """Return the memory of a new text."""


GRAM_CACHES: Registry[Callable[[GramOptions], GramCache]] = Registry("n-gram cache")
"""Ways to make a cache, by name; each is fit for every n-gram drafter, and all are tested by being here."""
