"""The suffix automaton of a growing text: every n-gram of it, of any length, with how often and when last it was seen.

Built token by token in amortised constant time (Blumer et al. 1985). A state stands for all n-grams that end at the same
places; its link leads to the longest end of them that was seen at further places as well.
"""

from collections.abc import Iterable

ROOT = 0

_MOST_UPDATES = 32
"""States whose figures are brought up to date with a token, longest first. Ordinary text has fewer ends that were seen before;
repetitive text (a thousand times the same token) would take quadratic time otherwise, and gets figures a little too low."""


class SuffixAutomaton:
    """A text and all its n-grams."""

    def __init__(self) -> None:
        self.text_size = 0
        self.whole = ROOT
        """State of the whole text; its link is the state of the longest end of the text that stands elsewhere too."""
        # By state.
        self.steps: list[dict[int, int]] = [{}]
        """Tokens that were seen next, with the states they lead to."""
        self.links: list[int] = [-1]
        self.sizes: list[int] = [0]
        """Tokens of its longest n-gram."""
        self.counts: list[int] = [0]
        """How often its n-grams were seen."""
        self.latest: list[int] = [0]
        """Place after the last time they were seen."""

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
        """Take the shorter n-grams of a state, which are now seen at one place more, out of it into a state of their own."""
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
