"""What a round takes, by batch, nodes and levels: fitted to rounds that were run, or reckoned from a data sheet."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polydraft.draft.speedup import Costs, cost_curve
from polydraft.tune.rounds import Rounds


class RoundModel(Protocol):
    """Seconds of rounds."""

    def plain(self, batch: int) -> float:
        """Return the seconds of a round without drafts."""

    def drafted(self, batch: int, nodes: float, levels: float) -> float:
        """Return the seconds of a round whose rows have trees of so many nodes, the root included, and so many levels."""


def costs_at(model: RoundModel, batch: int) -> Costs:
    """Return a model's costs at one batch, in plain rounds of that batch, as `polydraft.draft.speedup` reckons with them."""
    plain = model.plain(batch)
    level = model.drafted(batch, 4, 2) - model.drafted(batch, 4, 1)
    return Costs(
        draft_level=level / plain,
        tree_pass=lambda nodes: model.drafted(batch, nodes, 0) / plain if nodes > 1 else 1.0,
    )


@dataclass(frozen=True)
class _Fit:
    """What rounds of one batch take."""

    scale: float
    """Their passes over those that were timed alone: a machine may have been slower then."""
    plain: float
    """Of a plain round beside its pass; the others are of rounds with drafts."""
    fixed: float
    level: float
    node: float
    branched: float
    """Of trees that are no chains: a chain's tokens are read as a text, and stay where they are."""


@dataclass(frozen=True)
class MeasuredRounds:
    """A machine's rounds, as measured.

    Parameters
    ----------
    passes : mapping
        Tokens of a target pass to its seconds.
    fits : mapping
        By batch. Between batches all figures are straight lines; beyond the last one they go on in proportion.
    """

    passes: Mapping[int, float]
    fits: Mapping[int, _Fit]

    @classmethod
    def fitted(cls, passes: Mapping[int, float], seen: Sequence[Rounds]) -> "MeasuredRounds":
        """Fit to rounds that were run: of each batch plain ones, and others of at least three sizes if there is a draft.

        A round takes the target's pass over all its tokens, something fixed, something per level, something per node, and
        something more if its trees are no chains. None of these is negative; errors count relative to the round.
        """
        curve = _Curve(passes)
        fits = {}
        for batch in sorted({one.batch for one in seen}):
            own = [one for one in seen if one.batch == batch]
            rows = [[curve(batch * one.nodes), *_beside(one.nodes, one.levels)] for one in own]
            scale, *rest = _least_squares(np.array(rows), np.array([one.seconds for one in own]))
            plain = [one.seconds - scale * curve(batch) for one in own if one.nodes == 1]
            fits[batch] = _Fit(scale, float(np.mean(plain)) if plain else 0.0, *rest)
        return cls(passes, fits)

    def plain(self, batch: int) -> float:
        """Return the seconds of a round without drafts."""
        return max(self._between(batch, "scale") * _Curve(self.passes)(batch) + self._between(batch, "plain"), 1e-9)

    def drafted(self, batch: int, nodes: float, levels: float) -> float:
        """Return the seconds of a round with drafts."""
        pass_seconds = self._between(batch, "scale") * _Curve(self.passes)(batch * nodes)
        rest = [self._between(batch, name) for name in ("fixed", "level", "node", "branched")]
        return max(pass_seconds + float(np.dot(rest, _beside(nodes, levels))), 1e-9)

    def _between(self, batch: int, name: str) -> float:
        known = sorted(self.fits)
        values = [getattr(self.fits[one], name) for one in known]
        if batch > known[-1] and name != "scale":
            return float(values[-1]) * batch / known[-1]
        return float(np.interp(batch, known, values))


def _beside(nodes: float, levels: float) -> tuple[float, float, float, float]:
    """Return what the time of a round beside its pass depends on: that there are drafts, levels, nodes, and branches."""
    return (1.0, levels, nodes, float(nodes > levels + 1.01)) if nodes > 1 else (0.0, 0.0, 0.0, 0.0)


class _Curve:
    """Seconds of a pass by its tokens, of which there may be a fraction on average."""

    def __init__(self, passes: Mapping[int, float]) -> None:
        self._unit, self._curve = passes[min(passes)], cost_curve(passes)

    def __call__(self, tokens: float) -> float:
        below = int(tokens)
        share = tokens - below
        low = self._curve(max(below, 1))
        return self._unit * (low + share * (self._curve(below + 1) - low))


def _least_squares(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Return the non-negative coefficients with the least squared relative error: of few columns all subsets can be tried.

    The first column is always part of it.
    """
    matrix, wanted = rows / seconds[:, None], np.ones(len(seconds))
    size = rows.shape[1]
    best, least = [1.0] + [0.0] * (size - 1), float("inf")
    for count in range(size):
        for others in itertools.combinations(range(1, size), count):
            columns = [0, *others]
            found = np.linalg.lstsq(matrix[:, columns], wanted, rcond=None)[0]
            error = float(((matrix[:, columns] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = [0.0] * size, error
                for column, value in zip(columns, found, strict=True):
                    best[column] = float(value)
    return best
