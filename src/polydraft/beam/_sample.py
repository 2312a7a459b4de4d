"""Speculative beam sampling: Dynamic-width Speculative Beam Decoding [1]_, corrected.

Algorithm 1 of the paper is `SampleRun._verify` (the loop over layers) and `verify_layer` (one layer); its equations 2 to 7 are
`dynamic_width`. docs/beams.md lists every deviation from the printed text, and what happens without it.

References
----------
.. [1] Qin et al. 2025, Dynamic-Width Speculative Beam Decoding for LLM Inference, AAAI (arXiv:2409.16560).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polydraft.beam._distribution import Continuations, Floats, Indices, normalised
from polydraft.beam._node import Beam
from polydraft.beam._run import BeamRequest, BeamRun, ForestLayer
from polydraft.beam._workspace import BeamWorkspace
from polydraft.beam.options import Draws

_FEW_ENTRIES = 4096


class Chance(ABC):
    """The random decisions of a run; an interface, so that tests can enumerate them."""

    @abstractmethod
    def accepts(self, target: float, draft: float) -> bool:
        """Return true with probability `min(1, target / draft)`."""

    @abstractmethod
    def draw(self, weights_X: Floats, count: int, *, distinct: bool) -> list[int]:
        """Draw entries in proportion to their weights; return them in draw order, and fewer if distinct ones run out."""


class RandomChance(Chance):
    """Decides by the random numbers of a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def _uniforms(self, count: int) -> Floats:
        numbers: Floats = torch.rand(count, generator=self._generator, dtype=torch.float64).numpy()
        return numbers

    def accepts(self, target: float, draft: float) -> bool:
        """Compare U q < p, strictly: entries without mass are never accepted."""
        return bool(self._uniforms(1)[0] * draft < target)

    def draw(self, weights_X: Floats, count: int, *, distinct: bool) -> list[int]:
        """Invert the cumulative sum of the weights."""
        numbers = self._uniforms(count)
        if not distinct:
            sums_X = weights_X.cumsum()
            return [_found(sums_X, weights_X, number) for number in numbers] if len(sums_X) and sums_X[-1] > 0 else []
        left_X, drawn = weights_X.copy(), []
        for number in numbers:
            sums_X = left_X.cumsum()
            if not len(sums_X) or not sums_X[-1] > 0:
                break
            drawn.append(_found(sums_X, left_X, number))
            left_X[drawn[-1]] = 0.0
        return drawn


def _found(sums_X: Floats, weights_X: Floats, number: float) -> int:
    index = min(int(np.searchsorted(sums_X, number * sums_X[-1], side="right")), len(sums_X) - 1)
    while weights_X[index] <= 0:  # rounding may go past the last entry with weight
        index -= 1
    return index


def acceptance_chances(target_probs_U: Floats, draft_probs_U: Floats, drafts: int) -> list[float]:
    """Return α_j, the probability that the j-th draft is accepted given that all before it were rejected (eq. 4)."""
    chances, residual_U = [], target_probs_U
    for _ in range(drafts):
        chances.append(min(float(np.minimum(residual_U, draft_probs_U).sum()), 1.0))
        residual_U = _residual(residual_U, draft_probs_U)
    return chances


def count_distribution(chances: list[float]) -> Floats:
    """Return P(m, k), the probability that k of m independent drafts are accepted, for k = 0 to m (eqs. 2 and 3).

    Notes
    -----
    P(m, 0) = ∏ (1 - α_j), which the paper omits. An acceptance restarts the process with the remaining drafts, so
    P(m, k) = Σ_i α_i ∏_{j<i} (1 - α_j) P(m - i, k - 1).
    """
    total = len(chances)
    distribution_MK = np.zeros((total + 1, total + 1))
    none_before = np.concatenate([[1.0], np.cumprod(1.0 - np.array(chances))])
    distribution_MK[:, 0] = none_before
    first = np.array(chances) * none_before[:-1]
    for drafts in range(1, total + 1):
        distribution_MK[drafts, 1:] = first[:drafts] @ distribution_MK[drafts - 1 :: -1, :-1]
    chances_K: Floats = distribution_MK[total]
    return chances_K


def dynamic_width(target_probs_U: Floats, draft_probs_U: Floats, drafts: int, *, threshold: float, least: int) -> int:
    """Return the largest width that is reached with probability `threshold` or more, but at least `least` (eqs. 5 to 7).

    Notes
    -----
    The sum of eq. 5 starts at k = 0. The width depends on the distributions and the number of drafts, never on the drafts
    themselves: that would change the distribution of the beams. For distinct drafts the recursion is only an estimate, which
    does not affect exactness.
    """
    chances = count_distribution(acceptance_chances(target_probs_U, draft_probs_U, drafts))
    reached = 1.0 - np.concatenate([[0.0], np.cumsum(chances)[:-1]])  # P(at least K) for K = 0 to m
    widest = max(width for width in range(drafts + 1) if width == 0 or reached[width] >= threshold)
    return max(least, widest)


