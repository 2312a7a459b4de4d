"""Count the n-grams of a corpus that need not fit into memory.

Tokens are spilled to a temporary file, which is read once per length of n-gram (more often if the distinct n-grams do not fit
into a table). N-grams of n + 1 tokens are counted only if their first n were kept; their counts are exact.

Memory: a table of at most `max_table` distinct n-grams (or the size of the vocabulary, if larger), with some copies while it is
sorted, and the kept n-grams, at each length at most as many as fit into the requested bytes. Disk: 6 to 8 bytes per token.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import FailureError, UsageError
from polydraft.ngrams.cache import check_order
from polydraft.ngrams.gram_trie import ABSENT, HEADER_SIZE, GramTrie, node_bytes, token_type, weights_of

Advance = Callable[[int, int], None]
"""Reports progress as `(done, total)`."""


@dataclass(frozen=True, eq=False)
class _Level:
    """The distinct n-grams of one length: their keys, ascending, and counts.

    The key of an n-gram is the index of its prefix in the previous level × vocabulary size + its last token.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def empty(cls) -> "_Level":
        return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    @classmethod
    def counted(cls, keys: NDArray[np.int64]) -> "_Level":
        return cls(*np.unique(keys, return_counts=True))

    @classmethod
    def merged(cls, levels: Sequence["_Level"]) -> "_Level":
        keys = np.concatenate([level.keys for level in levels])
        if not len(keys):
            return cls.empty()
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        return cls(keys[starts], np.add.reduceat(np.concatenate([level.counts for level in levels])[order], starts))

    @classmethod
    def joined(cls, low: "_Level", high: "_Level") -> "_Level":
        """Join two levels; all keys of `low` are below those of `high`."""
        return cls(np.append(low.keys, high.keys), np.append(low.counts, high.counts))

    @property
    def size(self) -> int:
        return len(self.keys)

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each key, `ABSENT` for unknown ones."""
        if not self.size:
            return np.full(len(keys), ABSENT, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.keys, keys), self.size - 1)
        return np.where(self.keys[places] == keys, places, ABSENT)

    def most_frequent(self, most: int) -> "_Level":
        """Return the `most` most frequent n-grams; among equals, those with the lowest keys."""
        return self if self.size <= most else self.only(self.among_most_frequent(most))

    def among_most_frequent(self, most: int) -> NDArray[np.bool_]:
        """Return a mask of the n-grams that `most_frequent` keeps."""
        keep = np.zeros(self.size, dtype=bool)
        keep[np.argsort(-self.counts, kind="stable")[:most]] = True
        return keep

    def only(self, keep: NDArray[np.bool_]) -> "_Level":
        return self if keep.all() else _Level(self.keys[keep], self.counts[keep])


def _sorted(
    levels: Sequence[_Level], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return counts, levels and cumulative bytes of all n-grams, most frequent first, then shorter ones first."""
    counts = np.concatenate([level.counts for level in levels])
    numbers = np.repeat(np.arange(len(levels)), [level.size for level in levels])
    order = np.argsort(-counts, kind="stable")
    return counts[order], numbers[order], np.cumsum(sizes[numbers[order]])


def _floor_count(levels: Sequence[_Level], sizes: NDArray[np.int64], room: int) -> int:
    """Return the count below which no n-gram of any length fits."""
    counts, _, used = _sorted(levels, sizes)
    full = int(np.searchsorted(used, room, side="right"))
    return int(counts[full]) if full < len(counts) else 1


def _fitted(levels: Sequence[_Level], sizes: NDArray[np.int64], room: int) -> list[NDArray[np.bool_]]:
    """Return, for each level, a mask of the n-grams that are among the most frequent ones that fit.

    A prefix is seen at least as often as its n-gram, and is shorter, so it is kept whenever the n-gram is.
    """
    _, numbers, used = _sorted(levels, sizes)
    kept = np.bincount(numbers[: int(np.searchsorted(used, room, side="right"))], minlength=len(levels))
    return [level.among_most_frequent(int(most)) for level, most in zip(levels, kept, strict=True)]


