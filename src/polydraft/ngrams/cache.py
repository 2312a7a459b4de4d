"""Interface and options of all n-gram caches, and the probabilities of their proposals."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from polydraft.errors import UsageError
from polydraft.registry import Registry
from polydraft.sampling import SamplingParams

if TYPE_CHECKING:
    from polydraft.ngrams.tables import CorpusTables

MOST_ORDER = 16
"""Longest n-gram, prefix and continuation together."""


@dataclass(frozen=True, kw_only=True)
class GramOptions:
    """Settings of all n-gram caches; each cache reads its own."""

    gram: int = 4
    """Tokens of a stored continuation: G of the Self-Draft paper."""
    max_prefix: int = 4
    """Longest prefix, at the text's end, that the context cache matches (the paper: 1). A corpus cache comes with its own."""
    entries_per_key: int = 8
    """Continuations that the context cache keeps per prefix; the least recently seen one is dropped first."""
    max_keys: int = 100_000
    """Prefixes that the context cache keeps; the least recently seen one is dropped first."""
    branches_only: bool = False
    """Whether the context cache learns only from draft branches and proposes single stored continuations, as in the paper;
    if not, it also learns from the text, and chains continuations."""
    max_match: int = 4
    """Longest match, at the text's end, of prompt lookup (Hugging Face: `max_matching_ngram_size`)."""
    prefer: str = "frequent"
    """Continuations that the suffix automaton prefers: ``"frequent"`` or ``"recent"`` ones."""
    corpus: str | Path = "auto"
    """File of the corpus cache; ``"auto"`` for the shipped one, if it was made with this tokenizer."""
    fingerprint: str | Callable[[], str] | None = None
    """The tokenizer's `polydraft.ngrams.tokenizer_fingerprint`, or a function that returns it; without it, ``"auto"`` finds no
    corpus."""

    def __post_init__(self) -> None:
        for name in ("gram", "max_prefix", "entries_per_key", "max_keys", "max_match"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)!r} is out of range; allowed: whole numbers from 1")
        check_order(self.max_prefix, self.gram)
        if self.prefer not in ("frequent", "recent"):
            raise UsageError(f"prefer={self.prefer!r} is unknown; allowed: frequent, recent")


def check_order(max_prefix: int, gram: int) -> None:
    """Refuse n-grams that are too long to count."""
    if min(max_prefix, gram) < 1 or max_prefix + gram > MOST_ORDER:
        raise UsageError(
            f"a prefix of {max_prefix} and a continuation of {gram} tokens are out of range; "
            f"allowed: 1 or more each, {MOST_ORDER} together"
        )


class Match(NamedTuple):
    """A continuation of the text, and how long the match was that found it."""

    prefix: int
    """Tokens at the text's end that matched: the more, the likelier the continuation."""
    tokens: Sequence[int]
    """The tokens that followed the match, at least one."""


Way = tuple[int, float]
"""A possible next token and its probability."""


class GramMemory(ABC):
    """A cache's memory of one text (one row of a batch, one conversation).

    Proposals depend only on what was read and learnt before, never on the random numbers of the round that verifies them. So it
    is exact to verify them by one draw from the target's distribution per node of the merged trie.

    A *place* is a position in the memory, of whatever type suits it: `end` returns that of the text's end, `step` moves on by
    a token, and `ways` lists the next tokens. Places are valid until something is read or learnt.
    """

    @abstractmethod
    def read(self, tokens: Sequence[int]) -> None:
        """Append text: first the prompt, then emitted tokens."""

    def learn(self, tokens: Sequence[int]) -> None:  # noqa: B027 (most memories do not need it)
        """Learn an n-gram that is not part of the text, such as a draft branch and its continuation."""

    def expect(self, params: SamplingParams) -> None:  # noqa: B027
        """Take what a request says about the rest of the text: a prediction, or a grammar."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the text and everything learnt."""

    @abstractmethod
    def end(self) -> Any:
        """Return the place of the text's end."""

    @abstractmethod
    def step(self, place: Any, token: int) -> Any:
        """Return the place after one more token."""

    @abstractmethod
    def ways(self, place: Any, width: int) -> Sequence[Way]:
        """Return up to `width` possible next tokens at a place with their probabilities, best matches first."""


class ContinuationMemory(GramMemory):
    """A memory that also lists whole continuations, which Self-Draft's rule needs."""

    @abstractmethod
    def matches(self, count: int, length: int) -> list[Match]:
        """Return up to `count` different continuations of the text, best first, each of 1 to `length` tokens."""


_USUAL = GramOptions()


