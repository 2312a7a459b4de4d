"""Which of a few static trees a round uses: the one that pays on this machine for so many rows."""

import time
from collections.abc import Callable, Sequence

from polydraft.draft.ladder import Ladder, Rung, Timings
from polydraft.draft.speedup import tree_tokens
from polydraft.trees import Topology, parse_tree

_DEEPEST = 4
"""Most levels of smaller trees."""
FAIR = (0.55, 0.14, 0.06, 0.04)
"""Chances that an average draft's first child is accepted, its second, and so on, to compare trees."""


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
        self.alone = True
        """Whether rounds have one row."""
        self.rehearsed: int | None = None
        """Place of the tree of all rounds during a rehearsal; else None."""

    @property
    def place(self) -> int:
        """Place of the next round's tree."""
        if self.rehearsed is not None:
            return self.rehearsed
        return self.ladder.largest if self.alone else self.ladder.place

    def settle(self, rows: int, accepted: Sequence[int], scheme: str = "") -> None:
        """Learn from a round and choose the next one's tree; parameters as for `Ladder.settle`."""
        self.ladder.settle(self.place, rows, accepted if self.rehearsed is None else (), scheme)

    def kinds(self, rows: int) -> list[int]:
        """Return the places of all trees that rounds with this many rows may have."""
        return self.ladder.worth_a_trial(rows)
