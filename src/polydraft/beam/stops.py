"""Which texts of a tree of tokens a stop string ends."""

from collections.abc import Iterable

from polydraft.beam.node import Node
from polydraft.engine.text import TextAssembler


class Stops:
    """Texts of nodes, assembled as single texts are, once a node.

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
