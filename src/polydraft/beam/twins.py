"""Texts that end alike: what the target said after one is a good guess for the other."""

from collections.abc import Iterator, Sequence

from polydraft.beam.node import Node

_LONGEST = 4
"""Tokens at the ends of texts that are compared at most."""
TRUSTED = 3
"""Texts that share so many tokens at their ends stand for each other; those that share fewer give a hint."""
_MOST = 2**14
"""Endings that are kept; the oldest go first."""

_Ending = tuple[int, ...]


class Twins:
    """Nodes that the target has passed, found by the last tokens of their texts.

    Beams often differ in a word some tokens back only, or are what another beam was a step ago. Nearly every second text that
    a draft was asked about had a twin (beam search, six prompts), and the target's law after it is a good draft: it knows every
    token, and costs no pass.

    Parameters
    ----------
    prompt : sequence of int
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._above_root = tuple(prompt[-1 - _LONGEST : -1])
        """The tokens before the prompt's last."""
        self._latest: dict[_Ending, Node] = {}

    def note(self, nodes: Sequence[Node]) -> None:
        """Take note of nodes that were passed."""
        for node in nodes:
            ending = self._ending(node)
            for length in range(1, len(ending) + 1):
                key = ending[-length:]
                self._latest.pop(key, None)  # so that it is the youngest
                self._latest[key] = node
        while len(self._latest) > _MOST:
            del self._latest[next(iter(self._latest))]

    def of(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Give out passed nodes whose texts end as this one does, with how many tokens they share, most first."""
        ending, latest, before = self._ending(node), self._latest, None
        for start in range(len(ending)):
            twin = latest.get(ending[start:])
            if twin is not None and twin is not before:
                before = twin
                yield twin, len(ending) - start

    def _ending(self, node: Node) -> _Ending:
        if node.ending is None:
            above = self._above_root if node.parent is None else self._ending(node.parent)
            node.ending = (*above, node.token)[-_LONGEST:]
        return node.ending
