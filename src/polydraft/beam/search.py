"""Deterministic beam search, speculatively: the same texts and scores as without a draft."""

import math
from itertools import islice
from typing import ClassVar

import numpy as np

from polydraft.beam.forest import ForestLayer, grow_forest
from polydraft.beam.law import Continuations, Floats, Indices
from polydraft.beam.node import Beam, Node
from polydraft.beam.reader import TreeReader
from polydraft.beam.run import BeamRun

_FEW_TOTALS = 1024
"""Up to so many, sorting all of them takes no longer than looking for the largest first."""

_LOOKS = 4
"""Continuations looked at for each place of a forest, where stop strings may end some."""


class SearchRun(BeamRun):
    """Beam search whose steps need no target pass of their own as long as the beams that matter lie in the draft's forest.

    Notes
    -----
    The draft runs a beam search of its own, wider than the target's, and the target passes its whole forest at once. A step
    needs nothing but the target's laws after the W running beams. A beam outside the forest, whose law is not known, does no
    harm where W continuations of the others have higher scores than it has itself: scores only fall, so none of its own would
    be kept. So every step is the very step of plain beam search, up to the rounding of a matrix product of another shape.
    """

    def _best(self, reader: TreeReader | None) -> int | None:
        return self._candidates if reader is None else self._draft_width

    @property
    def _candidates(self) -> int:
        """Continuations looked at in each step, by Hugging Face's rule: enough that W of them go on whichever end by a token.

        Stop strings may end more of them. Then fewer than W beams go on, and where all end, none.
        """
        return max(2, 1 + len(self._eos)) * self.options.beams

    @property
    def _draft_width(self) -> int:
        return self.options.width_of_drafts

    def _grow(self, depth: int) -> list[ForestLayer]:
        return grow_forest(self.beams, depth, self._draft_rows, self._ends, self._choose_drafts)

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        totals_X = continuations.totals([beam.score for beam in parents])
        return self._promising(totals_X, continuations, parents, self._draft_width)

    def _promising(self, totals_X: Floats, continuations: Continuations, parents: list[Beam], count: int) -> list[int]:
        """Return the entries of the largest totals, less those whose law no step will ask for.

        Texts that end have none. Continuations of running beams that the target has passed carry its own totals: they are out
        as soon as enough others of that kind are larger. Their places go to those that have to be guessed.
        """
        ends_X = np.zeros(len(totals_X), dtype=bool)
        for token in self._eos:
            ends_X |= continuations.tokens_X == token
        open_X = ~ends_X
        if parents[0].node.depth == self.length:
            certain_X = np.array([beam.node in self.tree for beam in parents])[continuations.rows_X]
            lasting_X = np.flatnonzero(certain_X & open_X if self._ends_are_extra else certain_X)
            if self._ends_are_extra:
                winners = self._open(totals_X, lasting_X, continuations, parents, self._kept)
            else:
                winners = [int(lasting_X[entry]) for entry in largest(totals_X[lasting_X], self._kept)]
            least = totals_X[winners[-1]] if len(winners) == self._kept else -np.inf
            open_X &= ~(certain_X & (totals_X < least))
        return self._open(totals_X, np.flatnonzero(open_X), continuations, parents, count)

    def _open(
        self, totals_X: Floats, entries_X: Indices, continuations: Continuations, parents: list[Beam], count: int
    ) -> list[int]:
        """Return those of some entries that have the largest totals, less those that a stop string ends.

        Fewer where strings end most of them: a forest need not be full, and each look costs a decoding.
        """
        if not self.stops.any:
            best: list[int] = entries_X[largest(totals_X[entries_X], count)].tolist()
            return best

        def child(entry: int) -> Node:
            return parents[int(continuations.rows_X[entry])].node.child(int(continuations.tokens_X[entry]))

        looked_at = (int(entries_X[entry]) for entry in largest(totals_X[entries_X], _LOOKS * count))
        return list(islice((entry for entry in looked_at if not self.stops.found(child(entry))), count))

    @property
    def _kept(self) -> int:
        """Continuations that a step takes at most, so that one which so many are larger than is out."""
        return self.options.beams

    _ends_are_extra: ClassVar[bool] = True
    """Whether texts that end do not count among these."""

    def _verify(self, layers: list[ForestLayer]) -> int:
        drafted = {beam.node for layer in layers for beam in layer.beams}
        steps = 0
        while self.beams:
            known = [beam for beam in self.beams if beam.node in self.tree]
            unknown = [beam for beam in self.beams if beam.node not in self.tree]
            if not known or (unknown and not self.law.never_gains):
                break
            if not self._take_step(known, unknown, drafted):
                break
            steps += 1
        return steps

    def _take_step(self, known: list[Beam], unknown: list[Beam], drafted: set[Node]) -> bool:
        """Take a step, unless continuations of beams that were not passed might have a part in it."""
        continuations = self._rows([beam.node for beam in known])
        totals_X = continuations.totals([beam.score for beam in known])
        candidates = [
            self._child(known, continuations, entry, float(totals_X[entry])) for entry in largest(totals_X, self._candidates)
        ]
        running = list(islice((beam for beam in candidates if not self._ends(beam.node)), self.options.beams))
        reach = max((beam.score for beam in unknown), default=-math.inf)
        full = len(running) == self.options.beams
        if unknown and not (full and running[-1].score > reach):
            return False
        for beam in candidates:
            beam.node.drafted = beam.node in drafted
        # Of what ends, only the best W count; the others were there so that enough beams go on.
        self._finish_step(running, [beam for beam in candidates[: self.options.beams] if self._ends(beam.node)])
        return True


def largest(totals_X: Floats, count: int) -> list[int]:
    """Return the entries of the largest totals, largest first; of equals the earlier first."""
    if len(totals_X) <= _FEW_TOTALS or count >= len(totals_X):
        best: list[int] = np.argsort(-totals_X, kind="stable")[:count].tolist()
        return best
    least = np.partition(totals_X, -count)[-count]
    entries_X = np.flatnonzero(totals_X >= least)
    return [int(entry) for entry in entries_X[np.argsort(-totals_X[entries_X], kind="stable")[:count]]]
