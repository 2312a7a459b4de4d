"""Layers of draft beams: how a forest of them grows, how wide a layer should be, and how it is verified ([1], corrected).

References
----------
.. [1] Qin et al. 2025, Dynamic-Width Speculative Beam Decoding for LLM Inference, AAAI (arXiv:2409.16560).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polydraft.beam._distribution import Continuations, Floats
from polydraft.beam._node import Beam, Node
from polydraft.beam.options import BeamOptions, Draws

Choose = Callable[[Continuations, list[Beam]], list[int]]
"""`(continuations, parents) -> entries`: which continuations become draft beams, in order."""


class Chance(ABC):
    """Something that decides."""

    @abstractmethod
    def accepts(self, target: float, draft: float) -> bool:
        """Say yes with probability `min(1, target / draft)`."""

    @abstractmethod
    def draw(self, weights_X: Floats, count: int, *, distinct: bool) -> list[int]:
        """Draw entries by weight, in draw order; distinct ones are fewer where there are no more with weight."""


class RandomChance(Chance):
    """Decide by a generator's numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def _uniforms(self, count: int) -> Floats:
        numbers: Floats = torch.rand(count, generator=self._generator, dtype=torch.float64).numpy()
        return numbers

    def accepts(self, target: float, draft: float) -> bool:
        """Compare U q < p, strictly: what has no mass is never taken."""
        return bool(self._uniforms(1)[0] * draft < target)

    def draw(self, weights_X: Floats, count: int, *, distinct: bool) -> list[int]:
        """Invert the running sum of the weights."""
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
    while weights_X[index] <= 0:  # rounding may step past the last entry with weight
        index -= 1
    return index


@dataclass(frozen=True, eq=False)
class ForestLayer:
    """Draft beams of one step, and the distribution they were drawn from."""

    parents: list[Beam]
    """The unfinished draft beams of the layer before, or the input beams: rows of the distribution."""
    continuations: Continuations
    drawn: list[int]
    """Entries of it, in draw order."""
    beams: list[Beam]
    """The drawn ones as beams, in the same order."""


def grow_forest(
    beams: Sequence[Beam],
    depth: int,
    distribution: Callable[[list[Node]], Continuations],
    ends: Callable[[Node], bool],
    choose: Choose,
) -> list[ForestLayer]:
    """Let the draft run `depth` steps of beam decoding from the input beams.

    Notes
    -----
    Input beams start with the target's own scores, which are known, and not with the draft's as in the paper: whatever
    distribution drafts are drawn from, verification with that distribution is exact, and this one is nearer to the target's;
    besides, truncation may have ruled out for the draft what the target has said. Finished draft beams have no children. Nor
    have those after which nothing is foreseen; where that is all of them, the forest ends.
    """
    layers: list[ForestLayer] = []
    parents = list(beams)
    for _ in range(depth):
        if not parents:
            break
        nodes = [beam.node for beam in parents]
        continuations = distribution(nodes)
        totals_X = continuations.totals([beam.score for beam in parents])
        drawn = choose(continuations, parents)
        if not drawn:
            break
        chosen = (values_X[drawn].tolist() for values_X in (continuations.rows_X, continuations.tokens_X, totals_X))
        drafts = [Beam(nodes[row].child(token), total) for row, token, total in zip(*chosen, strict=True)]
        layers.append(ForestLayer(parents, continuations, drawn, drafts))
        parents = [beam for beam in drafts if not ends(beam.node)]
    return layers


def acceptance_chances(target_probs_U: Floats, draft_probs_U: Floats, drafts: int) -> list[float]:
    """Return α_j, the chance that the j-th draft in a row is accepted after all before it were not (eq. 4)."""
    chances, residual_U = [], target_probs_U
    for _ in range(drafts):
        chances.append(min(float(np.minimum(residual_U, draft_probs_U).sum()), 1.0))
        residual_U = _residual(residual_U, draft_probs_U)
    return chances


