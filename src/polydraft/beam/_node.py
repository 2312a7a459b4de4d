"""Texts of many beams as one tree of tokens, where these texts end, and a pool of the best finished ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polydraft.beam.options import EarlyStopping
from polydraft.engine import StopReason
from polydraft.engine.text import TextAssembler


class Node:
    """A token after the prompt; beams with a common prefix share its nodes."""

    __slots__ = ("children", "depth", "drafted", "ending", "log_prob", "parent", "token")

    def __init__(self, token: int, parent: "Node | None" = None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Number of new tokens up to and including this one; 0 for the prompt's last token."""
        self.children: dict[int, Node] = {}
        self.log_prob = 0.0
        """The target's own log-probability of this token, set when a beam takes it."""
        self.drafted = False
        """Whether a draft proposed this token before a beam took it."""
        self.ending: tuple[int, ...] | None = None
        """The last few tokens of the text that ends here; None until computed."""

    def child(self, token: int) -> "Node":
        """Return the child with this token; create it if needed."""
        if token not in self.children:
            self.children[token] = Node(token, self)
        return self.children[token]

    def path(self) -> "list[Node]":
        """Return the nodes from the first new token to this one."""
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
    """A running text."""

    node: Node
    score: float
    """Sum of its new tokens' scores: log-probabilities after penalties, temperature and truncation."""


def common_path(leaves: Sequence[Node]) -> list[Node]:
    """Return the prefix that all texts share, as nodes starting with the first new token."""
    if not leaves:
        return []
    shared = leaves[0].path()
    for leaf in leaves[1:]:
        path = leaf.path()
        same = [one is other for one, other in zip(shared, path, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return shared


def with_ancestors(leaves: Iterable[Node]) -> set[Node]:
    """Return the leaves and all their ancestors, including the prompt's last token."""
    found: set[Node] = set()
    for leaf in leaves:
        node: Node | None = leaf
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


class Stops:
    """Finds stop strings in the texts of nodes, with the same assembler as single texts, once per node.

    Whether a stop string is complete depends only on the text's tokens, so drafts make no difference. Only nodes that are asked
    for are decoded, each by a fork of its parent's assembler. The given assembler has no tokens yet and knows the stop strings.
    """

    def __init__(self, assembler: TextAssembler | None = None) -> None:
        self._empty = assembler if assembler is not None and assembler.stop else None
        self._assemblers: dict[Node, TextAssembler] = {}

    def __len__(self) -> int:
        return len(self._assemblers)

    @property
    def any(self) -> bool:
        """Whether there are stop strings."""
        return self._empty is not None

    def found(self, node: Node) -> bool:
        """Whether this node's token completes a stop string."""
        return self._empty is not None and self._at(node).stopped

    def text(self, node: Node) -> str:
        """Return the text that ends here, cut before its stop string."""
        return self._at(node).text

    def keep(self, leaves: Iterable[Node]) -> None:
        """Forget the assembled texts of all other nodes."""
        self._assemblers = {leaf: self._assemblers[leaf] for leaf in leaves if leaf in self._assemblers}

    def _at(self, node: Node) -> TextAssembler:
        assert self._empty is not None, "texts are assembled only if there are stop strings"
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


@dataclass(frozen=True)
class Ends:
    """Where texts end: at an end-of-text token, a complete stop string, or the length limit."""

    eos_token_ids: frozenset[int] = frozenset()
    longest: int = 2**62
    """Maximum number of new tokens."""
    at_limit: StopReason = StopReason.LENGTH
    """The stop reason of texts that reach that limit."""
    stops: Stops = field(default_factory=Stops)

    def at(self, node: Node) -> bool:
        """Whether a text ends with this node."""
        return node.token in self.eos_token_ids or node.depth >= self.longest or self.stops.found(node)

    def reason(self, node: Node) -> StopReason:
        """Return why the text that ends with this node ends."""
        if node.token in self.eos_token_ids:
            return StopReason.EOS
        return StopReason.STOP if self.stops.found(node) else self.at_limit


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text."""

    node: Node
    total: float
    """Sum of its tokens' scores."""
    score: float
    """The total, divided by the length to the power of the length penalty."""
    reason: StopReason


class Pool:
    """The best finished texts so far, at most `capacity`.

    Scores are divided by the length to the power of `length_penalty`; values above 0 favour long texts, because scores are
    negative. With early stopping true, stop as soon as the pool is full; false, when no running beam would get in at its
    present length; "never", when none could at any length up to `longest`.
    """

    def __init__(self, capacity: int, length_penalty: float, early_stopping: EarlyStopping, longest: int) -> None:
        self._capacity, self._penalty, self._early = capacity, length_penalty, early_stopping
        self._longest = longest
        self.best: list[Hypothesis] = []
        """Best first."""

    def add(self, node: Node, total: float, reason: StopReason) -> None:
        """Add a finished text if it is among the best."""
        score = total / node.depth**self._penalty
        self.best.append(Hypothesis(node, total, score, reason))
        self.best.sort(key=lambda one: -one.score)  # stable: of equal scores the earlier one stays
        del self.best[self._capacity :]

    def is_done(self, best_running: float, length: int) -> bool:
        """Whether running beams, of which the best has score `best_running`, can be dropped."""
        if len(self.best) < self._capacity:
            return False
        if self._early is True:
            return True
        reach = self._longest if self._early == "never" and self._penalty > 0 else length
        return not best_running / reach**self._penalty > self.best[-1].score
