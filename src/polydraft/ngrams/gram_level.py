"""Counted n-grams of one length, and how the lengths are put together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.ngrams.gram_file import token_type
from polydraft.ngrams.gram_trie import ABSENT, weights_of


@dataclass(frozen=True, eq=False)
class GramLevel:
    """Distinct keys, ascending, with their counts.

    The key of an n-gram is the place of its beginning in the level below × vocabulary size + its last token.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def empty(cls) -> "GramLevel":
        """Return no n-grams."""
        return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    @classmethod
    def counted(cls, keys: NDArray[np.int64]) -> "GramLevel":
        """Count keys that come in any order."""
        return cls(*np.unique(keys, return_counts=True))

    @classmethod
    def merged(cls, levels: Sequence["GramLevel"]) -> "GramLevel":
        """Add up several counts."""
        keys = np.concatenate([level.keys for level in levels])
        if not len(keys):
            return cls.empty()
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        return cls(keys[starts], np.add.reduceat(np.concatenate([level.counts for level in levels])[order], starts))

    @classmethod
    def joined(cls, low: "GramLevel", high: "GramLevel") -> "GramLevel":
        """Put keys after lower ones."""
        return cls(np.append(low.keys, high.keys), np.append(low.counts, high.counts))

    @property
    def size(self) -> int:
        """How many n-grams there are."""
        return len(self.keys)

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each key, `ABSENT` for unknown ones."""
        if not self.size:
            return np.full(len(keys), ABSENT, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.keys, keys), self.size - 1)
        return np.where(self.keys[places] == keys, places, ABSENT)

    def at_least(self, count: int) -> "GramLevel":
        """Leave out what was seen less often."""
        return self._only(self.counts >= count)

    def most_frequent(self, most: int) -> "GramLevel":
        """Leave all but the most frequent out; of equally frequent ones those with the lowest keys stay."""
        return self if self.size <= most else self._only(self.among_most_frequent(most))

    def among_most_frequent(self, most: int) -> NDArray[np.bool_]:
        """Say which n-grams `most_frequent` would leave."""
        keep = np.zeros(self.size, dtype=bool)
        keep[np.argsort(-self.counts, kind="stable")[:most]] = True
        return keep

    def _only(self, keep: NDArray[np.bool_]) -> "GramLevel":
        return self if keep.all() else GramLevel(self.keys[keep], self.counts[keep])


def _sorted(
    levels: Sequence[GramLevel], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return counts, levels and the bytes used so far of all n-grams, most frequent first, then shorter ones first."""
    counts = np.concatenate([level.counts for level in levels])
    numbers = np.repeat(np.arange(len(levels)), [level.size for level in levels])
    order = np.argsort(-counts, kind="stable")
    return counts[order], numbers[order], np.cumsum(sizes[numbers[order]])


def floor_count(levels: Sequence[GramLevel], sizes: NDArray[np.int64], room: int) -> int:
    """Return the count below which no n-gram, of whatever length, can fit any more."""
    counts, _, used = _sorted(levels, sizes)
    full = int(np.searchsorted(used, room, side="right"))
    return int(counts[full]) if full < len(counts) else 1


def fitted(levels: Sequence[GramLevel], sizes: NDArray[np.int64], room: int) -> list[NDArray[np.bool_]]:
    """Say of each level's n-grams which are among the most frequent ones that fit.

    A beginning is seen as often as its n-gram at least, and is shorter: it stays whenever the n-gram does.
    """
    _, numbers, used = _sorted(levels, sizes)
    kept = np.bincount(numbers[: int(np.searchsorted(used, room, side="right"))], minlength=len(levels))
    return [level.among_most_frequent(int(most)) for level, most in zip(levels, kept, strict=True)]


def assemble(
    levels: Sequence[GramLevel], kept: Sequence[NDArray[np.bool_]], vocab_size: int
) -> tuple[tuple[int, ...], NDArray[Any], NDArray[np.uint8], NDArray[np.uint32]]:
    """Put the kept nodes in order, level by level, siblings by falling count: sizes, tokens, weights, first children."""
    sizes = tuple(int(keep.sum()) for keep in kept)
    tokens, counts, firsts = [], [], []
    parents_N, end = np.zeros(1, dtype=np.int64), 0  # new places of the nodes of the level below; it begins with the root
    for level, keep in zip(levels, kept, strict=True):
        keys_N, counts_N = level.keys[keep], level.counts[keep]
        parent_N, token_N = parents_N[keys_N // vocab_size], keys_N % vocab_size
        order_N = np.lexsort((token_N, -counts_N, parent_N))
        tokens.append(token_N[order_N])
        counts.append(counts_N[order_N])
        children_N = np.bincount(parent_N, minlength=int((parents_N != ABSENT).sum()))
        firsts.append(end + np.cumsum(children_N) - children_N)
        parents_N = np.full(level.size, ABSENT)
        parents_N[np.flatnonzero(keep)[order_N]] = np.arange(len(keys_N))
        end += len(keys_N)
    firsts_I = np.append(np.concatenate(firsts[1:]), end).astype(np.uint32)
    return sizes, np.concatenate(tokens).astype(token_type(vocab_size)), weights_of(np.concatenate(counts)), firsts_I
