"""Which of a few static trees a round uses: the one that pays, or a fixed one for texts that must not depend on load.

What pays depends on the machine. So texts that a seed must reproduce have the *steady* tree in all rounds, or are limited to it
in rounds of a larger tree.
"""

import time
from collections.abc import Callable, Sequence

from polydraft.draft.ladder import Ladder, Rung, Timings
from polydraft.draft.speedup import tree_tokens
from polydraft.trees import Topology, parse_tree

_DEEPEST = 4
"""Most levels of smaller trees."""
FAIR = (0.55, 0.14, 0.06, 0.04)
"""Chances that an average draft's first child is accepted, its second, and so on, to compare trees."""
_STEADY = 3
"""Most nodes of the steady tree of a batch: those of a chain of two, which pays for 2 rows as well as for 64."""


def trees_by_load(largest: Topology) -> tuple[Topology, ...]:
    """Return a tree and the trees that may replace it when many rows share a pass, smallest first; the first is a lone root.

    Chains come before trees: another token pays best where it is likeliest, and a chain's tokens are read like a text and need
    not be moved when committed.
    """
    depth = min(largest.depth, _DEEPEST)
    found = [parse_tree("none"), *(parse_tree(f"chain:{length}") for length in sorted({1, 2, depth}) if length <= depth)]
    if depth > 1 and largest.max_children > 1:
        found.append(parse_tree("x".join(["2", *["1"] * (depth - 1)])))
    return (*(tree for tree in found if tree.num_nodes < largest.num_nodes), largest)


class TreeChoice:
    """The choice of one batch.

    Parameters
    ----------
    trees : sequence of Topology
        Smallest first; the last is the one that was asked for.
    timings : Timings
    rows : int
        Initial rows of the batch.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self, trees: Sequence[Topology], timings: Timings, rows: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.trees = tuple(trees)
        wider = max((tree.max_children for tree in trees), default=0) - len(FAIR)
        ranks = (*FAIR, *(FAIR[-1] / 2**rank for rank in range(1, wider + 1)))
        rungs = [Rung(tree.num_nodes, tree_tokens(tree, ranks) - 1) for tree in trees]
        self.ladder = Ladder(rungs, timings, rows, clock)
        self._company = rows > 1
        self.alone, self.steady, self.mixed = True, False, False
        """Whether rounds have one row, whether some rows must have the steady tree, and whether others need not."""
        self.rehearsed: int | None = None
        """Place of the tree of all rounds during a rehearsal; else None."""

    @property
    def place(self) -> int:
        """Place of the next round's tree."""
        if self.rehearsed is not None:
            return self.rehearsed
        if self.steady and not self.mixed:
            return self.steady_place
        place = self.ladder.largest if self.alone else self.ladder.place
        # A larger tree may contain the steady one; steady rows are then limited to that.
        return place if not self.steady or (place > self.steady_place and self.spine(place)) else self.steady_place

    @property
    def steady_place(self) -> int:
        """Place of the steady tree: the largest for a text alone, and in a batch a short chain, which is cheap for all."""
        small = [place for place, tree in enumerate(self.trees) if tree.num_nodes <= _STEADY]
        return small[-1] if self._company else self.ladder.largest

    def spine(self, place: int) -> tuple[int, ...]:
        """Return the nodes of a tree that make up the steady tree, root first; empty if the tree does not contain it.

        They are first children of first children, and so the first nodes of their levels.
        """
        steady, tree, nodes = self.trees[self.steady_place], self.trees[place], [0]
        while steady.max_children == 1 and len(nodes) < steady.num_nodes and tree.children[nodes[-1]]:
            nodes.append(tree.children[nodes[-1]][0])
        return tuple(nodes) if len(nodes) == steady.num_nodes else ()

    def settle(self, rows: int, accepted: Sequence[int], scheme: str = "") -> None:
        """Learn from a round and choose the next one's tree; parameters as for `Ladder.settle`."""
        self.ladder.settle(self.place, rows, accepted if self.rehearsed is None else (), scheme)

    def kinds(self, rows: int) -> list[int]:
        """Return the places of all trees that rounds with this many rows may have."""
        found = self.ladder.worth_a_trial(rows)
        return found if self.steady_place in found else [*found, self.steady_place]

    def mixed_kinds(self, rows: int) -> list[int]:
        """Return the places of trees in which some rows may be limited to the steady tree."""
        return [place for place in self.kinds(rows) if rows > 1 and place > self.steady_place and self.spine(place)]
