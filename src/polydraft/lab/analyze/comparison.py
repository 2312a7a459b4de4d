"""Compare schemes with their optima on given distributions: one row per scheme and number of drafts."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from polydraft.devices import is_host
from polydraft.lab.analyze._distributions import Distributions
from polydraft.lab.estimate import Estimate
from polydraft.lab.theory import (
    acceptance,
    conditional_poisson_optimum,
    greedy_optimum,
    hybrid_optimum,
    top_optimum,
    with_replacement_optimum,
    without_replacement_optimum,
)
from polydraft.verify import SCHEMES, Greedy, Hybrid, Naive, Scheme, SpecHub, Top

_ROWS, _ROWS_ON_DEVICES = 16, 128
"""Positions at a time, on a CPU and on other devices, where a few cost as much as many."""

Optimum = Callable[[Tensor, Tensor, int], Tensor]
"""`(target_probs_RV, draft_probs_RV, count) -> values_R`: the largest acceptance of each row."""


@dataclass(frozen=True)
class Mean:
    """A mean over positions, of which those of one prompt are correlated."""

    value: float
    by_prompt: list[float]
    """Contribution of each prompt: mean + C/R Σ_{i∈c} (x_i − mean) for each of C prompts c, over all R positions.

    Their mean is the value. They are linear in the positions' figures, so that differences are paired.
    """

    @classmethod
    def of(cls, values_R: Tensor, prompt_R: Tensor) -> "Mean":
        """Average figures by position, given the prompt of each position."""
        mean = float(values_R.mean())
        places = {name: place for place, name in enumerate(dict.fromkeys(prompt_R.tolist()))}
        index_R = torch.tensor([places[name] for name in prompt_R.tolist()])
        sums_C = torch.zeros(len(places), dtype=torch.float64).index_add_(0, index_R, values_R.double() - mean)
        return cls(mean, [mean + float(total) * len(places) / len(values_R) for total in sums_C])

    @property
    def standard_error(self) -> float | None:
        """Standard error over prompts, linearised for prompts with different numbers of positions; None with one prompt."""
        count = len(self.by_prompt)
        return statistics.stdev(self.by_prompt) / math.sqrt(count) if count > 1 else None

    @property
    def estimate(self) -> Estimate:
        """The mean with its interval."""
        return Estimate.of_mean(self.value, self.standard_error)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A scheme's acceptance, and the optimum for its drafts."""

    scheme: str
    drafts: int
    temperature: float
    acceptance: Mean
    """α: mean probability that one of the drafts is accepted."""
    drawing: str | None
    """How the drafts are drawn."""
    optimum: Mean | None = None
    """α*: the largest acceptance of any exact verifier for drafts drawn this way; None if unknown."""
    gap: Mean | None = None
    """α* − α, paired by position, so that shared variation cancels."""
    paper_bound: Mean | None = None
    """The paper's α*, which for distinct drafts belongs to another way of drawing."""

    def as_dict(self, *, paper_bound: bool, by_prompt: bool = False) -> dict[str, Any]:
        """Return figures and standard errors by name, with or without the paper's bound and the prompts' contributions."""
        found: dict[str, Any] = {
            **{"scheme": self.scheme, "drafts": self.drafts, "temperature": self.temperature},
            **_figures("acceptance", "standard_error", self.acceptance),
            **_figures("optimum", "optimum_standard_error", self.optimum),
            **_figures("gap", "gap_standard_error", self.gap),
            "drawing": self.drawing,
            **(_figures("paper_bound", "paper_bound_standard_error", self.paper_bound) if paper_bound else {}),
        }
        for name, mean in (("acceptance", self.acceptance), ("optimum", self.optimum)) if by_prompt else ():
            found[f"{name}_by_prompt"] = None if mean is None else mean.by_prompt
        return found


def _figures(name: str, error: str, mean: Mean | None) -> dict[str, float | None]:
    return {name: None, error: None} if mean is None else {name: mean.value, error: mean.standard_error}


@dataclass(frozen=True)
class Drawing:
    """A way of drawing drafts."""

    name: str
    optimum: Optimum
    published: Optimum | None = None
    """The paper's formula for the optimum, if it has one."""


WITH_REPLACEMENT = Drawing("independent", with_replacement_optimum, with_replacement_optimum)
WITHOUT_REPLACEMENT = Drawing("distinct", without_replacement_optimum, conditional_poisson_optimum)
GREEDY = Drawing("greedy", greedy_optimum, greedy_optimum)
TOP = Drawing("top", top_optimum)


