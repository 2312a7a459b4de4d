"""Counted n-grams as a trie in flat arrays, in memory and on disk.

A file is a header followed by the raw arrays, so that it can be mapped into memory.

::

    8 bytes    magic
    u32, u32   version; bytes of a token id (2 or 4)
    16 bytes   tokenizer fingerprint, ASCII
    u32 × 4    vocabulary size, longest prefix, continuation, number of levels
    u64        tokens that were counted
    u64 × 16   nodes of each level
    32 bytes   SHA-256 of everything before and after these 32 bytes
    arrays     first children (u32), tokens (u16 or u32), weights (u8); see `GramTrie`

All numbers are little-endian. Nothing in a file is executed or unpickled.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import FailureError, UsageError
from polydraft.ngrams.cache import MOST_ORDER, Step
from polydraft.output import written_whole

ABSENT = -1
_UNIT = 8
"""Steps of a weight per doubling of the count."""
_COST_UNIT = float(np.log(2)) / _UNIT
MAGIC, VERSION = b"PDGRAMS\n", 1
_FIELDS = struct.Struct(f"<8sII16sIIIIQ{MOST_ORDER}Q")
_DIGEST_SIZE = 32
HEADER_SIZE = _FIELDS.size + _DIGEST_SIZE
_MOST_TOKENS = 1 << 24
"""More than any tokenizer has."""
_REMEDY = "make it again with: polydraft train corpus-cache"


def weights_of(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Compress counts to a byte: eight times their binary logarithm, accurate to 9 %, up to 4 billion."""
    weights: NDArray[np.float64] = np.minimum(np.rint(_UNIT * np.log2(counts)), 255)
    return weights.astype(np.uint8)


def share_tenths() -> list[int]:
    """Return the share of a child in its parent's count, in tenths, by the difference of their weights."""
    return [int(10 * exp(-less * _COST_UNIT)) for less in range(256)]


@dataclass(frozen=True, eq=False)
class GramTrie:
    """The kept n-grams of up to `max_prefix + gram` tokens, with all their prefixes.

    Nodes are numbered level by level. The children of a node are consecutive, most frequent first.
    """

    fingerprint: str
    """The tokenizer's fingerprint."""
    vocab_size: int
    max_prefix: int
    gram: int
    corpus_tokens: int
    """Tokens that were counted."""
    level_sizes: tuple[int, ...]
    """Number of nodes of each level: n-grams of 1, 2, ... tokens."""
    tokens_N: NDArray[Any]
    """Last token of each n-gram."""
    weights_N: NDArray[np.uint8]
    firsts_I: NDArray[np.uint32]
    """First child of each node above the last level, then the number of nodes."""
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

    def steps(self, node: int, width: int) -> list[Step]:
        """Return the edges to the `width` most frequent children."""
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


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds every token id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def node_bytes(vocab_size: int, order: int) -> NDArray[np.int64]:
    """Return the size of a node in bytes, by level."""
    sizes = np.full(order, token_type(vocab_size).itemsize + 1 + 4, dtype=np.int64)
    sizes[-1] -= 4  # leaves have no children
    return sizes


def save_trie(trie: GramTrie, file: Path) -> None:
    """Write a trie to a file, completely or not at all."""
    levels = [*trie.level_sizes, *[0] * (MOST_ORDER - len(trie.level_sizes))]
    token = token_type(trie.vocab_size)
    fields = _FIELDS.pack(
        MAGIC, VERSION, token.itemsize, trie.fingerprint.encode("ascii"), trie.vocab_size, trie.max_prefix, trie.gram,
        len(trie.level_sizes), trie.corpus_tokens, *levels,
    )  # fmt: skip
    arrays = [trie.firsts_I.astype("<u4"), trie.tokens_N.astype(token), trie.weights_N]
    digest = hashlib.sha256(fields)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    try:
        with written_whole(file) as partial, partial.open("xb") as opened:
            opened.write(fields + digest.digest())
            for array in arrays:
                opened.write(np.ascontiguousarray(array).data)
    except OSError as error:
        raise FailureError(
            f"cannot write {file} ({error.strerror or error}); free some space or choose another --out"
        ) from None


def load_trie(file: Path) -> GramTrie:
    """Check a file completely, and map it into memory."""
    name = f"corpus cache {str(file)!r}"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = opened.read(HEADER_SIZE)
    except OSError as error:
        raise UsageError(f"cannot read {name} ({error.strerror or error}); {_REMEDY}") from None
    if not header.startswith(MAGIC[: len(header)]) or not header:
        raise UsageError(f"{name} is not a corpus cache; {_REMEDY}")
    if len(header) < HEADER_SIZE:
        raise UsageError(f"{name} is truncated within its header; {_REMEDY}")
    _, version, token_size, mark, vocab_size, max_prefix, gram, order, counted, *levels = _FIELDS.unpack(header[: _FIELDS.size])
    if version != VERSION:
        raise UsageError(f"{name} has version {version}, this package reads version {VERSION}; {_REMEDY}")
    nodes, inner = sum(levels), sum(levels[: max(order - 1, 0)])
    wanted = HEADER_SIZE + 4 * (inner + 1) + nodes * (token_size + 1)
    if size != wanted:
        raise UsageError(f"{name} has {size} bytes instead of {wanted}: it is truncated or damaged; {_REMEDY}")
    bytes_X = np.memmap(file, dtype=np.uint8, mode="r")
    payload_X = bytes_X[HEADER_SIZE:].view(np.ndarray)  # a plain array over the mapped bytes is faster to index
    digest = hashlib.sha256(header[: _FIELDS.size])
    digest.update(payload_X.data)
    if digest.digest() != header[_FIELDS.size :]:
        raise UsageError(f"{name} is damaged: its checksum is wrong; {_REMEDY}")
    # Accidental damage has been found by now; the rest protects against forged files.
    lengths_fit = order == max_prefix + gram <= MOST_ORDER and min(max_prefix, gram, levels[0]) >= 1 and not any(levels[order:])
    if not lengths_fit or vocab_size > _MOST_TOKENS or token_size != token_type(vocab_size).itemsize:
        raise UsageError(f"{name} is inconsistent; {_REMEDY}")
    parts = np.split(payload_X, np.cumsum([4 * (inner + 1), nodes * token_size]))
    firsts_I, tokens_N, weights_N = parts[0].view("<u4"), parts[1].view(f"<u{token_size}"), parts[2]
    level_ends = np.cumsum(levels[:order])  # the children of a level's first node are at the beginning of the next level
    children_fit = (firsts_I[np.append(0, level_ends[:-1])] == level_ends).all() and (firsts_I[1:] >= firsts_I[:-1]).all()
    if not children_fit or int(tokens_N.max()) >= vocab_size:
        raise UsageError(f"{name} is inconsistent; {_REMEDY}")
    sizes, fingerprint = tuple(levels[:order]), mark.decode("ascii", "replace")
    return GramTrie(fingerprint, vocab_size, max_prefix, gram, counted, sizes, tokens_N, weights_N, firsts_I)
