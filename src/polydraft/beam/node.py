"""Texts of many beams as one tree of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