def count_distribution(chances: list[float]) -> Floats:
    """Return P(m, k), the chance that k of m independent drafts are accepted, for k = 0 to m (eqs. 2 and 3).

    Notes
    -----
    P(m, 0) = ∏ (1 - α_j), which the paper leaves out. After an acceptance everything begins anew with the drafts left, so
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
    """Return the largest width that is reached with chance `threshold` at least, and no less than `least` (eqs. 5 to 7).

    Notes
    -----
    The sum of eq. 5 begins at k = 0. It looks at the distributions and at the number of drafts, never at which they are: a
    width that did would change the distribution of the beams. For distinct drafts the recursion is an estimate, which costs no
    exactness.
    """
    chances = count_distribution(acceptance_chances(target_probs_U, draft_probs_U, drafts))
    reached = 1.0 - np.concatenate([[0.0], np.cumsum(chances)[:-1]])  # P(at least K) for K = 0 to m
    widest = max(width for width in range(drafts + 1) if width == 0 or reached[width] >= threshold)
    return max(least, widest)


@dataclass(frozen=True)
class LayerVerdict:
    """The beams of one layer."""

    outputs: list[int]
    """Entries of the universe, in the order in which they became certain."""
    drafts: list[int]
    """Which draft each of the first outputs is; the others were drawn anew."""
    complete: bool
    """Whether all outputs were drafted, so that the next layer can be verified."""


def verify_layer(
    target_probs_U: Floats, draft_probs_U: Floats, drafts: Sequence[int], width: int, chance: Chance, *, distinct: bool
) -> LayerVerdict:
    """Turn drafts from one beam distribution into `width` beams from another.

    Parameters
    ----------
    target_probs_U, draft_probs_U : array
        The beam distributions of target and draft over all pairs of a surviving beam and a token. The draft's is restricted to
        surviving beams and normed: drafts below a rejected beam, orphans, are no draws from it.
    drafts : sequence of int
        What the draft drew, orphans left out, in draw order.
    width : int
        Beams wanted; it must not depend on which drafts were drawn.
    distinct : bool
        Drafts are drawn, and outputs follow the target's distribution, without replacement; independently otherwise.

    Notes
    -----
    Deviations from the printed algorithm, each needed for exactness (tests/beam/test_layer.py): a draft is accepted with
    chance min(1, p'/q), printed upside down; q is normed over what survives; for distinct beams q loses every draft after its
    turn, taken or not, and p every output.

    Guarantee: outputs are independent draws from the target's distribution, or successive ones without replacement.
    """
    target_U, draft_U, residual_U = target_probs_U, draft_probs_U, target_probs_U
    outputs: list[int] = []
    taken: list[int] = []
    for number, draft in enumerate(drafts):
        if len(outputs) == width:
            break
        if chance.accepts(float(residual_U[draft]), float(draft_U[draft])):
            outputs.append(draft)
            taken.append(number)
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
    return LayerVerdict(outputs, taken, complete)


def _residual(target_U: Floats, draft_U: Floats) -> Floats:
    """Return norm(max(p' - q, 0)), or p' where rounding left nothing of that."""
    left_U = np.maximum(target_U - draft_U, 0.0)
    total = left_U.sum()
    return left_U / total if total > 0 else target_U


def _without(probs_U: Floats, entry: int) -> Floats:
    """Return the distribution given that it is not `entry`."""
    left_U = probs_U.copy()
    left_U[entry] = 0.0
    total = left_U.sum()
    return left_U / total if total > 0 else left_U


def close_draws(drawn: Sequence[Beam], options: BeamOptions, ends: Callable[[Node], bool]) -> tuple[list[Beam], list[Beam]]:
    """Return the beams that go on and those that have ended, given a step's draws in order."""
    running = [beam for beam in drawn if not ends(beam.node)]
    if options.draws == Draws.HUGGING_FACE:
        # Only the first W draws may end; of what goes on, the W best do.
        return (
            sorted(running, key=lambda beam: -beam.score)[: options.beams],
            [beam for beam in drawn[: options.beams] if ends(beam.node)],
        )
    return running, [beam for beam in drawn if ends(beam.node)]
