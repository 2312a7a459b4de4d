"""Schemes against their optima on given laws."""

from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.analyze.clusters import clustered_mean
from polydraft.analyze.drawing import Drawing, Optimum, drawing_of
from polydraft.analyze.laws import Laws
from polydraft.analyze.row import Row
from polydraft.schemes import SCHEMES, Scheme
from polydraft.theory import acceptance

_ROWS = 16
"""Positions worked on before progress is told."""

Advance = Callable[[int], None]


class Comparison:
    """Compute rows of the table from laws at one temperature.

    Parameters
    ----------
    laws : Laws
    temperature : float
        For the rows.
    device : torch.device
        Where to compute.
    seed : int
        Of the sampled drawings, where acceptance is not exact.
    paper_bound : bool
        Compute the paper's bound too.
    advance : callable
        Told how many positions have been looked at once more.
    """

    def __init__(
        self, laws: Laws, temperature: float, *, device: torch.device, seed: int, paper_bound: bool, advance: Advance
    ) -> None:
        self._laws, self._temperature, self._device = laws, temperature, device
        self._seed, self._paper_bound, self._advance = seed, paper_bound, advance
        self._optima: dict[tuple[Optimum, int], Tensor] = {}

    def row(self, name: str, count: int) -> Row:
        """Measure one scheme with one number of drafts, which it must be able to take."""
        scheme = SCHEMES.get(name)()
        # A generator of its own makes a scheme's figures the same whichever others are asked for.
        generator = torch.Generator().manual_seed(self._seed % 2**32)
        value_R = self._over_rows(lambda one, other: acceptance(scheme, one, other, count, generator=generator).value_R)
        drawing = drawing_of(scheme)
        mean, error = clustered_mean(value_R, self._laws.prompt_R)
        optimum = gap = gap_error = None
        if drawing is not None:
            optimum_R = self._optimum(drawing.optimum, count)
            optimum = float(optimum_R.mean())
            gap, gap_error = clustered_mean(optimum_R - value_R, self._laws.prompt_R)
        return Row(
            scheme=name,
            drafts=count,
            temperature=self._temperature,
            acceptance=mean,
            standard_error=error,
            optimum=optimum,
            gap=gap,
            gap_standard_error=gap_error,
            drawing=None if drawing is None else drawing.name,
            paper_bound=self._published(drawing, count),
        )

    def _published(self, drawing: Drawing | None, count: int) -> float | None:
        if not self._paper_bound or drawing is None or drawing.published is None:
            return None
        return float(self._optimum(drawing.published, count).mean())

    def _optimum(self, optimum: Optimum, count: int) -> Tensor:
        """Compute an optimum once for all schemes that share it."""
        if (optimum, count) not in self._optima:
            self._optima[optimum, count] = self._over_rows(lambda one, other: optimum(one, other, count))
        return self._optima[optimum, count]

    def _over_rows(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parts = []
        for first in range(0, len(self._laws), _ROWS):
            rows = slice(first, first + _ROWS)
            target_RV, draft_RV = (law_RV[rows].to(self._device) for law_RV in (self._laws.target_RV, self._laws.draft_RV))
            parts.append(function(target_RV, draft_RV).cpu())
            self._advance(len(parts[-1]))
        return torch.cat(parts)


def takes(scheme: type[Scheme], count: int) -> bool:
    """Whether a scheme can have so many drafts."""
    return scheme.max_children is None or count <= scheme.max_children


def work(names: tuple[str, ...], counts: tuple[int, ...], paper_bound: bool) -> int:
    """Return how many times all positions will be looked at, for progress."""
    passes: set[tuple[object, int]] = set()
    for name in names:
        scheme = SCHEMES.get(name)
        for count in filter(lambda count: takes(scheme, count), counts):
            drawing = drawing_of(scheme())
            passes.add((name, count))
            if drawing is not None:
                passes.add((drawing.optimum, count))
                if paper_bound and drawing.published is not None:
                    passes.add((drawing.published, count))
    return len(passes)
