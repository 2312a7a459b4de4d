"""The corpus cache of Self-Draft: what usually follows a few tokens in a large text, counted beforehand.

"Longer prefixes and higher frequencies receive higher priority" [1]_. The shorter the prefix, the longer its continuations may
be: together they are an n-gram that was counted.

References
----------
.. [1] Gao et al., "Multi-Branch Self-Drafting for LLM Inference Acceleration", 2025; section "Draft Cache Initialization".
"""

from collections.abc import Sequence
from itertools import islice
from math import exp
from pathlib import Path

from polydraft.ngrams.cache import GRAM_CACHES, GramCache, GramMemory, Match, Way
from polydraft.ngrams.chances import share_chance
from polydraft.ngrams.distinct import Distinct
from polydraft.ngrams.fingerprint import check_fingerprint
from polydraft.ngrams.gram_file import load_trie
from polydraft.ngrams.gram_trie import ABSENT, GramTrie
from polydraft.ngrams.options import GramOptions
from polydraft.ngrams.paths import Step, best_paths

SHIPPED_CORPORA = {"smollm2-corpus": Path(__file__).parent.parent / "drafts" / "smollm2-corpus" / "corpus.grams"}
"""Corpus caches that come with this package, by name."""


def load_corpus(name: str | Path, fingerprint: str | None) -> GramTrie | None:
    """Load a corpus cache: a file, a shipped one by name, ``"none"``, or ``"auto"``.

    ``"auto"`` is the shipped one that was made with the tokenizer of this fingerprint, and None if there is none.
    """
    if name == "none":
        return None
    if name == "auto":
        shipped = [load_trie(file) for file in SHIPPED_CORPORA.values() if fingerprint is not None and file.is_file()]
        return next((trie for trie in shipped if trie.fingerprint == fingerprint), None)
    trie = load_trie(SHIPPED_CORPORA.get(str(name), Path(name)))
    check_fingerprint(name, trie.fingerprint, fingerprint)
    return trie


_MOST_KNOWN = 20_000
"""Ends of text whose ways are kept for the next time; some megabytes."""

_MOST_WAYS = 8
"""Tokens that are proposed at one place at most."""
_Known = dict[tuple[int, ...], list[Way]]


class CorpusMemory(GramMemory):
    """The text's last tokens, and the n-grams that they are looked up in."""

    def __init__(self, trie: GramTrie | None, known: _Known) -> None:
        self._trie, self._known = trie, known
        self._tail: list[int] = []

    def reset(self) -> None:
        """Forget the text; the corpus is nobody's in particular and stays."""
        self._tail = []

    def read(self, tokens: Sequence[int]) -> None:
        """Append certain text."""
        if self._trie is not None:
            self._tail = [*self._tail, *tokens[-self._trie.max_prefix :]][-self._trie.max_prefix :]

    def matches(self, count: int, length: int) -> list[Match]:
        """Return what followed the text's last tokens in the corpus: longest prefix first, then most frequent first."""
        trie, found = self._trie, Distinct(count)
        if trie is None:
            return []

        def steps(node: int) -> list[Step]:
            return trie.steps(node, count)

        for prefix in range(len(self._tail), 0, -1):
            node = trie.find(self._tail[-prefix:])
            for tokens in islice(best_paths(node, steps, length), count) if node != ABSENT else ():
                found.add(prefix, tokens)
                if found.full:
                    return found.matches
        return found.matches

    def end(self) -> tuple[int, ...]:
        """Return the text's last tokens."""
        return tuple(self._tail)

    def step(self, place: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Append a token."""
        return (*place, token)[-self._trie.max_prefix :] if self._trie is not None else ()

    def ways(self, place: tuple[int, ...], width: int) -> list[Way]:
        """Return what followed the last tokens most often, then what followed fewer of them."""
        found = self._known.get(place)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[place] = self._looked_up(place)
        return found[:width]

    def _looked_up(self, place: tuple[int, ...]) -> list[Way]:
        trie, found = self._trie, dict[int, float]()
        for size in range(len(place) if trie is not None else 0, 0, -1):
            assert trie is not None
            node = trie.find(place[-size:])
            for cost, token, _ in trie.steps(node, _MOST_WAYS) if node != ABSENT else ():
                if token not in found and len(found) < _MOST_WAYS:
                    found[token] = share_chance(size, len(found), exp(-cost))
            if len(found) >= _MOST_WAYS:
                break
        return list(found.items())


class CorpusCache(GramCache):
    """What usually follows the last few tokens, counted in a corpus beforehand."""

    name = "corpus"

    def __init__(self, trie: GramTrie | None) -> None:
        self._trie = trie
        self._known: _Known = {}  # a corpus stays as it is, so all texts may share what was looked up

    @property
    def is_empty(self) -> bool:
        """Whether there is no corpus."""
        return self._trie is None

    def open(self) -> CorpusMemory:
        """Return the memory of a new text."""
        return CorpusMemory(self._trie, self._known)


@GRAM_CACHES.register("corpus")
def _build(options: GramOptions) -> CorpusCache:
    return CorpusCache(load_corpus(options.corpus, options.fingerprint))
