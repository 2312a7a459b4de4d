"""Which of a few static trees the rounds of a batch have: the one that brings most tokens over time.

A pass costs by all its tokens, so the more rows share it the smaller the tree that pays, down to none. How long rounds take is
not modelled: they are timed as they run, for each tree and each number of rows, captures, launches and host work included.

The choice depends on past rounds only, so any choice is exact. It depends on the machine, too: texts that a seed must give
again have one and the same tree in all their rounds.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from polydraft.draft.speedup import tree_tokens
from polydraft.trees import Topology, parse_tree

_DEEPEST = 4
"""Levels of smaller trees at most."""
_FAIR = (0.55, 0.14, 0.06, 0.04)
"""Chances that a fair draft's first child is accepted, its second, and so on: they say how trees compare, see `_worth`."""
_PRIOR, _WORTH_MEMORY = 16.0, 0.97
"""Rounds that the first belief in the draft weighs, and how much of what a round taught is left after the next one."""
_DOUBT = 2048
"""Rounds without drafts after which two thirds of a bad, or a good, opinion of the draft are gone: then it is tried again."""
_SETTLED = 4
"""Rounds of one tree before they are timed: one may still be under way with the last tree, one runs uncaptured, and one is
captured."""
_SAMPLES = 4
"""Timed rounds before a tree is judged: the fastest of them, as disturbances only ever slow down."""
_TIME_MEMORY, _MOST_SLOWER = 0.95, 1.25
"""How much of a mean time is left after the next round, and how much slower than the mean a round counts at most."""
_FEW, _CHEAP, _DEAR = 16, 64, 256
"""Tokens of a pass, over all rows. Trees that make it smaller than the first are too small; the second costs a GPU little more
than one token; larger than the last, a pass is too dear (on an H200, 144 tokens take twice as long as one, 208 three times)."""
_STEADY = 3
"""Most nodes of the tree that texts with a seed have in company: those of a chain of two, which pays for 2 rows as for 64."""
_STAY = 1.02
"""How much better another tree must be: a change costs a round's head start."""
_AGAIN = 4096
"""Rounds after which the trees next to the best one are timed anew: texts grow longer, and other drafts fare better."""


def smaller_trees(largest: Topology) -> tuple[Topology, ...]:
    """Return the trees that may stand in for one where many rows share a pass, smallest first; the first is the root alone.

    Chains come before trees: a token more per row is cheapest where it is likeliest, and a chain's tokens are read as a text,
    and kept where they are.
    """
    depth = min(largest.depth, _DEEPEST)
    found = [parse_tree("none"), *(parse_tree(f"chain:{length}") for length in sorted({1, 2, depth}) if length <= depth)]
    if depth > 1 and largest.max_children > 1:
        found.append(parse_tree("x".join(["2", *["1"] * (depth - 1)])))
    return tuple(tree for tree in found if tree.num_nodes < largest.num_nodes)


@dataclass(slots=True)
class _Timed:
    """What rounds of one tree took."""

    seconds: float
    samples: int = 1

    def note(self, seconds: float) -> None:
        self.samples += 1
        if self.samples <= _SAMPLES:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += (1 - _TIME_MEMORY) * (min(seconds, _MOST_SLOWER * self.seconds) - self.seconds)


class Timings:
    """How long rounds took on this machine, by what else matters to them and by tree; all batches of a drafter share it."""

    def __init__(self) -> None:
        self._found: dict[tuple[Hashable, int], _Timed] = {}
        self._rounds: dict[Hashable, int] = {}

    def note(self, situation: Hashable, place: int, seconds: float) -> None:
        """Take note of one round."""
        known = self._found.get((situation, place))
        if known is None:
            self._found[situation, place] = _Timed(seconds)
        else:
            known.note(seconds)
        self._rounds[situation] = self._rounds.get(situation, 0) + 1
        if self._rounds[situation] % _AGAIN == 0:
            for neighbour in (place - 1, place + 1):
                self._found.pop((situation, neighbour), None)

    def seconds(self, situation: Hashable, place: int) -> float | None:
        """Return what a round takes; None if too few were timed."""
        known = self._found.get((situation, place))
        return None if known is None or known.samples < _SAMPLES else known.seconds