@dataclass(frozen=True)
class LayerVerdict:
    """The beams of one layer."""

    outputs: list[int]
    """Entries of the universe, accepted drafts first."""
    drafts: list[int]
    """Which drafts were accepted; the other outputs were drawn anew."""
    complete: bool
    """Whether all outputs are drafts, so that the next layer can be verified too."""


def verify_layer(
    target_probs_U: Floats, draft_probs_U: Floats, drafts: Sequence[int], width: int, chance: Chance, *, distinct: bool
) -> LayerVerdict:
    """Turn drafts from one beam distribution into `width` beams from another (Algorithm 1, lines 13 to 31).

    Parameters
    ----------
    target_probs_U, draft_probs_U : array
        The beam distributions of target and draft over the universe: all pairs of a surviving beam and a token.
    drafts : sequence of int
        Entries that the draft drew, in draw order, without orphans (drafts below a rejected beam).
    width : int
        Number of beams wanted; must not depend on which drafts were drawn.
    distinct : bool
        True if drafts are drawn without replacement, and outputs are to be as well; false if both are independent.

    Notes
    -----
    Deviations from the printed algorithm, each needed for exactness (tests/beam/test_layer.py): a draft is accepted with
    probability min(1, p'/q), which is printed upside down; q is normalised over the surviving beams; for distinct beams, each
    draft is removed from q after its turn, accepted or not, and each output from p.

    Guarantee: outputs are independent draws from the target's distribution, or successive ones without replacement.
    """
    target_U, draft_U, residual_U = target_probs_U, draft_probs_U, target_probs_U  # p, q, p'
    outputs: list[int] = []
    accepted: list[int] = []
    for number, draft in enumerate(drafts):
        if len(outputs) == width:
            break
        if chance.accepts(float(residual_U[draft]), float(draft_U[draft])):
            outputs.append(draft)
            accepted.append(number)
            if distinct:
                target_U = _without(target_U, draft)
            residual_U = target_U
        else:
            residual_U = _residual(residual_U, draft_U)
        if distinct:
            draft_U = _without(draft_U, draft)
    complete = len(outputs) == width
    if not complete:
        for entry in chance.draw(residual_U, 1, distinct=distinct):
            outputs.append(entry)
            target_U = _without(target_U, entry) if distinct else target_U
        outputs += chance.draw(target_U, width - len(outputs), distinct=distinct)
    return LayerVerdict(outputs, accepted, complete)


def _residual(target_U: Floats, draft_U: Floats) -> Floats:
    """Return norm(max(p' - q, 0)), or p' if rounding leaves no mass."""
    left_U = np.maximum(target_U - draft_U, 0.0)
    total = left_U.sum()
    return left_U / total if total > 0 else target_U


def _without(probs_U: Floats, entry: int) -> Floats:
    """Return the distribution given that it is not `entry`."""
    left_U = probs_U.copy()
    left_U[entry] = 0.0
    total = left_U.sum()
    return left_U / total if total > 0 else left_U


