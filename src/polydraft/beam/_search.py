"""Beam search, and beam sampling as search over noisy scores, speculatively: texts as without a draft, in fewer passes.

References
----------
.. [1] Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, OOPSLA (SplitMix64, whose finaliser mixes keys).
.. [2] Kool, van Hoof, Welling 2019, Stochastic Beams and Where to Find Them, ICML.
"""

import math
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from polydraft.beam._distribution import Continuations, Floats, Indices
from polydraft.beam._layer import ForestLayer, close_draws
from polydraft.beam._node import Beam, Node
from polydraft.beam._reader import TreeReader
from polydraft.beam._run import BeamRun
from polydraft.beam.options import Draws

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of the SplitMix64 generator [1]."""
_FEW_TOTALS = 1024
"""Up to so many, sorting all of them takes no longer than looking for the largest first."""
_LOOKS = 4
"""Continuations looked at for each place of a forest, where stop strings may end some."""


class SearchRun(BeamRun):
    """Beam search whose steps need no target pass of their own as long as the beams that matter lie in the draft's forest.

    Notes
    -----
    The draft runs a beam search of its own, wider than the target's, and the target passes its whole forest at once. A step
    needs nothing but the target's distributions after the W running beams. A beam outside the forest, whose distribution is not
    known, does no harm where W continuations of the others have higher scores than it has itself: scores only fall, so none of
    its own would be kept. So every step is the very step of plain beam search, up to the rounding of a matrix product of
    another shape.
    """

    def _best(self, reader: TreeReader | None) -> int | None:
        return self._candidates if reader is None else self._draft_width

    @property
    def _draft_width(self) -> int:
        return self.options.width_of_drafts

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        totals_X = continuations.totals([beam.score for beam in parents])
        return self._promising(totals_X, continuations, parents, self._draft_width)

    def _promising(self, totals_X: Floats, continuations: Continuations, parents: list[Beam], count: int) -> list[int]:
        """Return the entries of the largest totals, less those whose distribution no step will ask for.

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
            if not known or (unknown and not self.distribution.never_gains):
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


class CoupledRun(SearchRun):
    """Distinct beams by shared noise.

    Notes
    -----
    A step of the target draws without replacement by taking the largest noisy scores. The draft takes the largest of its own
    scores with the same noise, more of them; where these hold all beams that matter, the step needs no pass of its own: as in
    search, beams outside the forest do no harm whose largest noisy score, bounded without their distribution, is too small.
    What is drawn depends on the target's distribution and on the noise alone, so that the texts are those of the same run
    without a draft: exact whatever the draft, with nothing to reject. It is not in the paper, whose layers accept fewer beams.
    """

    def __init__(self, *, generator: torch.Generator, **parts: Any) -> None:
        self._noise = SharedNoise(generator)
        super().__init__(**parts)

    def _best(self, reader: TreeReader | None) -> int | None:
        return None

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


def largest(totals_X: Floats, count: int) -> list[int]:
    """Return the entries of the largest totals, largest first; of equals the earlier first."""
    if len(totals_X) <= _FEW_TOTALS or count >= len(totals_X):
        best: list[int] = np.argsort(-totals_X, kind="stable")[:count].tolist()
        return best
    least = np.partition(totals_X, -count)[-count]
    entries_X = np.flatnonzero(totals_X >= least)
    return [int(entry) for entry in entries_X[np.argsort(-totals_X[entries_X], kind="stable")[:count]]]


class SharedNoise:
    """Gumbel noise for every continuation of every text: a function of the seed, the text and the token.

    Adding such noise to scores and taking the K largest sums is drawing K continuations without replacement in proportion to
    exp(score), in that order [2]. As the noise asks for nothing but the text, a draft can be perturbed by the target's own.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._seed = int(torch.randint(2**62, (1,), generator=generator))
        self._keys: dict[Node, int] = {}

    def perturbed(self, continuations: Continuations, beams: list[Beam]) -> Floats:
        """Return the totals of continued beams, with noise.

        Notes
        -----
        Independent Gumbel noise, drawn top down: first a beam's largest noisy total, which is one Gumbel variable at the sum of
        its continuations' weights, then all of them given that largest one (appendix B of [2]). So the largest is known, but
        for that sum, before the beam's distribution is; see `highest`.
        """
        keys_R = np.array([self._key(beam.node) for beam in beams], dtype=np.uint64)
        rows_X, scores_R = continuations.rows_X, np.array([beam.score for beam in beams])
        with np.errstate(over="ignore"):
            tokens_X = continuations.tokens_X.astype(np.uint64) + np.uint64(1)
            free_X = scores_R[rows_X] + continuations.scores_X + _gumbel(keys_R[rows_X] + np.uint64(_STEP) * tokens_X)
        if not len(free_X):
            return free_X
        bounds = np.array(continuations.bounds)
        found = np.flatnonzero(bounds[1:] > bounds[:-1])  # a row may have no continuations
        starts, places_X = bounds[found], np.repeat(np.arange(len(found)), np.diff(bounds)[found])
        # Sums beside their largest term: at low temperatures all weights of a row may be too small for a number.
        peaks = np.maximum.reduceat(continuations.scores_X, starts)
        masses = np.add.reduceat(np.exp(continuations.scores_X - peaks[places_X]), starts)
        largest_X = (scores_R[found] + peaks + np.log(masses) + _gumbel(keys_R[found]))[places_X]
        with np.errstate(divide="ignore"):  # the largest itself: log 0
            below_X = np.log(-np.expm1(free_X - np.maximum.reduceat(free_X, starts)[places_X]))
        shift_X = largest_X - free_X + below_X
        noisy_X: Floats = largest_X - np.maximum(shift_X, 0.0) - np.log1p(np.exp(-np.abs(shift_X)))
        return noisy_X

    def highest(self, beam: Beam) -> float:
        """Return what no noisy total of a beam's continuations exceeds, if their weights sum to one at most."""
        return beam.score + float(_gumbel(np.array([self._key(beam.node)], dtype=np.uint64))[0])

    def _key(self, node: Node) -> int:
        """Return the key of a text: a hash of the seed and of all its new tokens."""
        if node not in self._keys:
            above = self._seed if node.parent is None else self._key(node.parent)
            token = 0 if node.parent is None else node.token + 1
            self._keys[node] = _mixed((above ^ _mixed(token * _STEP + math.isqrt(_STEP))) + _STEP)
        return self._keys[node]


def _gumbel(keys: NDArray[np.uint64]) -> Floats:
    """Turn keys into Gumbel noise: mix their bits, take them for uniform numbers, invert the distribution."""
    with np.errstate(over="ignore"):
        mixed = keys + np.uint64(_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        mixed ^= mixed >> np.uint64(31)
    uniforms = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: Floats = -np.log(-np.log(uniforms))
    return noise


def _mixed(value: int) -> int:
    """Mix the bits of a number (the finaliser of SplitMix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