def _assemble(
    levels: Sequence[_Level], kept: Sequence[NDArray[np.bool_]], vocab_size: int
) -> tuple[tuple[int, ...], NDArray[Any], NDArray[np.uint8], NDArray[np.uint32]]:
    """Order the kept nodes by level, and siblings by descending count; return the arrays of a `GramTrie`."""
    sizes = tuple(int(keep.sum()) for keep in kept)
    tokens, counts, firsts = [], [], []
    parents_N, end = np.zeros(1, dtype=np.int64), 0  # new indices of the previous level's nodes; the root comes first
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


class GramCounter:
    """Count the n-grams of texts, and make a trie of them.

    Parameters
    ----------
    vocab_size : int
        Token ids are below this number.
    max_prefix, gram : int
        Longest prefix and longest continuation; n-grams up to their sum are counted.
    max_table : int
        Most distinct n-grams to count in memory at a time.
    chunk : int
        Tokens to process at a time.
    """

    def __init__(
        self, vocab_size: int, *, max_prefix: int = 3, gram: int = 4, max_table: int = 1 << 21, chunk: int = 1 << 20
    ) -> None:
        check_order(max_prefix, gram)
        self._vocab_size, self._max_prefix, self._gram = vocab_size, max_prefix, gram
        self._max_table, self._chunk = max_table, chunk
        self._folder = tempfile.TemporaryDirectory(prefix="polydraft-grams-")
        self._spilled = open(Path(self._folder.name) / "tokens", "w+b")  # noqa: SIM115 (closed by `close`)
        self._type = token_type(vocab_size + 1)
        self.size = 0
        """Tokens added so far."""

    def __enter__(self) -> "GramCounter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the temporary files."""
        self._spilled.close()
        self._folder.cleanup()

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Add the next tokens of a text."""
        fresh = np.asarray(tokens, dtype=np.int64)
        if unknown := fresh[(fresh < 0) | (fresh >= self._vocab_size)].tolist():
            raise UsageError(f"token {unknown[0]} is not in the vocabulary; allowed: 0 to {self._vocab_size - 1}")
        self._spill(fresh)
        self.size += len(fresh)

    def end_text(self) -> None:
        """End a text, so that no n-gram reaches into the next one."""
        self._spill(np.array([self._vocab_size]))

    def _spill(self, tokens: NDArray[np.int64]) -> None:
        with _disk_errors():
            self._spilled.write(tokens.astype(self._type).tobytes())

    def _node_file(self, places: int) -> NDArray[np.int32]:
        """Map a file with a number per token. It is written in full first, because a full disk would kill the process later."""
        file = Path(self._folder.name) / "nodes"
        with _disk_errors(), file.open("wb") as opened:
            for chunk in self._chunks(places):
                opened.write(bytes(4 * (chunk.stop - chunk.start)))
        return np.memmap(file, dtype=np.int32, mode="r+")

    def count(self, fingerprint: str, *, max_bytes: int, min_count: int = 2, advance: Advance | None = None) -> GramTrie:
        """Return the most frequent n-grams, seen at least `min_count` times, that fit into a file of `max_bytes`.

        Among equal counts, shorter n-grams come first, then lower token ids. The result does not depend on how texts were
        divided among calls of `add`.
        """
        order = self._max_prefix + self._gram
        self.end_text()
        with _disk_errors():
            self._spilled.flush()
        tokens_X = np.memmap(self._spilled.name, dtype=self._type, mode="r")
        nodes_X = self._node_file(len(tokens_X))
        sizes = node_bytes(self._vocab_size, order)
        room = max_bytes - HEADER_SIZE - 4
        most = max(room // int(sizes.min()), 0)
        levels: list[_Level] = []
        for number in range(order):
            if number == 0:
                level = self._count_tokens(tokens_X, min_count)
            else:
                level = self._count_level(tokens_X, nodes_X, levels[-1], number, min_count, most)
            level = level.most_frequent(most)
            levels.append(level)
            self._place(tokens_X, nodes_X, level, number)
            min_count = max(min_count, _floor_count(levels, sizes, room))
            if advance:
                advance(number + 1, order)
        kept = _fitted(levels, sizes, room)
        if not kept[0].any():
            raise UsageError(
                f"no n-gram of the corpus ({self.size} tokens) is kept; give more text, a lower --min-count or more --max-bytes"
            )
        nodes = _assemble(levels, kept, self._vocab_size)
        return GramTrie(fingerprint, self._vocab_size, self._max_prefix, self._gram, self.size, *nodes)

    def _chunks(self, total: int) -> Iterator[slice]:
        for first in range(0, total, self._chunk):
            yield slice(first, min(first + self._chunk, total))

    def _count_tokens(self, tokens_X: NDArray[Any], min_count: int) -> _Level:
        counts_V = np.zeros(self._vocab_size + 1, dtype=np.int64)
        for chunk in self._chunks(len(tokens_X)):
            counts_V += np.bincount(tokens_X[chunk], minlength=self._vocab_size + 1)
        kept = np.flatnonzero(counts_V[:-1] >= min_count)
        return _Level(kept, counts_V[kept])

    def _count_level(
        self, tokens_X: NDArray[Any], nodes_X: NDArray[np.int32], parents: _Level, number: int, min_count: int, most: int
    ) -> _Level:
        """Count the n-grams of one level, one range of prefixes at a time."""
        kept = _Level.empty()
        for low, high in _ranges(parents.counts, self._max_table):
            table = _Level.empty()
            waiting: list[_Level] = []
            for chunk in self._chunks(len(tokens_X) - number):
                keys = self._keys(tokens_X, nodes_X, chunk, number)
                keys = keys[(keys >= low * self._vocab_size) & (keys < high * self._vocab_size)]
                waiting.append(_Level.counted(keys))
                if sum(level.size for level in waiting) > self._max_table:
                    table, waiting = _Level.merged([table, *waiting]), []
            table = _Level.merged([table, *waiting])
            kept = _Level.joined(kept, table.only(table.counts >= min_count)).most_frequent(most)
        return kept

    def _keys(self, tokens_X: NDArray[Any], nodes_X: NDArray[np.int32], chunk: slice, number: int) -> NDArray[np.int64]:
        """Return the keys of n-grams that start in a chunk; `ABSENT` where the prefix was not kept or the text ends."""
        nodes = nodes_X[chunk].astype(np.int64)
        last = tokens_X[chunk.start + number : chunk.stop + number].astype(np.int64)
        return np.where((nodes != ABSENT) & (last < self._vocab_size), nodes * self._vocab_size + last, ABSENT)

    def _place(self, tokens_X: NDArray[Any], nodes_X: NDArray[np.int32], level: _Level, number: int) -> None:
        """Write the node of the n-gram that starts at each position of the corpus."""
        total = len(tokens_X) - number
        for chunk in self._chunks(total):
            keys = self._keys(tokens_X, nodes_X, chunk, number) if number else tokens_X[chunk].astype(np.int64)
            nodes_X[chunk] = level.find(keys)
        nodes_X[max(total, 0) :] = ABSENT


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn errors of writing temporary files into a `FailureError` that says what to do."""
    try:
        yield
    except OSError as error:
        folder = tempfile.gettempdir()
        raise FailureError(
            f"cannot write to {folder} ({error.strerror}); free some space, or set TMPDIR to another folder"
        ) from None


def _ranges(counts_N: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Split nodes into ranges with counts of at most `most` in total, or of a single node."""
    seen_N = np.cumsum(counts_N)
    low = 0
    while low < len(seen_N):
        before = int(seen_N[low - 1]) if low else 0
        high = max(int(np.searchsorted(seen_N, before + most, side="right")), low + 1)
        yield low, high
        low = high
