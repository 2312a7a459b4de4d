"""Speculative beam search, and beam sampling as a search over noisy scores: the texts of plain decoding in fewer passes.

References
----------
.. [1] Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, OOPSLA (SplitMix64, whose finaliser mixes keys).
.. [2] Kool, van Hoof, Welling 2019, Stochastic Beams and Where to Find Them, ICML.
"""

import math
from itertools import islice
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from polydraft.beam._distribution import Continuations, Floats, Indices
from polydraft.beam._node import Beam, Node
from polydraft.beam._run import BeamRequest, BeamRun, ForestLayer
from polydraft.beam._workspace import BeamWorkspace
from polydraft.beam.options import Draws

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of the SplitMix64 generator [1]."""
_FEW_TOTALS = 1024
"""Up to this many totals, sorting all is as fast as selecting the largest first."""
_EXAMINED = 4
"""Continuations to examine for each wanted one, if stop strings may end some of them."""


class SearchRun(BeamRun):
    """Beam search that takes further steps without another target pass while all beams that matter are in the draft's forest.

    Notes
    -----
    The draft runs its own, wider beam search, and one target pass reads the whole forest. A step needs the target's
    distributions after the W running beams. A beam outside the forest, whose distribution is unknown, does not matter if W
    continuations of other beams score higher than it does: scores only fall, so none of its continuations would be kept. So
    every step is a step of plain beam search, up to the rounding of matrix products of another shape.
    """

    def _best(self, *, of_draft: bool) -> int | None:
        return self.options.width_of_drafts if of_draft else self._candidates

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        totals_X = continuations.totals(parents)
        return self._promising(totals_X, continuations, parents, self.options.width_of_drafts)

    def _promising(self, totals_X: Floats, continuations: Continuations, parents: list[Beam], count: int) -> list[int]:
        """Return the entries with the largest totals, except those that no step will continue.

        Texts that end are not continued. For running beams that the target has passed, continuations have the target's own
        totals, so we know the least total that a step keeps, and leave out smaller ones. That makes room for continuations of
        beams whose distribution is only a guess.
        """
        ends_X = np.zeros(len(totals_X), dtype=bool)
        for token in self.ends.eos_token_ids:
            ends_X |= continuations.tokens_X == token
        open_X = ~ends_X
        if parents[0].node.depth == self.length:
            certain_X = np.array([beam.node in self.target for beam in parents])[continuations.rows_X]
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
        """Return those of the given entries with the largest totals, except texts that end with a stop string.

        Return fewer if most of them do: a forest need not be full, and each check decodes a text.
        """
        if not self.ends.stops.any:
            best: list[int] = entries_X[largest(totals_X[entries_X], count)].tolist()
            return best

        def child(entry: int) -> Node:
            return parents[int(continuations.rows_X[entry])].node.child(int(continuations.tokens_X[entry]))

        examined = (int(entries_X[entry]) for entry in largest(totals_X[entries_X], _EXAMINED * count))
        return list(islice((entry for entry in examined if not self.ends.stops.found(child(entry))), count))

    @property
    def _kept(self) -> int:
        """Most continuations that a step keeps."""
        return self.options.beams

    _ends_are_extra: ClassVar[bool] = True
    """Whether texts that end are kept in addition to `_kept` others."""

    def _verify(self, layers: list[ForestLayer]) -> int:
        drafted = {beam.node for layer in layers for beam in layer.beams}
        steps = 0
        while self.beams:
            known = [beam for beam in self.beams if beam.node in self.target]
            unknown = [beam for beam in self.beams if beam.node not in self.target]
            if not known or (unknown and not self.target.distribution.never_gains):
                break
            if not self._take_step(known, unknown, drafted):
                break
            steps += 1
        return steps

    def _take_step(self, known: list[Beam], unknown: list[Beam], drafted: set[Node]) -> bool:
        """Take a step and return True, unless continuations of unknown beams might be among its candidates."""
        continuations = self.target.after([beam.node for beam in known])
        totals_X = continuations.totals(known)
        candidates = [
            self._child(known, continuations, entry, float(totals_X[entry])) for entry in largest(totals_X, self._candidates)
        ]
        running = list(islice((beam for beam in candidates if not self.ends.at(beam.node)), self.options.beams))
        reach = max((beam.score for beam in unknown), default=-math.inf)
        full = len(running) == self.options.beams
        if unknown and not (full and running[-1].score > reach):
            return False
        for beam in candidates:
            beam.node.drafted = beam.node in drafted
        # Texts that end count only if they are among the best W; further candidates only ensure that enough beams go on.
        self._finish_step(running, [beam for beam in candidates[: self.options.beams] if self.ends.at(beam.node)])
        return True


class CoupledRun(SearchRun):
    """Samples distinct beams, with noise that draft and target share.

    Notes
    -----
    A target step draws without replacement by taking the largest noisy scores. The draft takes more of its own largest scores
    with the same noise; if these include all beams that matter, the step needs no other pass. As in search, a beam outside the
    forest does not matter if its largest noisy score is too small; that has a bound that needs no distribution. Draws depend
    only on the target's distribution and the noise, so the texts equal those of the same run without a draft: they are exact
    whatever the draft is, and nothing is rejected. This is not in the paper, whose layers accept fewer beams.
    """

    def __init__(self, request: BeamRequest, generator: torch.Generator, workspace: BeamWorkspace | None = None) -> None:
        self._noise = SharedNoise(generator)
        super().__init__(request, workspace)

    def _best(self, *, of_draft: bool) -> int | None:
        return None

    _ends_are_extra = False

    @property
    def _kept(self) -> int:
        return self._width

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        noisy_X = self._noise.perturbed(continuations, parents)
        if self.options.draws != Draws.HUGGING_FACE:
            return self._promising(noisy_X, continuations, parents, self.options.width_of_drafts)
        # As in the target's steps, the draws with the best scores continue.
        ratio = self.options.width_of_drafts / self.options.beams
        drawn = self._promising(noisy_X, continuations, parents, round(ratio * self._width))
        totals_X = continuations.totals(parents)
        return sorted(drawn, key=lambda entry: -totals_X[entry])[: self.options.width_of_drafts]

    def _take_step(self, known: list[Beam], unknown: list[Beam], drafted: set[Node]) -> bool:
        """Take a step and return True, unless it might draw continuations of unknown beams."""
        continuations = self.target.after([beam.node for beam in known])
        totals_X = continuations.totals(known)
        noisy_X = self._noise.perturbed(continuations, known)
        entries = largest(noisy_X, self._width)
        reach = max((self._noise.highest(beam) for beam in unknown), default=-math.inf)
        if unknown and not (len(entries) == self._width and noisy_X[entries[-1]] > reach):
            return False
        drawn = [self._child(known, continuations, entry, float(totals_X[entry])) for entry in entries]
        for beam in drawn:
            beam.node.drafted = beam.node in drafted
        self._close(drawn)
        return True


def largest(totals_X: Floats, count: int) -> list[int]:
    """Return the entries with the largest totals, largest first; of equal totals the earlier comes first."""
    if len(totals_X) <= _FEW_TOTALS or count >= len(totals_X):
        best: list[int] = np.argsort(-totals_X, kind="stable")[:count].tolist()
        return best
    least = np.partition(totals_X, -count)[-count]
    entries_X = np.flatnonzero(totals_X >= least)
    return [int(entry) for entry in entries_X[np.argsort(-totals_X[entries_X], kind="stable")[:count]]]


class SharedNoise:
    """Gumbel noise for every continuation of every text, as a function of seed, text and token only.

    Taking the K largest sums of score and noise draws K continuations without replacement in proportion to exp(score), in that
    order [2]. Because the noise depends on nothing else, the draft's scores can have the same noise as the target's.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._seed = int(torch.randint(2**62, (1,), generator=generator))
        self._keys: dict[Node, int] = {}

    def perturbed(self, continuations: Continuations, beams: list[Beam]) -> Floats:
        """Return the totals of continued beams with noise.

        Notes
        -----
        Independent Gumbel noise, drawn top down: first a beam's largest noisy total, a Gumbel variable located at the log of
        the sum of its continuations' weights, then all others given the largest (appendix B of [2]). That sum is at most one,
        so the largest total has a bound even before the beam's distribution is known; see `highest`.
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
        # Factor out the largest term, because at low temperatures all weights of a row may underflow.
        peaks = np.maximum.reduceat(continuations.scores_X, starts)
        masses = np.add.reduceat(np.exp(continuations.scores_X - peaks[places_X]), starts)
        largest_X = (scores_R[found] + peaks + np.log(masses) + _gumbel(keys_R[found]))[places_X]
        with np.errstate(divide="ignore"):  # for the largest itself this is log 0
            below_X = np.log(-np.expm1(free_X - np.maximum.reduceat(free_X, starts)[places_X]))
        shift_X = largest_X - free_X + below_X
        noisy_X: Floats = largest_X - np.maximum(shift_X, 0.0) - np.log1p(np.exp(-np.abs(shift_X)))
        return noisy_X

    def highest(self, beam: Beam) -> float:
        """Return an upper bound of the noisy totals of a beam's continuations; valid if their weights sum to at most one."""
        return beam.score + float(_gumbel(np.array([self._key(beam.node)], dtype=np.uint64))[0])

    def _key(self, node: Node) -> int:
        """Return the key of a text: a hash of the seed and of all its new tokens."""
        if node not in self._keys:
            above = self._seed if node.parent is None else self._key(node.parent)
            token = 0 if node.parent is None else node.token + 1
            self._keys[node] = _mixed((above ^ _mixed(token * _STEP + math.isqrt(_STEP))) + _STEP)
        return self._keys[node]


def _gumbel(keys: NDArray[np.uint64]) -> Floats:
    """Turn keys into Gumbel noise: mix their bits to uniform numbers and invert the distribution function."""
    with np.errstate(over="ignore"):
        mixed = keys + np.uint64(_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        mixed ^= mixed >> np.uint64(31)
    uniforms = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: Floats = -np.log(-np.log(uniforms))
    return noise


def _mixed(value: int) -> int:
    """Mix the bits of a number with the finaliser of SplitMix64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
