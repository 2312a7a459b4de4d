"""Deterministic beam search, speculatively: the same texts and scores as without a draft."""

import math

import numpy as np

from polydraft.beam.forest import ForestLayer, grow_forest
from polydraft.beam.law import Continuations, Floats
from polydraft.beam.node import Beam, Node
from polydraft.beam.reader import TreeReader
from polydraft.beam.run import BeamRun


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
        """Continuations looked at in each step: enough that W of them go on even if every beam may end."""
        return max(2, 1 + len(self._eos)) * self.options.beams

    @property
    def _draft_width(self) -> int:
        return self.options.draft_width or 2 * self.options.beams

    def _grow(self, depth: int) -> list[ForestLayer]:
        return grow_forest(self.beams, depth, self._draft_rows, self._eos, self._choose_drafts)

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        return largest(continuations.totals([beam.score for beam in parents]), self._draft_width)

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
        running = [beam for beam in candidates if not self._ends(beam.node)][: self.options.beams]
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
    return [int(entry) for entry in np.argsort(-totals_X, kind="stable")[:count]]
