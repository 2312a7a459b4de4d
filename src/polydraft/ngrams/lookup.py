"""Prompt lookup: find the text's last few tokens earlier in the text, and propose what came next there.

In the spirit of `prompt_lookup_num_tokens` of Hugging Face transformers, which scans the text anew each round and takes the
first match; here an index grows with the text, the most recent match comes first, and there may be several.
"""

from collections.abc import Sequence

from polydraft.ngrams.cache import GRAM_CACHES, GramCache, GramMemory, Match, Way
from polydraft.ngrams.chances import match_chance
from polydraft.ngrams.distinct import Distinct
from polydraft.ngrams.options import GramOptions

_MOST_VISITS = 32
"""Earlier places of one n-gram that are looked at in a round: many of them continue alike."""
_MOST_COPIES = 8
"""Those of each length that are followed token by token."""
_Copy = tuple[int, int]
"""Tokens that match, and the place of the text after them."""


def copied(text: list[int], place: int, length: int) -> list[int]:
    """Return what stands at a place of the text; beyond the text's end the copy goes on with itself (as in LZ77)."""
    tokens = text[place : place + length]
    period = len(text) - place
    return tokens if length <= period else (tokens * -(-length // period))[:length]


class LookupMemory(GramMemory):
    """A text with, for every n-gram of it, the places after it."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._text: list[int] = []
        # Of n-grams with n = 1, 2, ...: the latest place after each, and for each place (from n on) the one before it. No
        # n-gram ends before place 1, so 0 means none.
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(self._max_match)]
        self._earlier: list[list[int]] = [[0] * size for size in range(1, self._max_match + 1)]

    def read(self, tokens: Sequence[int]) -> None:
        """Append certain text; an n-gram is indexed as soon as it has a continuation."""
        text, begun = self._text, len(self._text)
        text.extend(tokens)
        for size, (latest, earlier) in enumerate(zip(self._latest, self._earlier, strict=True), start=1):
            place = max(begun, size)
            window = text[place - size : -1]
            for gram in zip(*(window[start:] for start in range(size)), strict=False):
                earlier.append(latest.get(gram, 0))
                latest[gram] = place
                place += 1

    def matches(self, count: int, length: int) -> list[Match]:
        """Return what followed the text's last tokens before: longest match first, then most recent first."""
        found, text = Distinct(count), self._text
        for size in range(min(self._max_match, len(text)), 0, -1):
            place = self._latest[size - 1].get(tuple(text[-size:]), 0)
            for _ in range(_MOST_VISITS):
                if not place or found.full:
                    break
                found.add(size, copied(text, place, length))
                place = self._earlier[size - 1][place]
            if found.full:
                break
        return found.matches

    def end(self) -> tuple[tuple[int, ...], list[_Copy]]:
        """Return no further token, and the places after earlier occurrences of the text's end."""
        return (), self._copies(())

    def step(self, place: tuple[tuple[int, ...], list[_Copy]], token: int) -> tuple[tuple[int, ...], list[_Copy]]:
        """Append a token: copies that go on with it are longer by one, and where there are none the text is searched again."""
        path, copies = place
        longer = [(size + 1, at + 1) for size, at in copies if self._token(at, path) == token]
        path = (*path, token)
        return path, longer or self._copies(path)

    def ways(self, place: tuple[tuple[int, ...], list[_Copy]], width: int) -> list[Way]:
        """Return what comes next in the copies: longest match first, then most recent first."""
        path, copies = place
        found: dict[int, float] = {}
        for size, at in copies:
            token = self._token(at, path)
            if token not in found:
                found[token] = match_chance(size, len(found))
                if len(found) == width:
                    break
        return list(found.items())

    def _token(self, at: int, path: tuple[int, ...]) -> int:
        """Return the token at a place of text and path; a copy that comes to the text's end goes on with itself."""
        text = self._text
        return text[at] if at < len(text) else path[at - len(text)]

    def _copies(self, path: tuple[int, ...]) -> list[_Copy]:
        """Find the last tokens of text and path in the text: longest match first, then most recent first."""
        tail = (*self._text[-self._max_match :], *path[-self._max_match :])[-self._max_match :]
        copies, known = list[_Copy](), set[int]()
        for size in range(len(tail), 0, -1):
            place = self._latest[size - 1].get(tail[-size:], 0)
            for _ in range(_MOST_COPIES):
                if not place:
                    break
                if place not in known:
                    known.add(place)
                    copies.append((size, place))
                place = self._earlier[size - 1][place]
        return copies


class LookupCache(GramCache):
    """What followed the last few tokens earlier in the text (prompt lookup)."""

    name = "lookup"

    def __init__(self, options: GramOptions) -> None:
        self._max_match = options.max_match

    def open(self) -> LookupMemory:
        """Return the memory of a new text."""
        return LookupMemory(self._max_match)


@GRAM_CACHES.register("lookup")
def _build(options: GramOptions) -> LookupCache:
    return LookupCache(options)