class SampleRun(BeamRun):
    """Beam sampling; each layer of the draft's forest that yields enough beams saves a target pass.

    Notes
    -----
    With a fixed width, beams have exactly the distribution of plain beam sampling. With a width threshold, each layer's beams
    have the beam distribution given its width, which depends only on earlier layers; whole texts then have a distribution that
    no fixed width gives.
    """

    def __init__(self, request: BeamRequest, chance: Chance, workspace: BeamWorkspace | None = None) -> None:
        self._chance = chance
        super().__init__(request, workspace)

    def _best(self, *, of_draft: bool) -> int | None:
        return None

    @property
    def _distinct(self) -> bool:
        return self.options.draws != Draws.INDEPENDENT

    def _choose_drafts(self, continuations: Continuations, parents: list[Beam]) -> list[int]:
        probs_X = normalised(continuations.totals(parents))
        return self._chance.draw(probs_X, self.options.draft_width or 2 * self._width, distinct=self._distinct)

    def _verify(self, layers: list[ForestLayer]) -> int:
        survivors = list(range(len(self.beams)))
        for steps, layer in enumerate(layers, start=1):  # line 4
            following = self._verify_layer(layer, survivors)
            if not self.beams or following is None:
                self._keep_one_cache()
                return steps
            survivors = following
        # Lines 32 to 34: all layers were accepted, so the pass allows one more step.
        continuations = self.target.after([beam.node for beam in self.beams])
        totals_X = continuations.totals(self.beams)
        drawn = self._chance.draw(normalised(totals_X), self._width, distinct=self._distinct)
        self._close([self._child(self.beams, continuations, entry, float(totals_X[entry])) for entry in drawn])
        self._keep_one_cache()
        return len(layers) + 1

    def _verify_layer(self, layer: ForestLayer, survivors: Sequence[int]) -> list[int] | None:
        """Take a step by verifying a layer (lines 5 to 31).

        `survivors` are the places of the running beams among the layer's parents. Return the places of the new running beams
        among the next layer's parents, or None if verification ends here.
        """
        continuations = self.target.after([beam.node for beam in self.beams])
        totals_X = continuations.totals(self.beams)
        surviving, entries_X = layer.continuations.restricted(survivors)
        universe = _Universe(continuations, surviving)
        target_probs_U = universe.spread(universe.target_U, normalised(totals_X))
        draft_totals_X = surviving.totals([layer.parents[number] for number in survivors])
        draft_probs_U = universe.spread(universe.draft_U, normalised(draft_totals_X))
        # Line 10: drafts below rejected beams, the orphans, are left out.
        kept = [(number, _position(entries_X, entry)) for number, entry in enumerate(layer.drawn)]
        numbers = [number for number, place in kept if place is not None]
        drafts = [int(universe.draft_U[place]) for _, place in kept if place is not None]
        width = self._layer_width(target_probs_U, draft_probs_U, len(drafts))
        verdict = verify_layer(target_probs_U, draft_probs_U, drafts, width, self._chance, distinct=self._distinct)

        entries = [universe.target_entry(output) for output in verdict.outputs]
        beams = [self._child(self.beams, continuations, entry, float(totals_X[entry])) for entry in entries]
        for beam in beams[: len(verdict.drafts)]:
            beam.node.drafted = True
        unfinished = [number for number, beam in enumerate(layer.beams) if not self.ends.at(beam.node)]
        parent_of = {number: parent for parent, number in enumerate(unfinished)}
        parents = {id(beam): parent_of.get(numbers[draft]) for beam, draft in zip(beams, verdict.drafts, strict=False)}
        self._close(beams)
        if not verdict.complete:
            return None
        found = [parents.get(id(beam)) for beam in self.beams]
        return [parent for parent in found if parent is not None]

    def _layer_width(self, target_probs_U: Floats, draft_probs_U: Floats, drafts: int) -> int:
        threshold = self.options.width_threshold
        if threshold is None or not drafts:  # if no draft survives, use the width of a layer without drafts
            return self._width
        return dynamic_width(target_probs_U, draft_probs_U, drafts, threshold=threshold, least=self.options.min_width or 1)

    def _keep_one_cache(self) -> None:
        """With `one_cache`, continue only with the beam of lowest perplexity (section 3.4); all are equally long."""
        if self.options.one_cache and self.beams:
            self.beams = [max(self.beams, key=lambda beam: beam.score)]


def _position(sorted_X: Indices, entry: int) -> int | None:
    index = int(np.searchsorted(sorted_X, entry))
    return index if index < len(sorted_X) and sorted_X[index] == entry else None


class _Universe:
    """All pairs of a surviving beam and a token, with the same numbers for target and draft."""

    def __init__(self, target: Continuations, draft: Continuations) -> None:
        self.target_U, self.draft_U = target.keys(), draft.keys()
        self._size = target.num_rows * target.vocab_size
        if len(self.target_U) < _FEW_ENTRIES:  # truncated distributions: leave out pairs without mass
            keys = np.union1d(self.target_U, self.draft_U)
            self.target_U, self.draft_U = np.searchsorted(keys, self.target_U), np.searchsorted(keys, self.draft_U)
            self._size = len(keys)
        self._entry_of = np.full(self._size, -1)
        self._entry_of[self.target_U] = np.arange(len(self.target_U))

    def target_entry(self, output: int) -> int:
        """Return the entry of the target's continuations that an output stands for."""
        entry = int(self._entry_of[output])
        assert entry >= 0, "an output without mass"
        return entry

    def spread(self, places_X: Indices, probs_X: Floats) -> Floats:
        """Return probabilities at some places as a distribution over the universe."""
        spread_U = np.zeros(self._size)
        spread_U[places_X] = probs_X
        return spread_U
