"""A cache of prefixes: copies of what contexts hold of texts, found by their tokens."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from polydraft.models.language_model import Context
from polydraft.models.memory import common_prefix
from polydraft.models.storage import Copies

BLOCK = 64
"""Tokens per block; the last block of a text may be shorter."""


@dataclass(eq=False, slots=True)
class _Piece:
    """A node of the tree: a block of tokens and what a context holds of it."""

    tokens: list[int] = field(default_factory=list)
    copies: Copies = field(default_factory=dict)
    above: "_Piece | None" = None
    below: dict[int, list["_Piece"]] = field(default_factory=dict)
    """Known continuations by their first token. Only whole blocks have any."""

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies.values())


class Prefixes:
    """A cache of prefixes, to be copied into the row of a text with the same beginning.

    Texts are cut into blocks, which form a tree: walking down it by the tokens of a text finds the longest prefix that any
    context of the same model has read. At the limit, the least recently used blocks are dropped, children before their
    parents.

    Target and draft have separate prefixes, so those of a target serve with any draft. Texts share prefixes only within a
    *space*.

    Parameters
    ----------
    most : int
        Bytes that all copies may take.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.nbytes = 0
        """Bytes that the copies take."""
        self._roots: dict[Hashable, _Piece] = {}
        """The root of each tree, by model and space."""
        self._recent: OrderedDict[_Piece, None] = OrderedDict()
        """All pieces, the least recently used first. Parents come after their children."""

    def known(self, context: Context, space: Hashable, text: Sequence[int]) -> int:
        """Return how many of a text's first tokens could be pasted into this context."""
        return sum(count for _, count in self._path(context, space, list(text)))

    def paste(self, context: Context, row: int, space: Hashable, text: Sequence[int]) -> int:
        """Copy the longest known prefix of a text into the first slots of a row; return its length."""
        if context.borrows:  # it reads the target's cache
            return len(text)
        path = list(self._path(context, space, list(text)))
        known = sum(count for _, count in path)
        if known:
            context.paste(row, [(piece.copies, count) for piece, count in path])
            self._touch([piece for piece, _ in path])
        return known

    def keep(self, context: Context, row: int, space: Hashable, text: Sequence[int], *, whole: bool) -> None:
        """Store copies of this text from the first slots of a row, up to its end or only its `whole` blocks."""
        if not context.portable:
            return
        stop = len(text) // BLOCK * BLOCK if whole else len(text)
        self._touch([piece for piece, _ in self._path(context, space, list(text))])
        piece, path = self._roots.setdefault((context.owner, space), _Piece()), list[_Piece]()
        for start in range(0, stop, BLOCK):
            tokens = list(text[start : min(start + BLOCK, stop)])
            beside = piece.below.get(tokens[0], [])
            found = next((one for one in beside if one.tokens[: len(tokens)] == tokens), None)
            if found is None:
                try:
                    found = _Piece(tokens, context.cache.copied(row, start, start + len(tokens)), piece)
                except torch.OutOfMemoryError:  # rounds need the memory more
                    self.clear()
                    return
                for shorter in [one for one in beside if tokens[: len(one.tokens)] == one.tokens]:
                    self._drop(shorter)
                if not self._makes_room(found.nbytes, path):
                    break
                self._add(found)
            path.append(found)
            piece = found
        self._touch(path)

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._recent.clear()
        self.nbytes = 0

    def _path(self, context: Context, space: Hashable, text: list[int]) -> Iterator[tuple[_Piece, int]]:
        """Yield the pieces of a text's longest known prefix, and how many tokens of each match the text."""
        piece, place = self._roots.get((context.owner, space)), 0
        while piece is not None and place < len(text):
            part = text[place : place + BLOCK]
            shared = [(common_prefix(one.tokens, part), one) for one in piece.below.get(part[0], ())]
            count, piece = max(shared, key=lambda pair: pair[0], default=(0, None))
            if piece is not None:
                yield piece, count
            if count < BLOCK:
                return
            place += count

    def _touch(self, path: Sequence[_Piece]) -> None:
        """Mark a text's pieces as used, the first of them as the most recent."""
        for piece in reversed(path):
            self._recent.move_to_end(piece)

    def _makes_room(self, nbytes: int, path: Sequence[_Piece]) -> bool:
        """Drop the least recently used pieces, but none of `path`, until `nbytes` more fit; return whether they do."""
        while self._recent and self.nbytes + nbytes > self.most:
            oldest = next(iter(self._recent))
            if oldest in path:
                return False
            self._drop(oldest)
        return self.nbytes + nbytes <= self.most

    def _add(self, piece: _Piece) -> None:
        assert piece.above is not None
        piece.above.below.setdefault(piece.tokens[0], []).append(piece)
        self._recent[piece] = None
        self.nbytes += piece.nbytes

    def _drop(self, piece: _Piece) -> None:
        assert piece.above is not None and not piece.below, "children must be dropped before their parents"
        beside = piece.above.below[piece.tokens[0]]
        beside.remove(piece)
        if not beside:
            del piece.above.below[piece.tokens[0]]
        del self._recent[piece]
        self.nbytes -= piece.nbytes
