"""Prompt lookup: find the text's last tokens earlier in the text, and propose what followed there.

The cache `lookup` matches a few tokens, by an index of n-grams; `suffix` as many as possible, by a suffix automaton. Hugging
Face's `prompt_lookup_num_tokens` scans the text in each round and takes the first match. Here an index grows with the text, and
several matches are followed, the most recent first.
"""

from collections.abc import Iterable, Iterator, Sequence

from polydraft.ngrams.cache import GRAM_CACHES, GramCache, GramMemory, GramOptions, Way, ways_by_match

ROOT = 0
"""The automaton's state for the empty n-gram."""

MOST_COPIES = 16
"""Most earlier occurrences that are followed: the longest matches, and among them the most recent."""
_MOST_STATES = 8
"""Most ends of the text whose continuations are proposed, longest first."""
_MOST_UPDATES = 32
"""Most states whose counts are updated per token, longest first. In ordinary text, fewer are affected. Without a limit,
repetitive text (a thousand times the same token) would take quadratic time; with it, its counts are slightly too low."""
_Copy = tuple[int, int]
"""Number of tokens that match, and the position in the text after them."""


class _LookupMemory(GramMemory):
    """Keeps a text with an index of its n-grams: the places after each."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        self.reset()

    def reset(self) -> None:
        self._text: list[int] = []
        # For n = 1, 2, ...: the latest place after each n-gram, and for each place the previous one after the same n-gram. No
        # n-gram ends before place 1, so 0 means none.
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(self._max_match)]
        self._earlier: list[list[int]] = [[0] * size for size in range(1, self._max_match + 1)]

    def read(self, tokens: Sequence[int]) -> None:
        """Append text; an n-gram is indexed once it has a continuation."""
        text, begun = self._text, len(self._text)
        text.extend(tokens)
        for size, (latest, earlier) in enumerate(zip(self._latest, self._earlier, strict=True), start=1):
            place = max(begun, size)
            window = text[place - size : -1]
            for gram in zip(*(window[start:] for start in range(size)), strict=False):
                earlier.append(latest.get(gram, 0))
                latest[gram] = place
                place += 1

    def end(self) -> tuple[tuple[int, ...], list[_Copy]]:
        """Return an empty path, and the places after earlier occurrences of the text's end."""
        return (), self._copies(())

    def step(self, place: tuple[tuple[int, ...], list[_Copy]], token: int) -> tuple[tuple[int, ...], list[_Copy]]:
        """Append a token: copies that continue with it match one more token. If none does, search the text again."""
        path, copies = place
        longer = [(size + 1, at + 1) for size, at in copies if self._token(at, path) == token]
        path = (*path, token)
        return path, longer or self._copies(path)

    def ways(self, place: tuple[tuple[int, ...], list[_Copy]], width: int) -> list[Way]:
        """Return what comes next in the copies: longest match first, then most recent first."""
        path, copies = place
        return ways_by_match(((size, self._token(at, path)) for size, at in copies), width)

    def _token(self, at: int, path: tuple[int, ...]) -> int:
        """Return the token at a place of text and path. A copy that reaches the text's end repeats itself."""
        text = self._text
        return text[at] if at < len(text) else path[at - len(text)]

    def _copies(self, path: tuple[int, ...]) -> list[_Copy]:
        """Find the last tokens of text and path in the text: longest match first, then most recent first."""
        tail = (*self._text[-self._max_match :], *path[-self._max_match :])[-self._max_match :]
        copies, known = list[_Copy](), set[int]()
        for size in range(len(tail), 0, -1):
            place = self._latest[size - 1].get(tail[-size:], 0)
            while place and len(copies) < MOST_COPIES:
                if place not in known:
                    known.add(place)
                    copies.append((size, place))
                place = self._earlier[size - 1][place]
        return copies


@GRAM_CACHES.register("lookup")
class LookupCache(GramCache):
    """Proposes what followed the last few tokens earlier in the text (prompt lookup)."""

    name = "lookup"
    has_tensors = True

    def __init__(self, options: GramOptions) -> None:
        super().__init__(options)
        self.longest_match = options.max_match

    def open(self) -> _LookupMemory:
        """Return the memory of a new text."""
        return _LookupMemory(self._options.max_match)


