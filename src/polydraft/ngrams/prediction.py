"""A predicted text as an n-gram memory: it is followed while the text agrees, and found again after an edit.

The place in the prediction moves on with the text. When the text deviates, its last tokens are looked up in the prediction:
the longest match counts, and of equal ones the next one after the place that was lost, as in comparing a file with its edited
copy. The probability of the next token depends on how many tokens match, and on how often such proposals were right in this
text, so a wrong prediction is no longer proposed after a few rounds.
"""

from bisect import bisect_left
from collections.abc import Sequence

from polydraft.ngrams.cache import GramCache, GramMemory, Way
from polydraft.sampling import SamplingParams

PREDICTION = "prediction"
_LONGEST, _LEAST = 16, 2
"""Most tokens of the text's end that are compared, and how many must match at a distant place."""
_NEAR = 8
"""Tokens after a lost place within which one matching token, or none, is enough: a word was replaced or left out."""
_MOST_VISITS = 32
"""Most places before the lost one, and after it, that are compared: repetitive text has many."""
_FIRM = 4
"""Matching tokens that make a place an anchor, where searches start; the beginning is the first anchor."""
_CHANCES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.97)
"""Initial probabilities of the next token, if 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31 and more tokens match."""
_WEIGHT, _MEMORY = 4.0, 0.99
"""Observations that the initial probabilities count for, and by how much earlier observations decay with each new one."""
_Place = tuple[int, int]
"""Index of the next predicted token, and how many tokens before it match."""


class _PredictionMemory(GramMemory):
    """Keeps the end of a text, and its place in the prediction."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._tail: tuple[int, ...] = ()
        self._follow_from_here(())

    def expect(self, params: SamplingParams) -> None:
        """Expect the prediction to follow from here on."""
        self._follow_from_here(params.predicted)

    def _follow_from_here(self, tokens: tuple[int, ...]) -> None:
        self._predicted, self._place, self._anchor = tokens, (0, _FIRM), 0
        self._after: dict[tuple[int, ...], list[int]] = {}
        for place in range(_LEAST, len(tokens)):
            self._after.setdefault(tuple(tokens[place - _LEAST : place]), []).append(place)
        self._hits = [_WEIGHT * chance for chance in _CHANCES]
        self._trials = [_WEIGHT] * len(_CHANCES)

    def read(self, tokens: Sequence[int]) -> None:
        if not self._predicted:
            self._tail = (*self._tail, *tokens)[-_LONGEST:]
            return
        for token in tokens:
            self._follow(token)

    def _follow(self, token: int) -> None:
        at, size = self._place
        self._tail = (*self._tail, token)[-_LONGEST:]
        if at < len(self._predicted):
            kind, right = _kind(size), self._predicted[at] == token
            self._trials[kind] = _MEMORY * self._trials[kind] + 1
            self._hits[kind] = _MEMORY * self._hits[kind] + right
            if right:
                self._place = at + 1, size + 1
                if size >= _FIRM:
                    self._anchor = at + 1
                return
        self._place = self._found(at) or self._guessed(at, token)

    def _found(self, lost: int) -> _Place | None:
        """Find the text's end in the prediction, but not at the place just lost, where repetitive text would stay for ever."""
        places, anchor = self._after.get(self._tail[-_LEAST:], []), self._anchor
        next_one = bisect_left(places, anchor)
        near = places[max(next_one - _MOST_VISITS, 0) : next_one + _MOST_VISITS]
        found = [(self._matching(place), place >= anchor, -abs(place - anchor), place) for place in near if place != lost]
        if not found:
            return None
        size, *_, place = max(found)
        return place, size

    def _matching(self, place: int) -> int:
        """Return how many tokens before a place equal the text's last ones."""
        size = _LEAST
        while size < min(place, len(self._tail)) and self._predicted[place - size - 1] == self._tail[-size - 1]:
            size += 1
        return size

    def _guessed(self, at: int, token: int) -> _Place:
        """Guess that the token skipped a few predicted ones, or replaced one; give up too far from the anchor."""
        end = self._anchor + _NEAR
        near = self._predicted[self._anchor : end]
        if token in near:
            return self._anchor + near.index(token) + 1, 1
        return (at + 1 if at < end else len(self._predicted)), 0

    def end(self) -> _Place:
        """Return the text's place in the prediction."""
        return self._place

    def step(self, place: _Place, token: int) -> _Place:
        """Move on, if the token is the predicted one; else, to the end, where nothing is proposed."""
        at, size = place
        right = at < len(self._predicted) and self._predicted[at] == token
        return (at + 1, size + 1) if right else (len(self._predicted), 0)

    def ways(self, place: _Place, width: int) -> Sequence[Way]:
        """Return the predicted token and its probability."""
        at, size = place
        if at >= len(self._predicted):
            return ()
        kind = _kind(size)
        return ((self._predicted[at], self._hits[kind] / self._trials[kind]),)


def _kind(size: int) -> int:
    return min(size.bit_length(), len(_CHANCES) - 1)


class PredictionCache(GramCache):
    """Proposes the request's prediction, see `SamplingParams.prediction`."""

    name = PREDICTION

    def open(self) -> _PredictionMemory:
        """Return the memory of a new text."""
        return _PredictionMemory()
