"""Chi-square tests by the incomplete gamma function, and what they are able to see."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_EXPECTED = 5.0
"""Cells expected less often are pooled: below, the statistic does not follow its limit law."""


def survival(statistic: float, freedom: int) -> float:
    """Return the chance that a chi-square variable of `freedom` degrees exceeds `statistic`."""
    shape, half = torch.tensor([freedom / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, half))


def critical(freedom: int, false_alarm: float) -> float:
    """Return the statistic that is exceeded with chance `false_alarm`."""
    high = 1.0
    while survival(high, freedom) > false_alarm:
        high *= 2
    return _bisect(lambda statistic: survival(statistic, freedom) > false_alarm, high)


def noncentral_survival(statistic: float, freedom: int, noncentrality: float) -> float:
    """Return the chance to exceed `statistic` where the law is wrong by `noncentrality`: a Poisson mixture of central ones."""
    half = noncentrality / 2
    last = int(half + 12 * half**0.5 + 40)
    extra_J = torch.arange(last, dtype=torch.float64)
    weight_J = torch.exp(extra_J * np.log(max(half, 1e-300)) - half - torch.lgamma(extra_J + 1))
    tail_J = torch.special.gammaincc(freedom / 2 + extra_J, torch.full_like(extra_J, statistic / 2))
    return float((weight_J * tail_J).sum())


def detectable_distance(samples: int, freedom: int, false_alarm: float, power: float = 0.99) -> float:
    """Return the total-variation error from which on a test refuses with chance `power` at least, whatever the error's shape.

    An error δ of a law p has noncentrality N Σ δ²/p ≥ N (Σ|δ|)² = 4 N TV² by Cauchy and Schwarz. What is to be had
    at most is 1.
    """
    limit = critical(freedom, false_alarm)
    high = limit
    while noncentral_survival(limit, freedom, high) < power:
        high *= 2
    needed = _bisect(lambda value: noncentral_survival(limit, freedom, value) < power, high)
    return min(1.0, float((needed / (4 * samples)) ** 0.5))


def _bisect(below: Any, high: float) -> float:
    """Return where `below` turns from true to false, between 0 and `high`."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


def chi_square_p_value(counts: NDArray[Any], law: NDArray[Any]) -> float:
    """Test counts against a law; cells expected fewer than five times are pooled, impossible events give 0."""
    if counts[law == 0].sum() > 0:
        return 0.0
    counts, expected = counts[law > 0], law[law > 0] / law.sum() * counts.sum()
    order = np.argsort(expected)
    # The least likely cells go together until their expectation reaches five.
    reached = int(np.searchsorted(np.cumsum(expected[order]), LEAST_EXPECTED)) + 1
    pooled = max(reached, int((expected < LEAST_EXPECTED).sum()))
    expected = np.append(expected[order[pooled:]], expected[order[:pooled]].sum())
    counts = np.append(counts[order[pooled:]], counts[order[:pooled]].sum())
    if len(counts) < 2:
        return 1.0
    return survival(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)