class SuffixAutomaton:
    """A growing text and all its n-grams, with the count and the last occurrence of each.

    It is built token by token, in amortised constant time (Blumer et al. 1985). A state stands for all n-grams that end at the
    same places; its link leads to the state of their longest suffix that also occurs elsewhere.
    """

    def __init__(self) -> None:
        self.text_size = 0
        self.whole = ROOT
        """State of the whole text. Its link leads to the longest end of the text that also occurs elsewhere."""
        # By state:
        self.steps: list[dict[int, int]] = [{}]
        """Next tokens, with the states that they lead to."""
        self.links: list[int] = [-1]
        self.sizes: list[int] = [0]
        """Length of the longest n-gram."""
        self.counts: list[int] = [0]
        """How often the n-grams have occurred."""
        self.latest: list[int] = [0]
        """Place after their last occurrence."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        steps, links, sizes, counts, latest = self.steps, self.links, self.sizes, self.counts, self.latest
        whole, size = self.whole, self.text_size
        for token in tokens:
            size += 1
            new, state = len(links), whole
            steps.append({})
            links.append(ROOT)
            sizes.append(size)
            counts.append(1)
            latest.append(size)
            while state >= 0 and token not in (ways := steps[state]):
                ways[token] = new
                state = links[state]
            if state >= 0:
                known = steps[state][token]
                links[new] = known if sizes[known] == sizes[state] + 1 else self._split(state, token, known)
            whole, state = new, links[new]
            for _ in range(_MOST_UPDATES):
                if state <= ROOT:
                    break
                counts[state] += 1
                latest[state] = size
                state = links[state]
        self.whole, self.text_size = whole, size

    def _split(self, state: int, token: int, known: int) -> int:
        """Move the shorter n-grams of a state, which now occur at one more place, to a new state, and return it."""
        steps, links = self.steps, self.links
        part = len(links)
        steps.append(steps[known].copy())
        links.append(links[known])
        self.sizes.append(self.sizes[state] + 1)
        self.counts.append(self.counts[known])
        self.latest.append(self.latest[known])
        links[known] = part
        while state >= 0 and steps[state].get(token) == known:
            steps[state][token] = part
            state = links[state]
        return part


class _SuffixMemory(GramMemory):
    """Keeps a text as an automaton."""

    def __init__(self, by_count: bool) -> None:
        self._by_count = by_count
        self.reset()

    def reset(self) -> None:
        self._automaton = SuffixAutomaton()

    def read(self, tokens: Sequence[int]) -> None:
        self._automaton.extend(tokens)

    def end(self) -> tuple[int, int]:
        """Return the state and the length of the longest end of the text that has occurred before."""
        state = max(self._automaton.links[self._automaton.whole], ROOT)
        return state, self._automaton.sizes[state]

    def step(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        """Follow a token from the longest end that it has ever followed."""
        automaton, (state, size) = self._automaton, place
        while state > ROOT and token not in automaton.steps[state]:
            state = automaton.links[state]
            size = automaton.sizes[state]
        following = automaton.steps[state].get(token)
        return (ROOT, 0) if following is None else (following, size + 1)

    def ways(self, place: tuple[int, int], width: int) -> list[Way]:
        """Return what followed the longest end, then what followed shorter ends."""
        return ways_by_match(self._following(*place), width)

    def _following(self, state: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield the length of each end, longest first, with each token that followed it, most frequent or recent first."""
        automaton = self._automaton
        counts, latest = automaton.counts, automaton.latest
        for _ in range(_MOST_STATES):
            if state <= ROOT:
                return
            following = automaton.steps[state].items()
            # No two tokens were last seen at the same place.
            best = sorted([(-counts[to] if self._by_count else 0, -latest[to], token) for token, to in following])
            yield from ((size, token) for *_, token in best)
            state = automaton.links[state]
            size = automaton.sizes[state]


@GRAM_CACHES.register("suffix")
class SuffixCache(GramCache):
    """Proposes what followed the longest end of the text that occurs earlier (suffix automaton)."""

    name = "suffix"
    has_tensors = True
    longest_match = 12
    """Longer matches are no better. On a device, matches are those of `lookup`, only longer: the most recent come first."""

    def open(self) -> _SuffixMemory:
        """Return the memory of a new text."""
        return _SuffixMemory(by_count=self._options.prefer == "frequent")
