"""The sizes that rounds may have, and which size the next round has.

Every size needs a capture of its own, so there are only a few: the rungs of a ladder. The builder decides what fills a rung: a
static tree, n-grams, the likeliest paths. It either knows how much room it needs (`Ladder.holding`), or takes the rung that
brings most tokens over time (`Ladder.place`).

A pass costs by all its tokens, so the more rows share it, the smaller the tree that pays, down to none. How long rounds take is
not modelled but timed as they run, for each rung and each number of rows, captures, launches and host work included.

The choice depends only on past rounds, so any choice is exact.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

_PRIOR, _WORTH_MEMORY = 16.0, 0.97
"""Weight of the initial belief in the draft, in rounds, and decay of experience per round."""
_DOUBT = 2048
"""Rounds without drafts over which the opinion of the draft fades (time constant), so that it is tried again."""
_SETTLED = 4
"""Rounds on a rung before they are timed: one may still be in flight with the last rung, one runs eagerly, and one is
captured."""
_SAMPLES = 4
"""Timed rounds before a rung is judged, by the fastest of them: disturbances only ever slow things down."""
_TIME_MEMORY, _MOST_SLOWER = 0.95, 1.25
"""Weight of the mean time against the next round's, and how much slower than the mean a round may count."""
_FEW, _CHEAP, _DEAR = 16, 64, 256
"""Tokens of a pass, over all rows. Rungs with smaller passes than the first are too small; the second costs a GPU little more
than one token; beyond the last, a pass is too expensive (on an H200, 144 tokens take twice as long as one, 208 three times)."""
_STAY = 1.02
"""How much better another rung must be to change: a change costs the head start of a round launched ahead."""
AGAIN = 4096
"""Rounds after which the rungs next to the best one are timed again: texts get longer, and another size may now be better."""


@dataclass(frozen=True)
class Rung:
    """A size of rounds."""

    nodes: int
    """Nodes of every row's tree, root included."""
    fair: float = 0.0
    """Accepted tokens of an average draft's tree of this size, to compare rungs."""


@dataclass(slots=True)
class _Timed:
    """Time per round of one rung."""

    seconds: float
    samples: int = 1

    def note(self, seconds: float) -> None:
        self.samples += 1
        if self.samples <= _SAMPLES:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += (1 - _TIME_MEMORY) * (min(seconds, _MOST_SLOWER * self.seconds) - self.seconds)


class Timings:
    """How long rounds take on this machine, by situation and rung; shared by all batches of a drafter."""

    def __init__(self) -> None:
        self._found: dict[tuple[Hashable, int], _Timed] = {}
        self._rounds: dict[Hashable, int] = {}

    def note(self, situation: Hashable, place: int, seconds: float) -> None:
        """Record the time of one round."""
        known = self._found.get((situation, place))
        if known is None:
            self._found[situation, place] = _Timed(seconds)
        else:
            known.note(seconds)
        self._rounds[situation] = self._rounds.get(situation, 0) + 1
        if self._rounds[situation] % AGAIN == 0:
            for neighbour in (place - 1, place + 1):
                self._found.pop((situation, neighbour), None)

    def seconds(self, situation: Hashable, place: int) -> float | None:
        """Return the seconds of a round; None if too few were timed."""
        known = self._found.get((situation, place))
        return None if known is None or known.samples < _SAMPLES else known.seconds


class Ladder:
    """The rungs of one batch.

    The choice by time starts with the largest rung whose pass is cheap for the number of rows. It tries its neighbours, goes on
    as long as they bring more tokens over time, and tries the root alone last, so that plain decoding wins if it is best. Rungs
    already timed on this machine are not tried again.

    Parameters
    ----------
    rungs : sequence of Rung
        Smallest first.
    timings : Timings, optional
    rows : int
        Initial rows of the batch.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        timings: Timings | None = None,
        rows: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rungs, self._timings, self.clock = tuple(rungs), timings or Timings(), clock
        self._expected = self._accepted = _PRIOR * self.rungs[-1].fair
        """Recently accepted tokens: what an average draft would have brought, and what this one did."""
        self.place = self.guess(rows)
        """The rung that pays most, for the next round."""
        self._last: tuple[Hashable, int] | None = None
        self._settled = 0
        self._before: float | None = None

    @property
    def largest(self) -> int:
        """Place of the largest rung."""
        return len(self.rungs) - 1

    def holding(self, nodes: int) -> Rung:
        """Return the smallest rung with room for a tree of this many nodes; the largest rung if none has."""
        return next((rung for rung in self.rungs if rung.nodes >= nodes), self.rungs[-1])

    def fit(self, rows: int, scheme: str = "") -> None:
        """Choose the next round's rung after the number of rows has changed."""
        self.pause()
        self.place = self.best(rows, (rows, scheme))

    def pause(self) -> None:
        """Do not time the gap before the next round, which does not follow immediately."""
        self._before = None

    def settle(self, place: int, rows: int, accepted: Sequence[int], scheme: str = "") -> None:
        """Learn from a round and choose the next one's rung.

        Parameters
        ----------
        place : int
            The round's rung.
        rows : int
            Rows of the round, running or idle.
        accepted : sequence of int
            Drafted tokens that each running row accepted; leave out made-up texts, which say nothing about real ones.
        scheme : str
            How children are drawn, which affects the time.
        """
        now, situation = self.clock(), (rows, scheme)
        self._settled = self._settled + 1 if (situation, place) == self._last else 1
        self._last = situation, place
        if self._settled > 1 and accepted:
            self._learn(place, sum(accepted) / len(accepted))
        if self._settled > _SETTLED and self._before is not None:
            self._timings.note(situation, place, now - self._before)
        self._before = now
        self.place = self.best(rows, situation)

    def _learn(self, place: int, accepted: float) -> None:
        """Learn how many drafted tokens a round accepted per row; a round without drafts lets experience fade."""
        fair = self.rungs[place].fair
        if fair == 0:
            self._accepted += (self._expected - self._accepted) / _DOUBT
            return
        self._expected = _WORTH_MEMORY * self._expected + fair
        self._accepted = _WORTH_MEMORY * self._accepted + accepted

    def worth_a_trial(self, rows: int) -> list[int]:
        """Return the places of rungs that may pay for so many rows, largest first; for one row, only the largest."""
        if rows == 1:
            return [self.largest]
        tokens = [rows * rung.nodes for rung in self.rungs]
        always = (0, self.guess(rows))
        return [place for place in range(self.largest, -1, -1) if place in always or _FEW <= tokens[place] <= _DEAR]

    def guess(self, rows: int) -> int:
        """Return the place of the largest rung whose pass is cheap."""
        return max(place for place, rung in enumerate(self.rungs) if place == 0 or rows * rung.nodes <= _CHEAP)

    def best(self, rows: int, situation: Hashable) -> int:
        """Return the place of the rung that brings most tokens over time, or of the next one to try."""
        worth = self._accepted / max(self._expected, 1e-9)
        known = {place: self._timings.seconds(situation, place) for place in range(len(self.rungs))}
        rates = {place: (1 + worth * self.rungs[place].fair) / seconds for place, seconds in known.items() if seconds}
        if not rates:
            return self.guess(rows)
        best = max(rates, key=lambda place: rates[place])
        for place in (best + 1, best - 1, 0):
            if place in known and known[place] is None and place in self.worth_a_trial(rows):
                return place
        return best if rates[best] > _STAY * rates.get(self.place, 0.0) else self.place
