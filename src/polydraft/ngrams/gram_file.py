"""A trie of n-grams on disk: a header, then its arrays as they are, so that a file is mapped into memory and not read.

::

    8 bytes    magic
    u32, u32   version; bytes of a token id (2 or 4)
    16 bytes   tokenizer fingerprint, ASCII
    u32 × 4    vocabulary size, longest prefix, continuation, number of levels
    u64        tokens that were counted
    u64 × 16   nodes of each level
    32 bytes   SHA-256 of everything before and after these 32 bytes
    arrays     first children (u32), tokens (u16 or u32), weights (u8); see `polydraft.ngrams.gram_trie`

All numbers are little-endian. Nothing in a file is ever executed or unpickled.
"""

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.atomic import written_whole
from polydraft.errors import FailureError, UsageError
from polydraft.ngrams.gram_trie import GramTrie
from polydraft.ngrams.options import MOST_ORDER

MAGIC, VERSION = b"PDGRAMS\n", 1
_FIELDS = struct.Struct(f"<8sII16sIIIIQ{MOST_ORDER}Q")
_DIGEST_SIZE = 32
HEADER_SIZE = _FIELDS.size + _DIGEST_SIZE
_MOST_TOKENS = 1 << 24
"""No tokenizer has more."""
_REMEDY = "make it again with: polydraft train corpus-cache"


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the narrowest type that holds every token id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def node_bytes(vocab_size: int, order: int) -> NDArray[np.int64]:
    """Return the bytes that a node of each level takes."""
    sizes = np.full(order, token_type(vocab_size).itemsize + 1 + 4, dtype=np.int64)
    sizes[-1] -= 4  # leaves have no children
    return sizes


def save_trie(trie: GramTrie, file: Path) -> None:
    """Write a file, whole or not at all."""
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
    """Map a file into memory, after a look at every byte of it."""
    name = f"corpus cache {str(file)!r}"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = opened.read(HEADER_SIZE)
    except OSError as error:
        raise UsageError(f"cannot read {name} ({error.strerror or error}); {_REMEDY}") from None
    if not header.startswith(MAGIC[: len(header)]) or not header:
        raise UsageError(f"{name} is no corpus cache; {_REMEDY}")
    if len(header) < HEADER_SIZE:
        raise UsageError(f"{name} is cut off within its header; {_REMEDY}")
    _, version, token_size, mark, vocab_size, max_prefix, gram, order, counted, *levels = _FIELDS.unpack(header[: _FIELDS.size])
    if version != VERSION:
        raise UsageError(f"{name} has version {version}, this package reads version {VERSION}; {_REMEDY}")
    nodes, inner = sum(levels), sum(levels[: max(order - 1, 0)])
    wanted = HEADER_SIZE + 4 * (inner + 1) + nodes * (token_size + 1)
    if size != wanted:
        raise UsageError(f"{name} has {size} bytes instead of {wanted}: it is cut off or damaged; {_REMEDY}")
    bytes_X = np.memmap(file, dtype=np.uint8, mode="r")
    payload_X = bytes_X[HEADER_SIZE:].view(np.ndarray)  # a plain array over the mapped bytes: quicker to index
    digest = hashlib.sha256(header[: _FIELDS.size])
    digest.update(payload_X.data)
    if digest.digest() != header[_FIELDS.size :]:
        raise UsageError(f"{name} is damaged: its checksum is wrong; {_REMEDY}")
    # What follows cannot go wrong by accident any more; it keeps files made with intent from leading astray.
    lengths_fit = order == max_prefix + gram <= MOST_ORDER and min(max_prefix, gram, levels[0]) >= 1 and not any(levels[order:])
    if not lengths_fit or vocab_size > _MOST_TOKENS or token_size != token_type(vocab_size).itemsize:
        raise UsageError(f"{name} contradicts itself; {_REMEDY}")
    parts = np.split(payload_X, np.cumsum([4 * (inner + 1), nodes * token_size]))
    firsts_I, tokens_N, weights_N = parts[0].view("<u4"), parts[1].view(f"<u{token_size}"), parts[2]
    level_ends = np.cumsum(levels[:order])  # the first node of a level has its children at the beginning of the next one
    children_fit = (firsts_I[np.append(0, level_ends[:-1])] == level_ends).all() and (firsts_I[1:] >= firsts_I[:-1]).all()
    if not children_fit or int(tokens_N.max()) >= vocab_size:
        raise UsageError(f"{name} contradicts itself; {_REMEDY}")
    sizes, fingerprint = tuple(levels[:order]), mark.decode("ascii", "replace")
    return GramTrie(fingerprint, vocab_size, max_prefix, gram, counted, sizes, tokens_N, weights_N, firsts_I)
