"""The sizes that rounds may have, and which one the next round has.

A captured round has one size: each is a capture of its own, so there are few, the rungs of a ladder. What fills a rung is the
builder's: a static tree, n-grams, the likeliest paths. Either the builder knows how much room it needs (`Ladder.holding`), or
the rung is chosen that brings most tokens over time (`Ladder.place`).

A pass costs by all its tokens, so the more rows share it the smaller the tree that pays, down to none. How long rounds take is
not modelled: they are timed as they run, for each rung and each number of rows, captures, launches and host work included.

The choice depends on past rounds only, so any choice is exact.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

_PRIOR, _WORTH_MEMORY = 16.0, 0.97
"""Weight of the first belief in the draft, in rounds, and decay per round of what was learnt."""
_DOUBT = 2048
"""Time constant, in rounds without drafts, by which an opinion of the draft fades, so that it is tried again."""
_SETTLED = 4
"""Rounds of one rung before they are timed: one may still be under way with the last rung, one runs uncaptured, and one is
captured."""
_SAMPLES = 4
"""Timed rounds before a rung is judged: the fastest of them, as disturbances only ever slow down."""
_TIME_MEMORY, _MOST_SLOWER = 0.95, 1.25
"""How much of a mean time is left after the next round, and how much slower than the mean a round counts at most."""
_FEW, _CHEAP, _DEAR = 16, 64, 256
"""Tokens of a pass, over all rows. Rungs that make it smaller than the first are too small; the second costs a GPU little more
than one token; larger than the last, a pass is too dear (on an H200, 144 tokens take twice as long as one, 208 three times)."""
_STAY = 1.02
"""How much better another rung must be: a change costs a round's head start."""
AGAIN = 4096
"""Rounds after which the rungs next to the best one are timed anew: texts grow longer, and other drafts fare better."""


@dataclass(frozen=True)
class Rung:
    """A size of rounds."""

    nodes: float
    """Of every row's tree, the root included, or on average where rows share them out."""
    depth: int = 0
    """Levels below the root."""
    fair: float = 0.0
    """Tokens that are accepted of a fair draft's tree of this size: they say how rungs compare."""


@dataclass(slots=True)
class _Timed:
    """What rounds of one rung took."""

    seconds: float
    samples: int = 1

    def note(self, seconds: float) -> None:
        self.samples += 1
        if self.samples <= _SAMPLES:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += (1 - _TIME_MEMORY) * (min(seconds, _MOST_SLOWER * self.seconds) - self.seconds)


class Timings:
    """How long rounds took on this machine, by what else matters to them and by rung; all batches of a drafter share it."""

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
        """Return what a round takes; None if too few were timed."""
        known = self._found.get((situation, place))
        return None if known is None or known.samples < _SAMPLES else known.seconds


class Ladder:
    """Rungs of one batch.

    The choice by time begins with the largest rung whose pass is cheap for so many rows, tries its neighbours, then theirs
    while they bring more tokens over time, and at last the root alone, so that none is kept that plain decoding beats. What is
    known of the machine already is not tried again.

    Parameters
    ----------
    rungs : sequence of Rung
        Smallest first.
    timings : Timings, optional
    rows : int
        Of the batch, at first.
    clock : callable
        Seconds.
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
        """Accepted tokens that a fair draft would have brought lately, and those that there were."""
        self.place = self.guess(rows)
        """Which rung the next round has, by what pays."""
        self._last: tuple[Hashable, int] | None = None
        self._settled = 0
        self._before: float | None = None

    @property
    def largest(self) -> int:
        """Place of the largest rung."""
        return len(self.rungs) - 1

    def holding(self, nodes: int) -> Rung:
        """Return the smallest rung with room for a tree; the largest if none has."""
        return next((rung for rung in self.rungs if rung.nodes >= nodes), self.rungs[-1])

    def fit(self, rows: int, scheme: str = "") -> None:
        """Choose the rung of the next round anew: it is shared by another number of rows."""
        self.pause()
        self.place = self.best(rows, (rows, scheme))

    def pause(self) -> None:
        """Say that the next round does not follow immediately: the time between is not measured."""
        self._before = None

    def settle(self, place: int, rows: int, accepted: Sequence[int], scheme: str = "") -> None:
        """Learn from a round and choose the next one's rung.

        Parameters
        ----------
        place : int
            Which rung it had.
        rows : int
            That shared the round, at work or not.
        accepted : sequence of int
            Drafted tokens that each row at work accepted; none of made-up texts, which say nothing of real ones.
        scheme : str
            How children are drawn, which takes its time as well.
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
        """Learn how many drafted tokens a round accepted, per row; a round without drafts fades earlier experience."""
        fair = self.rungs[place].fair
        if fair == 0:
            self._accepted += (self._expected - self._accepted) / _DOUBT
            return
        self._expected = _WORTH_MEMORY * self._expected + fair
        self._accepted = _WORTH_MEMORY * self._accepted + accepted

    def worth_a_trial(self, rows: int) -> list[int]:
        """Return the places of rungs that may pay for so many rows, largest first; the largest alone for one."""
        if rows == 1:
            return [self.largest]
        tokens = [rows * rung.nodes for rung in self.rungs]
        always = (0, self.guess(rows))
        return [place for place in range(self.largest, -1, -1) if place in always or _FEW <= tokens[place] <= _DEAR]

    def guess(self, rows: int) -> int:
        """Return the place of the largest rung whose pass is cheap."""
        return max(place for place, rung in enumerate(self.rungs) if place == 0 or rows * rung.nodes <= _CHEAP)

    def best(self, rows: int, situation: Hashable) -> int:
        """Return the rung that brings most tokens over time, or the next one to be tried."""
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
