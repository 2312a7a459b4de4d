"""Prompt lookup without a limit: the longest end of the text that was seen before, by a suffix automaton."""

from collections.abc import Sequence
from itertools import islice
from math import log

from polydraft.ngrams.automaton import ROOT, SuffixAutomaton
from polydraft.ngrams.cache import GRAM_CACHES, GramCache, GramMemory, Match, Way
from polydraft.ngrams.chances import match_chance
from polydraft.ngrams.distinct import Distinct
from polydraft.ngrams.lookup import copied
from polydraft.ngrams.options import GramOptions
from polydraft.ngrams.paths import Step, best_paths

_MOST_STATES = 8
"""Ends of the text, longest first, whose continuations are asked for in a round."""


class SuffixMemory(GramMemory):
    """A text as an automaton."""

    def __init__(self, by_count: bool) -> None:
        self._by_count = by_count
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        self._automaton = SuffixAutomaton()
        self._text: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        """Append certain text."""
        self._text.extend(tokens)
        self._automaton.extend(tokens)

    def matches(self, count: int, length: int) -> list[Match]:
        """Return what followed the longest end of the text that was seen before, then what followed shorter ones."""
        automaton, found, text = self._automaton, Distinct(count), self._text
        counts, latest = automaton.counts, automaton.latest

        def steps(state: int) -> list[Step]:
            return self._steps(state, count)

        def rest(state: int, depth: int) -> list[int] | None:
            # Seen once: all that can follow is what stands there.
            return copied(text, latest[state] - depth, length) if counts[state] == 1 else None

        state = automaton.links[automaton.whole]
        for _ in range(_MOST_STATES):
            if state <= ROOT:
                break
            for tokens in islice(best_paths(state, steps, length, rest), count):
                found.add(automaton.sizes[state], tokens)
                if found.full:
                    return found.matches
            state = automaton.links[state]
        return found.matches

    def end(self) -> tuple[int, int]:
        """Return the state of the longest end of the text that was seen before, and its tokens."""
        state = max(self._automaton.links[self._automaton.whole], ROOT)
        return state, self._automaton.sizes[state]

    def step(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        """Follow a token, by as long an end as it was ever seen after."""
        automaton, (state, size) = self._automaton, place
        while state > ROOT and token not in automaton.steps[state]:
            state = automaton.links[state]
            size = automaton.sizes[state]
        following = automaton.steps[state].get(token)
        return (ROOT, 0) if following is None else (following, size + 1)

    def ways(self, place: tuple[int, int], width: int) -> list[Way]:
        """Return what followed the longest end, then what followed shorter ones."""
        automaton, (state, size) = self._automaton, place
        found: dict[int, float] = {}
        for _ in range(_MOST_STATES):
            if state <= ROOT or len(found) >= width:
                break
            for _, token, _ in self._steps(state, width) if automaton.steps[state] else ():
                if token not in found and len(found) < width:
                    found[token] = match_chance(size, len(found))
            state = automaton.links[state]
            size = automaton.sizes[state]
        return list(found.items())

    def _steps(self, state: int, width: int) -> list[Step]:
        """Return the ways on, most frequent or most recent first; from the text's end as from its longest end seen before."""
        automaton = self._automaton
        while not automaton.steps[state]:
            state = automaton.links[state]
        if state <= ROOT:
            return []
        ways = automaton.steps[state]
        counts, latest = automaton.counts, automaton.latest
        if len(ways) == 1:
            return [(0.0, token, to) for token, to in ways.items()]
        if not self._by_count:
            newest = sorted([(-latest[to], token, to) for token, to in ways.items()])[:width]
            return [(float(rank), token, to) for rank, (_, token, to) in enumerate(newest)]
        # No two ways were seen last at the same place.
        commonest = sorted([(-counts[to], -latest[to], token, to) for token, to in ways.items()])
        total = -sum([number for number, _, _, _ in commonest])
        return [(log(total / -number), token, to) for number, _, token, to in commonest[:width]]


class SuffixCache(GramCache):
    """What followed the longest end of the text that was seen before (suffix automaton)."""

    name = "suffix"

    def __init__(self, options: GramOptions) -> None:
        self._by_count = options.prefer == "frequent"

    def open(self) -> SuffixMemory:
        """Return the memory of a new text."""
        return SuffixMemory(self._by_count)


@GRAM_CACHES.register("suffix")
def _build(options: GramOptions) -> SuffixCache:
    return SuffixCache(options)
