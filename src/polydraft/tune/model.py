"""What a round takes, by batch, nodes and levels: fitted to rounds that were run, or reckoned from a data sheet."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from polydraft.theory import Costs, cost_curve
from polydraft.tune.rounds import Rounds


class RoundModel(Protocol):
    """Seconds of rounds."""

    def plain(self, batch: int) -> float:
        """Return the seconds of a round without drafts."""

    def drafted(self, batch: int, nodes: float, levels: float) -> float:
        """Return the seconds of a round whose rows have trees of so many nodes, the root included, and so many levels."""


def costs_at(model: RoundModel, batch: int) -> Costs:
    """Return a model's costs at one batch, in plain rounds of that batch, as `polydraft.theory` reckons with them."""
    plain = model.plain(batch)
    level = model.drafted(batch, 2, 1) - model.drafted(batch, 2, 0)
    return Costs(
        draft_level=level / plain,
        tree_pass=lambda nodes: model.drafted(batch, nodes, 0) / plain if nodes > 1 else 1.0,
    )


@dataclass(frozen=True)
class _Fit:
    """What rounds of one batch take beside their pass."""

    plain: float
    fixed: float
    level: float
    node: float


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

        A round takes the target's pass over all its tokens, something fixed, something per level, and something per node. None
        of these is negative; errors count relative to the round.
        """
        curve = _Curve(passes)
        fits = {}
        for batch in sorted({one.batch for one in seen}):
            own = [one for one in seen if one.batch == batch]
            plain = [one.seconds - curve(batch) for one in own if one.nodes == 1]
            drafted = [one for one in own if one.nodes > 1]
            rest = _least_squares(
                [[1 / one.seconds, one.levels / one.seconds, one.nodes / one.seconds] for one in drafted],
                [1 - curve(batch * one.nodes) / one.seconds for one in drafted],
            )
            fits[batch] = _Fit(float(np.mean(plain)) if plain else 0.0, *rest)
        return cls(passes, fits)

    def plain(self, batch: int) -> float:
        """Return the seconds of a round without drafts."""
        return max(_Curve(self.passes)(batch) + self._between(batch, "plain"), 1e-9)

    def drafted(self, batch: int, nodes: float, levels: float) -> float:
        """Return the seconds of a round with drafts."""
        fixed, level, node = (self._between(batch, name) for name in ("fixed", "level", "node"))
        return max(_Curve(self.passes)(batch * nodes) + fixed + level * levels + node * nodes, 1e-9)

    def _between(self, batch: int, name: str) -> float:
        known = sorted(self.fits)
        values = [getattr(self.fits[one], name) for one in known]
        if batch > known[-1]:
            return float(values[-1]) * batch / known[-1]
        return float(np.interp(batch, known, values))


class _Curve:
    """Seconds of a pass by its tokens, of which there may be a fraction on average."""

    def __init__(self, passes: Mapping[int, float]) -> None:
        self._unit, self._curve = passes[min(passes)], cost_curve(passes)

    def __call__(self, tokens: float) -> float:
        below = int(tokens)
        share = tokens - below
        low = self._curve(max(below, 1))
        return self._unit * (low + share * (self._curve(below + 1) - low))


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the non-negative coefficients with the least squared error: of few columns all subsets can be tried."""
    best, least = (0.0, 0.0, 0.0), float("inf")
    if not rows:
        return best
    matrix, wanted = np.array(rows), np.array(values)
    for count in range(1, 4):
        for columns in itertools.combinations(range(3), count):
            found = np.linalg.lstsq(matrix[:, columns], wanted, rcond=None)[0]
            error = float(((matrix[:, columns] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                full = np.zeros(3)
                full[list(columns)] = found
                best, least = (float(full[0]), float(full[1]), float(full[2])), error
    return best