class GramCache(ABC):
    """Opens memories of one kind, and holds what they share, such as a corpus."""

    name: ClassVar[str]
    has_tensors: bool = False
    """Whether a device can find the proposals itself, by `longest_match` or `tables`."""
    longest_match: int = 0
    """Longest match, at the text's end, that a device looks for in the text; 0 if it does not search the text."""

    def __init__(self, options: GramOptions = _USUAL) -> None:
        self._options = options

    def tables(self, nodes: int, depth: int, device: torch.device) -> "CorpusTables | None":
        """Return tables for look-ups on a device, with up to `nodes` candidates per place; None if there are none."""
        return None

    @property
    def is_empty(self) -> bool:
        """Whether its memories never propose anything, such as those of a corpus cache without a corpus."""
        return False

    @abstractmethod
    def open(self) -> GramMemory:
        """Return the memory of a new text."""


GRAM_CACHES: Registry[Callable[[GramOptions], GramCache]] = Registry("n-gram cache")
"""All caches by name. Every n-gram drafter accepts each of them, and tests cover all that are registered."""


Step = tuple[float, int, int]
"""An edge of a node: its cost, at least 0 (minus the logarithm of its share, or its rank), token, and next node."""

_BY_MATCH = (
    (0.25, 0.06, 0.05, 0.03),
    (0.56, 0.08, 0.05, 0.05),
    (0.72, 0.14, 0.10, 0.05),
    (0.80, 0.14, 0.10, 0.05),
    (0.83, 0.14, 0.10, 0.05),
    (0.86, 0.14, 0.10, 0.05),
    (0.88, 0.14, 0.10, 0.05),
    (0.94, 0.14, 0.10, 0.05),
)
"""Hit rates of matches in the text, by rank; a row each for matches of 1, 2, 3, 4, 5, 6 to 7, 8 to 11 and more tokens. The last
column is for all higher ranks."""
_MATCH_ROWS = (0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7)
_BY_SHARE = (
    ((0.05, 0.09, 0.16, 0.19, 0.20, 0.21, 0.27, 0.35, 0.40, 0.50), (0.02, 0.08, 0.10), (0.015, 0.03)),
    ((0.04, 0.07, 0.18, 0.24, 0.38, 0.40, 0.45, 0.58, 0.65, 0.75), (0.05, 0.12, 0.16, 0.22), (0.03, 0.06, 0.12)),
    ((0.11, 0.13, 0.28, 0.35, 0.40, 0.55, 0.60, 0.67, 0.85, 0.92), (0.05, 0.12, 0.25, 0.30), (0.05, 0.07, 0.20)),
)
"""Hit rates of matches in a corpus: for matches of 1, 2 and more tokens, by rank (0, 1, more), and by how often, in tenths,
the token follows the match."""


def match_chance(size: int, rank: int) -> float:
    """Return the probability of a token that followed the text's last `size` tokens before, if `rank` others are better."""
    row = _BY_MATCH[_MATCH_ROWS[size] if size < len(_MATCH_ROWS) else -1]
    return row[rank] if rank < len(row) else row[-1]


def ways_by_match(found: Iterable[tuple[int, int]], width: int) -> list[Way]:
    """Return up to `width` different tokens, given matches, best first: how many tokens match, and the token that follows."""
    ways: dict[int, float] = {}
    for size, token in found:
        if token not in ways:
            ways[token] = match_chance(size, len(ways))
            if len(ways) == width:
                break
    return list(ways.items())


def share_chance(size: int, rank: int, share: float) -> float:
    """Return the probability of a token that follows a `share` of the occurrences of the last `size` tokens in a corpus."""
    ranks = _BY_SHARE[min(size, len(_BY_SHARE)) - 1]
    shares = ranks[min(rank, len(ranks) - 1)]
    return shares[min(int(10 * share), len(shares) - 1)]


class Distinct:
    """Collect up to `count` continuations, none of which is a prefix of an earlier one."""

    def __init__(self, count: int) -> None:
        self.matches: list[Match] = []
        self._count = count
        self._prefixes: set[tuple[int, ...]] = {()}

    @property
    def full(self) -> bool:
        """Whether there are `count` continuations."""
        return len(self.matches) >= self._count

    def add(self, prefix: int, tokens: Sequence[int]) -> None:
        """Add a continuation, if it is new and there is room."""
        kept = tuple(tokens)
        if kept in self._prefixes or self.full:
            return
        self._prefixes.update(kept[:end] for end in range(1, len(kept) + 1))
        self.matches.append(Match(prefix, kept))
