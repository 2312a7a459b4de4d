"""The one interface of everything that proposes tokens from text that was seen before, and its options."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from polydraft.errors import UsageError
from polydraft.registry import Registry

if TYPE_CHECKING:
    from polydraft.ngrams.tables import CorpusTables

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
    target's distribution per node of the merged trie stays exact (candidates may depend on anything past, never on the random
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
    has_tensors: bool = False
    """Whether a device can look up by itself what memories know, by `longest_match` or `tables`."""
    longest_match: int = 0
    """Most tokens at the text's end that a device finds in the text itself; 0 where that is not what memories do."""

    def __init__(self, options: GramOptions) -> None:
        self._options = options

    def tables(self, nodes: int, depth: int, device: torch.device) -> "CorpusTables | None":
        """Return what a device looks up beside the text, with up to `nodes` candidates at a place; None for nothing."""
        return None

    @property
    def is_empty(self) -> bool:
        """Whether its memories will never propose anything: a corpus cache without a corpus."""
        return False

    @abstractmethod
    def open(self) -> GramMemory:
        """Return the memory of a new text."""


GRAM_CACHES: Registry[Callable[[GramOptions], GramCache]] = Registry("n-gram cache")
"""Ways to make a cache, by name; each is fit for every n-gram drafter, and all are tested by being here."""


Step = tuple[float, int, int]
"""One way on from a node: how unlikely it is, at least 0 (minus the logarithm of its share, or its rank); token; node."""
Steps = Callable[[int], Sequence[Step]]
"""Ways on from a node, cheapest first; none at an end."""
Rest = Callable[[int, int], Sequence[int] | None]
"""Of a node that was reached with so many tokens and has but one way on: the whole path through it, those tokens included."""

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
"""Of what followed in the text before: a row for 1, 2, 3, 4, 5, up to 7, up to 11 and more tokens that matched, by rank, the
last for all further ones."""
_MATCH_ROWS = (0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7)
_BY_SHARE = (
    ((0.05, 0.09, 0.16, 0.19, 0.20, 0.21, 0.27, 0.35, 0.40, 0.50), (0.02, 0.08, 0.10), (0.015, 0.03)),
    ((0.04, 0.07, 0.18, 0.24, 0.38, 0.40, 0.45, 0.58, 0.65, 0.75), (0.05, 0.12, 0.16, 0.22), (0.03, 0.06, 0.12)),
    ((0.11, 0.13, 0.28, 0.35, 0.40, 0.55, 0.60, 0.67, 0.85, 0.92), (0.05, 0.12, 0.25, 0.30), (0.05, 0.07, 0.20)),
)
"""Of what a corpus counted: for 1, 2 and more tokens that matched, by rank (0, 1, more) and by tenths of the places after these
tokens that have it next."""


def match_chance(size: int, rank: int) -> float:
    """Return the chance of what followed the text's last `size` tokens before, when `rank` others are better."""
    row = _BY_MATCH[_MATCH_ROWS[size] if size < len(_MATCH_ROWS) else -1]
    return row[rank] if rank < len(row) else row[-1]


def share_chance(size: int, rank: int, share: float) -> float:
    """Return the chance of what follows `size` tokens in a `share` of the places where a corpus has them."""
    ranks = _BY_SHARE[min(size, len(_BY_SHARE)) - 1]
    shares = ranks[min(rank, len(ranks) - 1)]
    return shares[min(int(10 * share), len(shares) - 1)]


class Distinct:
    """Collect up to `count` continuations, none of which is the beginning of an earlier one."""

    def __init__(self, count: int) -> None:
        self.matches: list[Match] = []
        self._count = count
        self._beginnings: set[tuple[int, ...]] = {()}

    @property
    def full(self) -> bool:
        """Whether no more are wanted."""
        return len(self.matches) >= self._count

    def add(self, prefix: int, tokens: Sequence[int]) -> None:
        """Add a continuation if it says anything new and there is room."""
        kept = tuple(tokens)
        if kept in self._beginnings or self.full:
            return
        self._beginnings.update(kept[:end] for end in range(1, len(kept) + 1))
        self.matches.append(Match(prefix, kept))


def best_paths(root: int, steps: Steps, length: int, rest: Rest | None = None) -> Iterator[Sequence[int]]:
    """Yield different paths of up to `length` tokens: the greedy one, then those that leave earlier ones at the least cost.

    A path is followed greedily to its end once it has left the others, so each costs no more than `length` calls of `steps`,
    and far fewer where `rest` knows a short cut.
    """
    order = count()  # between equal costs the earlier one goes first
    open_paths: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, next(order), (), root)]
    while open_paths:
        cost, _, tokens, node = heappop(open_paths)
        while len(tokens) < length:
            if rest and tokens and (whole := rest(node, len(tokens))):
                yield whole
                break
            ways = steps(node)
            if not ways:
                if tokens:
                    yield tokens
                break
            for further, token, to in ways[1:]:
                heappush(open_paths, (cost + further, next(order), (*tokens, token), to))
            further, token, node = ways[0]
            cost, tokens = cost + further, (*tokens, token)
        else:
            yield tokens
