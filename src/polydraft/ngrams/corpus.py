"""The corpus cache of Self-Draft: what usually follows a few tokens, counted in a large text in advance.

"Longer prefixes and higher frequencies receive higher priority" [1]_. A prefix with its continuation is a counted n-gram, so
shorter prefixes have longer continuations.

References
----------
.. [1] Gao et al., "Multi-Branch Self-Drafting for LLM Inference Acceleration", 2025; section "Draft Cache Initialization".
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import count, islice
from math import exp
from pathlib import Path

import torch

from polydraft.errors import UsageError
from polydraft.ngrams.cache import (
    GRAM_CACHES,
    ContinuationMemory,
    Distinct,
    GramCache,
    GramOptions,
    Match,
    Step,
    Way,
    share_chance,
)
from polydraft.ngrams.gram_trie import ABSENT, GramTrie, load_trie
from polydraft.ngrams.tables import MOST_WAYS, CorpusTables

SHIPPED_CORPORA = {"smollm2-corpus": Path(__file__).parent.parent / "drafts" / "smollm2-corpus" / "corpus.grams"}
"""Corpus caches that come with this package, by name."""


def load_corpus(name: str | Path, fingerprint: str | None) -> GramTrie | None:
    """Load a corpus cache: a file, a shipped one by name, or ``"auto"``, the shipped one for the tokenizer of this fingerprint.

    Return None for ``"none"``, and for ``"auto"`` if none fits.
    """
    if name == "none":
        return None
    if name == "auto":
        shipped = [load_trie(file) for file in SHIPPED_CORPORA.values() if fingerprint is not None and file.is_file()]
        return next((trie for trie in shipped if trie.fingerprint == fingerprint), None)
    trie = load_trie(SHIPPED_CORPORA.get(str(name), Path(name)))
    if fingerprint is not None and trie.fingerprint != fingerprint:
        raise UsageError(
            f"corpus cache {str(name)!r} was made for another tokenizer (fingerprint {trie.fingerprint}, the target's is "
            f"{fingerprint}); make one with: polydraft train corpus-cache --tokenizer TARGET --text FILE --out FILE"
        )
    return trie


def best_paths(root: int, steps: Callable[[int], Sequence[Step]], length: int) -> Iterator[Sequence[int]]:
    """Yield different paths of up to `length` tokens: the greedy one, then others in order of the cost of branching off.

    `steps` returns the edges of a node, cheapest first. After its branching point, a path is greedy, so each path takes at most
    `length` calls of `steps`.
    """
    order = count()  # of equal costs, the earlier path goes first
    open_paths: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, next(order), (), root)]
    while open_paths:
        cost, _, tokens, node = heappop(open_paths)
        while len(tokens) < length:
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


_MOST_KNOWN = 20_000
"""Look-ups in a corpus that are cached, some megabytes; a corpus does not change, so all texts share them."""

Place = tuple[int, ...]
"""Nodes of the n-grams that a text ends with, the longest first."""


class _CorpusMemory(ContinuationMemory):
    """Keeps the text's last tokens, and the trie in which they are looked up."""

    def __init__(self, trie: GramTrie, ways: Callable[[Place], list[Way]], children: Callable[[int], dict[int, int]]) -> None:
        self._trie, self._ways, self._children = trie, ways, children
        self._tail: list[int] = []

    def reset(self) -> None:
        """Forget the text; the corpus stays."""
        self._tail = []

    def read(self, tokens: Sequence[int]) -> None:
        most = len(self._trie.level_sizes) - 1  # length of the longest n-grams with a continuation
        self._tail = [*self._tail, *tokens[-most:]][-most:]

    def matches(self, count: int, length: int) -> list[Match]:
        """Return what followed the text's last tokens in the corpus: longest prefix first, then most frequent first."""
        trie, found = self._trie, Distinct(count)

        def steps(node: int) -> list[Step]:
            return trie.steps(node, count)

        for prefix in range(min(len(self._tail), trie.max_prefix), 0, -1):
            node = trie.find(self._tail[-prefix:])
            if node == ABSENT:
                continue
            for tokens in islice(best_paths(node, steps, length), count):
                found.add(prefix, tokens)
                if found.full:
                    return found.matches
        return found.matches

    def end(self) -> Place:
        """Return the nodes of the text's last tokens."""
        place: Place = ()
        for token in self._tail:
            place = self.step(place, token)
        return place

    def step(self, place: Place, token: int) -> Place:
        """Append a token to each n-gram, drop those that are not in the corpus, and add that of the token alone."""
        longer = (self._children(node).get(token, ABSENT) for node in place)
        return tuple(node for node in (*longer, self._trie.top(token)) if node != ABSENT)

    def ways(self, place: Place, width: int) -> list[Way]:
        """Return what followed the longest n-gram, most frequent first, then what followed shorter ones."""
        return self._ways(place)[:width] if place else []


def _ways_at(trie: GramTrie, place: Place) -> list[Way]:
    found = dict[int, float]()
    for node in place:
        for cost, token, _ in trie.steps(node, MOST_WAYS):
            if token not in found and len(found) < MOST_WAYS:
                found[token] = share_chance(trie.size_of(node), len(found), exp(-cost))
        if len(found) >= MOST_WAYS:
            break
    return list(found.items())


@GRAM_CACHES.register("corpus")
class CorpusCache(GramCache):
    """Proposes what usually follows the last few tokens, counted in a corpus in advance."""

    name = "corpus"
    has_tensors = True

    def __init__(self, options: GramOptions) -> None:
        super().__init__(options)
        mark = options.fingerprint
        self._trie = load_corpus(options.corpus, mark() if callable(mark) else mark)
        if self._trie is not None:
            self._ways = lru_cache(_MOST_KNOWN)(partial(_ways_at, self._trie))
            self._children = lru_cache(_MOST_KNOWN)(self._trie.children)
        self._tables: dict[tuple[int, int, torch.device], CorpusTables] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is no corpus."""
        return self._trie is None

    def tables(self, nodes: int, depth: int, device: torch.device) -> CorpusTables | None:
        """Return the corpus as tensors, made on first use."""
        if self._trie is None:
            return None
        wanted = (nodes, depth, device)
        if wanted not in self._tables:
            self._tables[wanted] = CorpusTables(self._trie, nodes, depth, device)
        return self._tables[wanted]

    def open(self) -> _CorpusMemory:
        """Return the memory of a new text."""
        assert self._trie is not None, "an empty cache has no memories"
        return _CorpusMemory(self._trie, self._ways, self._children)
