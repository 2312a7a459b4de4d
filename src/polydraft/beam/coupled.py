"""Beam sampling whose draft is perturbed by the target's own noise: plain beam sampling's very texts, in fewer passes."""

import math
from typing import Any

import torch

from polydraft.beam.drawing import close_draws
from polydraft.beam.law import Continuations
from polydraft.beam.node import Beam, Node
from polydraft.beam.noise import SharedNoise
from polydraft.beam.options import Draws
from polydraft.beam.reader import TreeReader
from polydraft.beam.search import SearchRun, largest


class CoupledRun(SearchRun):
    """Distinct beams by shared noise.

    Notes
    -----
    A step of the target draws without replacement by taking the largest noisy scores. The draft takes the largest of its own
    scores with the same noise, more of them; where these hold all beams that matter, the step needs no pass of its own: as in
    search, beams outside the forest do no harm whose largest noisy score, bounded without their law, is too small. What is
    drawn depends on the target's law and on the noise alone, so that the texts are those of the same run without a draft: exact
    whatever the draft, with nothing to reject. It is not in the paper, whose layers accept fewer beams.
    """

    def __init__(self, *, generator: torch.Generator, **parts: Any) -> None:
        self._noise = SharedNoise(generator)
        super().__init__(**parts)

    def _best(self, reader: TreeReader | None) -> int | None:
        return None

    @property
    def _width(self) -> int:
        if self.options.draws == Draws.HUGGING_FACE:
            return max(2, 1 + len(self._eos)) * self.options.beams
        return self.options.beams

    _ends_are_extra = False

    @property
    def _kept(self) -> int:
        return self._width

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        noisy_X = self._noise.perturbed(continuations, parents)
        if self.options.draws != Draws.HUGGING_FACE:
            return self._promising(noisy_X, continuations, parents, self._draft_width)
        # As the target will: of many draws, those with the best scores go on.
        ratio = self._draft_width / self.options.beams
        drawn = self._promising(noisy_X, continuations, parents, round(ratio * self._width))
        totals_X = continuations.totals([beam.score for beam in parents])
        return sorted(drawn, key=lambda entry: -totals_X[entry])[: self._draft_width]

    def _take_step(self, known: list[Beam], unknown: list[Beam], drafted: set[Node]) -> bool:
        """Take a step, unless continuations of beams that were not passed might be drawn in it."""
        continuations = self._rows([beam.node for beam in known])
        totals_X = continuations.totals([beam.score for beam in known])
        noisy_X = self._noise.perturbed(continuations, known)
        entries = largest(noisy_X, self._width)
        reach = max((self._noise.highest(beam) for beam in unknown), default=-math.inf)
        if unknown and not (len(entries) == self._width and noisy_X[entries[-1]] > reach):
            return False
        drawn = [self._child(known, continuations, entry, float(totals_X[entry])) for entry in entries]
        for beam in drawn:
            beam.node.drafted = beam.node in drafted
        self._finish_step(*close_draws(drawn, self.options, self._ends))
        return True
