"""Counted n-grams as a trie in a few flat arrays, ready to be mapped from a file."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.ngrams.paths import Step

ABSENT = -1
_UNIT = 8
"""Steps of a weight per doubling of the count."""
_COST_UNIT = float(np.log(2)) / _UNIT


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
    _level_ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tops_V = np.full(self.vocab_size, ABSENT, dtype=np.int64)
        tops_V[self.tokens_N[: self.level_sizes[0]]] = np.arange(self.level_sizes[0])
        object.__setattr__(self, "_tops_V", tops_V)
        object.__setattr__(self, "_level_ends", list(accumulate(self.level_sizes)))

    def find(self, gram: Sequence[int]) -> int:
        """Return the node of an n-gram, `ABSENT` if it was not kept."""
        node = self.top(gram[0])
        for token in gram[1:]:
            if node == ABSENT:
                break
            first, end = self._children(node)
            places = (self.tokens_N[first:end] == token).nonzero()[0]
            node = first + int(places[0]) if len(places) else ABSENT
        return node

    def top(self, token: int) -> int:
        """Return the node of a single token, `ABSENT` if it was not kept."""
        return int(self._tops_V[token]) if 0 <= token < self.vocab_size else ABSENT

    def children(self, node: int) -> dict[int, int]:
        """Return the tokens that follow an n-gram, each with its node."""
        first, end = self._children(node)
        return dict(zip(self.tokens_N[first:end].tolist(), range(first, end), strict=True))

    def size_of(self, node: int) -> int:
        """Return the number of tokens of a node's n-gram."""
        return bisect_right(self._level_ends, node) + 1

    def gram_of(self, node: int) -> list[int]:
        """Return the n-gram of a node."""
        tokens = [int(self.tokens_N[node])]
        while node >= self.level_sizes[0]:
            # The number in the array's own type, lest all of the array be converted to the number's.
            node = int(self.firsts_I.searchsorted(np.uint32(node), side="right")) - 1
            tokens.append(int(self.tokens_N[node]))
        return tokens[::-1]

    def steps(self, node: int, width: int) -> list[Step]:
        """Return the `width` most frequent ways on."""
        first, end = self._children(node)
        if first == end:
            return []
        end = min(end, first + width)
        weight = int(self.weights_N[node])
        costs = [(weight - own) * _COST_UNIT for own in self.weights_N[first:end].tolist()]
        return list(zip(costs, self.tokens_N[first:end].tolist(), range(first, end), strict=True))

    def _children(self, node: int) -> tuple[int, int]:
        if node + 1 >= len(self.firsts_I):
            return 0, 0
        return int(self.firsts_I[node]), int(self.firsts_I[node + 1])
