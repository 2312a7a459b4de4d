"""Counted n-grams as a trie in a few flat arrays, ready to be mapped from a file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.ngrams.paths import Step

ABSENT = -1
_UNIT = 8
"""Steps of a weight per doubling of the count."""
_COST_UNIT = float(np.log(2)) / _UNIT
_LEAST_CHAIN = 2
"""Shortest prefix by which a continuation is continued beyond the trie's leaves."""
_MOST_REMEMBERED = 65_536


def weights_of(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Squeeze counts into a byte: eight times their binary logarithm, so 9 % exact, up to 4 thousand million."""
    weights: NDArray[np.float64] = np.minimum(np.rint(_UNIT * np.log2(counts)), 255)
    return weights.astype(np.uint8)


@dataclass(frozen=True, eq=False)
class GramTrie:
    """All kept n-grams of up to `max_prefix + gram` tokens; every beginning of a kept one is kept.

    Nodes are numbered level by level; the children of a node stand side by side, most frequent first.
    """

    fingerprint: str
    """Mark of the tokenizer."""
    vocab_size: int
    max_prefix: int
    gram: int
    corpus_tokens: int
    """Tokens that were counted."""
    level_sizes: tuple[int, ...]
    """Nodes of each level: n-grams of 1, 2, ... tokens."""
    tokens_N: NDArray[Any]
    """Last token of each n-gram."""
    weights_N: NDArray[np.uint8]
    firsts_I: NDArray[np.uint32]
    """First child of each node above the last level, and at the end the number of nodes."""
    _tops_V: NDArray[np.int64] = field(init=False, repr=False)
    _ends: dict[int, int] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        tops_V = np.full(self.vocab_size, ABSENT, dtype=np.int64)
        tops_V[self.tokens_N[: self.level_sizes[0]]] = np.arange(self.level_sizes[0])
        object.__setattr__(self, "_tops_V", tops_V)

    def find(self, gram: Sequence[int]) -> int:
        """Return the node of an n-gram, `ABSENT` if it was not kept."""
        node = int(self._tops_V[gram[0]]) if 0 <= gram[0] < self.vocab_size else ABSENT
        for token in gram[1:]:
            if node == ABSENT:
                break
            first, end = self._children(node)
            places = (self.tokens_N[first:end] == token).nonzero()[0]
            node = first + int(places[0]) if len(places) else ABSENT
        return node

    def gram_of(self, node: int) -> list[int]:
        """Return the n-gram of a node."""
        tokens = [int(self.tokens_N[node])]
        while node >= self.level_sizes[0]:
            node = int(np.searchsorted(self.firsts_I, node, side="right")) - 1
            tokens.append(int(self.tokens_N[node]))
        return tokens[::-1]

    def steps(self, node: int, width: int) -> list[Step]:
        """Return the `width` most frequent ways on; from an n-gram that has none, those of its longest known end."""
        first, end = self._children(node)
        if first == end:
            node = self._longest_end(node)
            if node == ABSENT:
                return []
            first, end = self._children(node)
        end = min(end, first + width)
        tokens, weights, weight = (
            self.tokens_N[first:end].tolist(),
            self.weights_N[first:end].tolist(),
            int(self.weights_N[node]),
        )
        return [
            Step((weight - own) * _COST_UNIT, token, child)
            for child, (token, own) in enumerate(zip(tokens, weights, strict=True), start=first)
        ]

    def has_children(self, node: int) -> bool:
        """Whether it is known how an n-gram goes on."""
        first, end = self._children(node)
        return first < end

    def _children(self, node: int) -> tuple[int, int]:
        if node + 1 >= len(self.firsts_I):
            return 0, 0
        return int(self.firsts_I[node]), int(self.firsts_I[node + 1])

    def _longest_end(self, node: int) -> int:
        """Return the node of the longest proper end of a node's n-gram that is known to go on."""
        known = self._ends.get(node)
        if known is not None:
            return known
        tokens = self.gram_of(node)
        found = ABSENT
        for size in range(min(self.max_prefix, len(tokens) - 1), min(_LEAST_CHAIN, self.max_prefix) - 1, -1):
            end = self.find(tokens[-size:])
            if end != ABSENT and self.has_children(end):
                found = end
                break
        if len(self._ends) >= _MOST_REMEMBERED:
            self._ends.clear()
        self._ends[node] = found
        return found
