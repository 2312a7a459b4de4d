"""Texts of many beams as one tree of tokens: where texts end, which are finished, and which end alike."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from polydraft.beam.options import EarlyStopping
from polydraft.engine import StopReason
from polydraft.engine.text import TextAssembler

_LONGEST_ENDING = 4
"""Tokens at the ends of texts that are compared at most."""
TRUSTED = 3
"""Texts that share so many tokens at their ends stand for each other; those that share fewer give a hint."""
_MOST_ENDINGS = 2**14
"""Endings that are kept; the oldest go first."""
_Ending = tuple[int, ...]


class Node:
    """A token below the end of the prompt; beams that begin alike share their first nodes."""

    __slots__ = ("children", "depth", "drafted", "ending", "log_prob", "parent", "token")

    def __init__(self, token: int, parent: "Node | None" = None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """New tokens up to and with this one; 0 is the prompt's last token."""
        self.children: dict[int, Node] = {}
        self.log_prob = 0.0
        """The target's own log-probability of this token, once a beam took it."""
        self.drafted = False
        """Whether a draft proposed it before a beam took it."""
        self.ending: tuple[int, ...] | None = None
        """The last few tokens of the text that ends here, once somebody asked."""

    def child(self, token: int) -> "Node":
        """Return the node of a further token, made if it is not there."""
        if token not in self.children:
            self.children[token] = Node(token, self)
        return self.children[token]

    def path(self) -> "list[Node]":
        """Return all nodes from the first new token down to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> list[int]:
        """Return the new tokens of the text that ends here."""
        return [node.token for node in self.path()]


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that is being continued."""

    node: Node
    score: float
    """Sum of the scores of its new tokens: log-probabilities, after temperature and truncation where there are some."""


def common_path(leaves: Sequence[Node]) -> list[Node]:
    """Return the nodes, from the first new token on, that all texts go through."""
    if not leaves:
        return []
    shared = leaves[0].path()
    for leaf in leaves[1:]:
        path = leaf.path()
        same = [one is other for one, other in zip(shared, path, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return shared


def with_ancestors(leaves: Iterable[Node]) -> set[Node]:
    """Return the leaves and all that lies above them, the prompt's last token included."""
    found: set[Node] = set()
    for leaf in leaves:
        node: Node | None = leaf
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


class Stops:
    """Texts of nodes, assembled as single texts are, once per node.

    Whether a text has ended is a function of its tokens alone, so that it is the same with and without a draft. Only nodes that
    are asked for are looked at; each decodes the last tokens of its text, from where its parent's assembler stands.

    Parameters
    ----------
    assembler : TextAssembler, optional
        One without tokens, which knows the stop strings; nothing is looked at without one, or without strings.
    """

    def __init__(self, assembler: TextAssembler | None = None) -> None:
        self._empty = assembler if assembler is not None and assembler.can_stop else None
        self._assemblers: dict[Node, TextAssembler] = {}

    @property
    def any(self) -> bool:
        """Whether there are stop strings."""
        return self._empty is not None

    def found(self, node: Node) -> bool:
        """Whether a stop string is complete with this node's token."""
        return self._empty is not None and self._at(node).stopped

    def text(self, node: Node) -> str:
        """Return the text that ends here, cut before its stop string."""
        return self._at(node).text

    def keep(self, leaves: Iterable[Node]) -> None:
        """Forget all texts but these and what will follow them."""
        self._assemblers = {leaf: self._assemblers[leaf] for leaf in leaves if leaf in self._assemblers}

    def _at(self, node: Node) -> TextAssembler:
        assert self._empty is not None, "no stop strings, no texts"
        missing: list[Node] = []
        while node.parent is not None and node not in self._assemblers:
            missing.append(node)
            node = node.parent
        assembler = self._assemblers.get(node, self._empty)
        for below in reversed(missing):
            assert not assembler.stopped, "nothing follows a text that has ended"
            assembler = assembler.fork()
            assembler.add(below.token)
            self._assemblers[below] = assembler
        return assembler


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text."""

    node: Node
    total: float
    """Sum of its tokens' scores."""
    score: float
    """That, over its length to the power of the length penalty."""
    reason: StopReason


class Pool:
    """The best finished texts so far.

    Parameters
    ----------
    capacity : int
        Texts kept; the run wants so many.
    length_penalty : float
        Scores are divided by the length to this power: above 0 favours long texts, because scores are negative.
    early_stopping : bool or "never"
        True ends as soon as the pool is full; False once no running beam, at its present length, would get in; "never" once
        none could at any length.
    longest : int
        Most new tokens.
    """

    def __init__(self, capacity: int, length_penalty: float, early_stopping: EarlyStopping, longest: int) -> None:
        self._capacity, self._penalty, self._early = capacity, length_penalty, early_stopping
        self._longest = longest
        self.best: list[Hypothesis] = []
        """Best first."""

    def add(self, node: Node, total: float, reason: StopReason) -> None:
        """Take in a finished text, if it is among the best."""
        score = total / node.depth**self._penalty
        self.best.append(Hypothesis(node, total, score, reason))
        self.best.sort(key=lambda one: -one.score)  # stable: of equals the earlier stays
        del self.best[self._capacity :]

    def is_done(self, best_running: float, length: int) -> bool:
        """Say whether running beams, the best of which has the score `best_running`, need not go on."""
        if len(self.best) < self._capacity:
            return False
        if self._early is True:
            return True
        reach = self._longest if self._early == "never" and self._penalty > 0 else length
        return not best_running / reach**self._penalty > self.best[-1].score


class Twins:
    """Nodes that the target has passed, found by the last tokens of their texts.

    Beams often differ in a word some tokens back only, or are what another beam was a step ago. Nearly every second text that
    a draft was asked about had a twin (beam search, six prompts), and the target's distribution after it is a good draft: it
    knows every token, and costs no pass.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._above_root = tuple(prompt[-1 - _LONGEST_ENDING : -1])
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
        while len(self._latest) > _MOST_ENDINGS:
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
            node.ending = (*above, node.token)[-_LONGEST_ENDING:]
        return node.ending
