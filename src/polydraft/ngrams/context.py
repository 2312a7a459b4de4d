"""The context cache of Self-Draft: what recently followed a few tokens, in the text and in draft branches.

Deviations from the paper, which keys by one token, learns only from branches and stops after G tokens: this cache also learns
from the text, keeps prefixes of several lengths, asks the longest first, and chains continuations as far as it can.
`GramOptions(branches_only=True, max_prefix=1)` is the paper's cache.

References
----------
.. [1] Gao et al., "Multi-Branch Self-Drafting for LLM Inference Acceleration", 2025; section "Branch updating".
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from operator import itemgetter

from polydraft.ngrams.cache import GRAM_CACHES, ContinuationMemory, Distinct, GramCache, GramOptions, Match, Way, ways_by_match

Gram = tuple[int, ...]
Found = tuple[int, Gram]
"""Number of tokens that match, and what is left of the continuation."""

_LEAST_CHAIN = 2
"""Shortest prefix by which a continuation is extended: one token says too little about what follows."""

_NOTHING: list[Gram] = [()]
_size = itemgetter(0)


class GramTable:
    """Prefixes of one length with their continuations; the least recently seen of either are dropped first."""

    def __init__(self, max_keys: int, entries_per_key: int) -> None:
        self._max_keys, self._entries_per_key = max_keys, entries_per_key
        self._entries: OrderedDict[Gram, list[Gram]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, grams: Iterable[tuple[Gram, Gram]]) -> None:
        """Add prefixes with their continuations, the most recent last."""
        entries, most, limit = self._entries, self._entries_per_key, self._max_keys
        for key, continuation in grams:
            known = entries.get(key)
            if known is None:
                entries[key] = [continuation]
                if len(entries) > limit:
                    entries.popitem(last=False)
                continue
            entries.move_to_end(key)
            if continuation in known:
                known.remove(continuation)
            elif len(known) == most:
                del known[0]
            known.append(continuation)

    def get(self, key: Gram) -> Iterable[Gram]:
        """Return the continuations of a prefix, the most recent first."""
        return reversed(self._entries.get(key, ()))

    def latest(self, key: Gram) -> Gram:
        """Return the most recent continuation of a prefix; empty if it has none."""
        return self._entries.get(key, _NOTHING)[-1]


class GramTables:
    """Tables for prefixes of 1 to `max_prefix` tokens."""

    def __init__(self, options: GramOptions) -> None:
        self._gram, self._chains = options.gram, not options.branches_only
        keys = max(options.max_keys // options.max_prefix, 1)
        self._tables = [GramTable(keys, options.entries_per_key) for _ in range(options.max_prefix)]

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def add(self, tokens: Sequence[int], new: int) -> None:
        """Add every n-gram that ends in one of the last `new` tokens."""
        for prefix, table in enumerate(self._tables, start=1):
            # The first n-gram of prefix + gram tokens to end in a new one.
            window = tokens[max(len(tokens) - new - prefix - self._gram + 1, 0) :]
            if len(window) >= prefix + self._gram:
                keys = zip(*(window[start:] for start in range(prefix)), strict=False)
                continuations = zip(*(window[prefix + start :] for start in range(self._gram)), strict=False)
                table.add(zip(keys, continuations, strict=False))

    def add_short(self, tokens: Gram) -> None:
        """Add every split of an n-gram whose continuation is shorter than usual."""
        for prefix, table in enumerate(self._tables, start=1):
            if 0 < len(tokens) - prefix < self._gram:
                table.add([(tokens[:prefix], tokens[prefix:])])

    def matches(self, tail: Gram, count: int, length: int) -> list[Match]:
        """Continue a text that ends in `tail`: longest prefix first, then most recent first."""
        found = Distinct(count)
        for prefix, continuation in self.followed(tail):
            if found.full:
                break
            found.add(prefix, self._chained(tail, continuation, length))
        return found.matches

    def followed(self, tail: Gram) -> list[Found]:
        """Return the continuations of a text that ends in `tail`: longest prefix first, then most recent first."""
        prefixes = range(min(len(self._tables), len(tail)), 0, -1)
        return [(size, gram) for size in prefixes for gram in self._tables[size - 1].get(tail[-size:])]

    def _chained(self, tail: Gram, continuation: Gram, length: int) -> Gram:
        """Extend a continuation by what followed its own last tokens."""
        longest = len(self._tables)
        while self._chains and len(continuation) < length:
            end = (tail + continuation)[-longest:]
            for prefix in range(len(end), min(_LEAST_CHAIN, longest) - 1, -1):
                if further := self._tables[prefix - 1].latest(end[-prefix:]):
                    continuation += further
                    break
            else:
                break
        return continuation[:length]


class _ContextMemory(ContinuationMemory):
    """Keeps the text's last tokens, and the tables in which they are looked up."""

    def __init__(self, options: GramOptions) -> None:
        self._options = options
        self.reset()

    def reset(self) -> None:
        self._tables = GramTables(self._options)
        self._tail: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        text = [*self._tail, *tokens]
        if not self._options.branches_only:
            self._tables.add(text, len(tokens))
        self._tail = text[-(self._options.max_prefix + self._options.gram - 1) :]

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn the n-gram of a draft branch: its first tokens are a prefix, the others the continuation."""
        gram = tuple(tokens)
        self._tables.add_short(gram)
        self._tables.add(gram, len(gram))

    def matches(self, count: int, length: int) -> list[Match]:
        """Return what followed the text's last tokens: longest prefix first, then most recent first."""
        return self._tables.matches(tuple(self._tail), count, length)

    def end(self) -> tuple[Gram, list[Found]]:
        """Return the text's last tokens, and what followed them."""
        tail = tuple(self._tail[-self._options.max_prefix :])
        return tail, self._tables.followed(tail)

    def step(self, place: tuple[Gram, list[Found]], token: int) -> tuple[Gram, list[Found]]:
        """Append a token: continuations that start with it match one more token, and new ones are looked up."""
        tail = (*place[0], token)[-self._options.max_prefix :]
        longer = [(size + 1, gram[1:]) for size, gram in place[1] if gram[0] == token and len(gram) > 1]
        return tail, sorted(longer + self._tables.followed(tail), key=_size, reverse=True)

    def ways(self, place: tuple[Gram, list[Found]], width: int) -> list[Way]:
        """Return what comes next in the continuations: longest match first, then most recent first."""
        return ways_by_match(((size, gram[0]) for size, gram in place[1]), width)


@GRAM_CACHES.register("context")
class ContextCache(GramCache):
    """Proposes what recently followed the last few tokens, in this text and its draft branches."""

    name = "context"

    def open(self) -> _ContextMemory:
        """Return the memory of a new text."""
        return _ContextMemory(self._options)