class TreeChoice:
    """The choice of one batch.

    It begins with the largest tree whose pass is cheap for so many rows, tries its neighbours, then theirs while they bring
    more tokens over time, and at last the root alone, so that none is kept that plain decoding beats. What is known of the
    machine already is not tried again.

    Parameters
    ----------
    trees : sequence of Topology
        Smallest first; the last is the one that was asked for.
    timings : Timings
    rows : int
        Of the batch, at first.
    clock : callable
        Seconds.
    """

    def __init__(
        self, trees: Sequence[Topology], timings: Timings, rows: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.trees, self._timings, self._clock = tuple(trees), timings, clock
        wider = max((tree.max_children for tree in trees), default=0) - len(_FAIR)
        fair = (*_FAIR, *(_FAIR[-1] / 2**rank for rank in range(1, wider + 1)))
        self._fair = [tree_tokens(tree, fair) - 1 for tree in trees]
        self._expected = self._accepted = _PRIOR * self._fair[-1]
        """Accepted tokens that a fair draft would have brought lately, and those that there were."""
        self.largest = len(self.trees) - 1
        self._place = self._guess(rows)
        self._last: tuple[Hashable, int] | None = None
        self._settled = 0
        self._before: float | None = None
        self._company = rows > 1
        self.alone, self.steady, self.mixed = True, False, False
        """Whether rounds have one row, whether some row's tree must be the same whatever pays, and whether others' need not."""
        self.rehearsed: int | None = None
        """Place of the tree that all rounds have whatever pays: in rehearsals."""

    @property
    def place(self) -> int:
        """Which tree the next round has."""
        if self.rehearsed is not None:
            return self.rehearsed
        if self.steady and not self.mixed:
            return self.steady_place
        place = self.largest if self.alone else self._place
        # A larger tree has room for the steady one, to which its rows are then limited.
        return place if not self.steady or (place > self.steady_place and self.spine(place)) else self.steady_place

    @property
    def steady_place(self) -> int:
        """Tree of texts whose trees must not depend on load or machine: in company a short chain, which is cheap for all."""
        small = [place for place, tree in enumerate(self.trees) if tree.num_nodes <= _STEADY]
        return small[-1] if self._company else self.largest

    def spine(self, place: int) -> tuple[int, ...]:
        """Return the nodes of a tree that stand for those of the steady one, root first; none where they are not all there.

        They are the first children of first children, and so the first nodes of their levels.
        """
        steady, tree, nodes = self.trees[self.steady_place], self.trees[place], [0]
        while steady.max_children == 1 and len(nodes) < steady.num_nodes and tree.children[nodes[-1]]:
            nodes.append(tree.children[nodes[-1]][0])
        return tuple(nodes) if len(nodes) == steady.num_nodes else ()

    def fit(self, rows: int, scheme: str = "") -> None:
        """Choose the tree of the next round anew: it is shared by another number of rows."""
        self.pause()
        self._place = self._best(rows, (rows, scheme))

    def pause(self) -> None:
        """Take note that the next round does not follow the last one at once."""
        self._before = None

    def settle(self, rows: int, accepted: Sequence[int], scheme: str = "") -> None:
        """Learn from a round and choose the next one's tree.

        Parameters
        ----------
        rows : int
            That shared the round, at work or not.
        accepted : sequence of int
            Drafted tokens that each row at work accepted.
        scheme : str
            How children are drawn, which takes its time as well.
        """
        now, situation = self._clock(), (rows, scheme)
        here = situation, self.place
        self._settled = self._settled + 1 if here == self._last else 1
        self._last = here
        if self._settled > 1 and accepted and self.rehearsed is None:  # made-up texts say nothing of real ones
            self._learn(sum(accepted) / len(accepted))
        if self._settled > _SETTLED and self._before is not None:
            self._timings.note(situation, self.place, now - self._before)
        self._before = now
        self._place = self._best(rows, situation)

    def _learn(self, accepted: float) -> None:
        """Take note of how many drafted tokens a round accepted, per row; without drafts, forget a little of what was."""
        fair = self._fair[self.place]
        if fair == 0:
            self._accepted += (self._expected - self._accepted) / _DOUBT
            return
        self._expected = _WORTH_MEMORY * self._expected + fair
        self._accepted = _WORTH_MEMORY * self._accepted + accepted

    @property
    def _worth(self) -> float:
        """Accepted tokens for each that a fair draft would have brought."""
        return self._accepted / max(self._expected, 1e-9)

    def worth_a_trial(self, rows: int) -> list[int]:
        """Return the places of trees that may pay for so many rows, largest first; the largest alone for one."""
        if rows == 1:
            return [self.largest]
        tokens = [rows * tree.num_nodes for tree in self.trees]
        always = (0, self._guess(rows))
        return [place for place in range(self.largest, -1, -1) if place in always or _FEW <= tokens[place] <= _DEAR]

    def kinds(self, rows: int) -> list[int]:
        """Return the places of all trees that rounds of so many rows may have."""
        found = self.worth_a_trial(rows)
        return found if self.steady_place in found else [*found, self.steady_place]

    def mixed_kinds(self, rows: int) -> list[int]:
        """Return those of them in which some rows may be limited to the steady tree."""
        return [place for place in self.kinds(rows) if rows > 1 and place > self.steady_place and self.spine(place)]

    def _guess(self, rows: int) -> int:
        """Return the place of the largest tree whose pass is cheap."""
        return max(place for place, tree in enumerate(self.trees) if place == 0 or rows * tree.num_nodes <= _CHEAP)

    def _best(self, rows: int, situation: Hashable) -> int:
        """Return the tree that brings most tokens over time, or the next one to be tried."""
        known = {place: self._timings.seconds(situation, place) for place in range(len(self.trees))}
        rates = {place: (1 + self._worth * self._fair[place]) / seconds for place, seconds in known.items() if seconds}
        if not rates:
            return self._guess(rows)
        best = max(rates, key=lambda place: rates[place])
        for place in (best + 1, best - 1, 0):
            if place in known and known[place] is None and place in self.worth_a_trial(rows):
                return place
        return best if rates[best] > _STAY * rates.get(self._place, 0.0) else self._place