def drawing_of(scheme: Scheme) -> Drawing | None:
    """Return how a scheme draws its children; None if unknown.

    That follows from `child_distribution`: a subclass that keeps it keeps the optimum, and one that overrides it has to set
    `replacement`.
    """
    distribution = type(scheme).child_distribution
    if distribution is Hybrid.child_distribution:
        return Drawing("hybrid", _own_optimum(cast(Hybrid, scheme)))
    known = {
        Greedy.child_distribution: GREEDY,
        SpecHub.child_distribution: GREEDY,
        Top.child_distribution: TOP,
        Naive.child_distribution: WITHOUT_REPLACEMENT,
    }
    declared = {True: WITH_REPLACEMENT, False: WITHOUT_REPLACEMENT, None: None}
    return known.get(distribution, declared[scheme.replacement])


class Comparison:
    """Computes rows of the table from distributions at one temperature.

    The seed is used where acceptance is sampled.
    """

    def __init__(
        self,
        distributions: Distributions,
        temperature: float,
        *,
        device: torch.device,
        seed: int,
        paper_bound: bool,
    ) -> None:
        self._distributions, self._temperature, self._device = distributions, temperature, device
        self._seed, self._paper_bound = seed, paper_bound
        self._optima: dict[tuple[Optimum, int], Tensor] = {}

    def row(self, name: str, count: int) -> Row:
        """Return the row of a scheme with `count` drafts, a number that `takes` allows."""
        scheme = SCHEMES.get(name)()
        # Each row has its own generator, so its figures do not depend on which other rows are computed.
        generator = torch.Generator().manual_seed(self._seed % 2**32)
        value_R = self._over_rows(lambda one, other: acceptance(scheme, one, other, count, generator=generator).value_R)
        drawing, prompt_R = drawing_of(scheme), self._distributions.prompt_R
        acceptances = Mean.of(value_R, prompt_R)
        row = Row(scheme=name, drafts=count, temperature=self._temperature, acceptance=acceptances, drawing=None)
        if drawing is None:
            return row
        optimum_R = self._optimum(drawing.optimum, count)
        published = drawing.published if self._paper_bound else None
        return replace(
            row,
            drawing=drawing.name,
            optimum=Mean.of(optimum_R, prompt_R),
            gap=Mean.of(optimum_R - value_R, prompt_R),
            paper_bound=None if published is None else Mean.of(self._optimum(published, count), prompt_R),
        )

    def _optimum(self, optimum: Optimum, count: int) -> Tensor:
        """Return an optimum, computed once for all schemes that share it."""
        if (optimum, count) not in self._optima:
            self._optima[optimum, count] = self._over_rows(lambda one, other: optimum(one, other, count))
        return self._optima[optimum, count]

    def _over_rows(self, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parts, size = [], _ROWS if is_host(self._device) else _ROWS_ON_DEVICES
        for first in range(0, len(self._distributions), size):
            rows = slice(first, first + size)
            target_RV, draft_RV = (
                distribution_RV[rows].to(self._device)
                for distribution_RV in (self._distributions.target_RV, self._distributions.draft_RV)
            )
            parts.append(function(target_RV, draft_RV).cpu())
        return torch.cat(parts)


def takes(scheme: type[Scheme], count: int) -> bool:
    """Whether a scheme can take this many drafts."""
    return scheme.max_children is None or count <= scheme.max_children


def _own_optimum(scheme: Hybrid) -> Optimum:
    """Return the optimum of a hybrid scheme, which needs the number of drafts that the scheme fixes at each position."""

    def optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
        rows = len(draft_probs_RV)
        certain_R = torch.zeros(rows, dtype=torch.long, device=draft_probs_RV.device)
        raised_RV = draft_probs_RV.double()
        for rank in range(count):
            distribution_RV = scheme.child_distribution(draft_probs_RV.double(), certain_R.new_zeros(rows, rank), count)
            sure_R = (certain_R == rank) & (distribution_RV.amax(-1) == 1)
            if not sure_R.any():
                break
            certain_R += sure_R
            # Of equally likely tokens the scheme decides which are fixed. Raise these, so that the formula fixes the same ones;
            # the distribution of the others, given that they are not fixed, stays the same.
            raised_RV = raised_RV.scatter_add(1, distribution_RV.argmax(-1, keepdim=True), sure_R[:, None].double())
        return hybrid_optimum(target_probs_RV, raised_RV / raised_RV.sum(-1, keepdim=True), count, certain_R)

    return optimum
