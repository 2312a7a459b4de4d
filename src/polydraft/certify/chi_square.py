"""Chi-square tests of tokens, tuples and whole texts against exact distributions, and the power of these tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FALSE_ALARM = 1e-4
"""Probability that a correct rule fails any of its statistical tests; seeds are fixed, so results repeat."""
LEAST_EXPECTED = 5.0
"""Cells expected less often are pooled, because with such cells the statistic does not follow its limit distribution."""
_BINS = 16
"""Bins for points that are uniform on [0, 1] if a distribution is right."""

Distributions = Callable[[NDArray[Any]], NDArray[Any]]
"""`new_NL -> probs_NV`: the next token's probabilities after the new tokens so far."""


def survival(statistic: float, freedom: int) -> float:
    """Return the probability that a chi-square variable with `freedom` degrees of freedom exceeds `statistic`."""
    shape, half = torch.tensor([freedom / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, half))


def critical(freedom: int, false_alarm: float) -> float:
    """Return the value that the statistic exceeds with probability `false_alarm`."""
    high = 1.0
    while survival(high, freedom) > false_alarm:
        high *= 2
    return _bisect(lambda statistic: survival(statistic, freedom) > false_alarm, high)


def noncentral_survival(statistic: float, freedom: int, noncentrality: float) -> float:
    """Return the probability that a noncentral chi-square variable, a Poisson mixture of central ones, exceeds `statistic`."""
    half = noncentrality / 2
    last = int(half + 12 * half**0.5 + 40)
    extra_J = torch.arange(last, dtype=torch.float64)
    weight_J = torch.exp(extra_J * np.log(max(half, 1e-300)) - half - torch.lgamma(extra_J + 1))
    tail_J = torch.special.gammaincc(freedom / 2 + extra_J, torch.full_like(extra_J, statistic / 2))
    return float((weight_J * tail_J).sum())


def detectable_distance(samples: int, freedom: int, false_alarm: float, power: float = 0.99) -> float:
    """Return the total-variation error, at most 1, that a test detects with probability `power`, whatever its shape.

    An error δ of a distribution p has noncentrality N Σ δ²/p ≥ N (Σ|δ|)² = 4 N TV² by Cauchy and Schwarz.
    """
    limit = critical(freedom, false_alarm)
    high = limit
    while noncentral_survival(limit, freedom, high) < power:
        high *= 2
    needed = _bisect(lambda value: noncentral_survival(limit, freedom, value) < power, high)
    return min(1.0, float((needed / (4 * samples)) ** 0.5))


def _bisect(below: Any, high: float) -> float:
    """Return the point between 0 and `high` at which `below` turns from true to false."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


def chi_square_p_value(counts: NDArray[Any], distribution: NDArray[Any]) -> float:
    """Test counts against a distribution. Cells expected fewer than five times are pooled; impossible events give 0."""
    if counts[distribution == 0].sum() > 0:
        return 0.0
    counts, expected = counts[distribution > 0], distribution[distribution > 0] / distribution.sum() * counts.sum()
    order = np.argsort(expected)
    # Pool the least likely cells until their expectation reaches five.
    reached = int(np.searchsorted(np.cumsum(expected[order]), LEAST_EXPECTED)) + 1
    pooled = max(reached, int((expected < LEAST_EXPECTED).sum()))
    expected = np.append(expected[order[pooled:]], expected[order[:pooled]].sum())
    counts = np.append(counts[order[pooled:]], counts[order[:pooled]].sum())
    if len(counts) < 2:
        return 1.0
    return survival(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def token_p_value(token_R: Tensor, distribution_V: Tensor) -> float:
    """Test single tokens against a distribution; a missing token is impossible and gives 0."""
    if not ((token_R >= 0) & (token_R < len(distribution_V))).all():
        return 0.0
    return chi_square_p_value(torch.bincount(token_R, minlength=len(distribution_V)).numpy(), distribution_V.double().numpy())


def tuple_p_value(tuples: Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """Test tuples of tokens against a distribution given as a table."""
    cells_XK = np.array(list(expected))
    tuples_RK = tuples.numpy()
    # Encode each tuple as one number, with missing children as 0 and tokens from 1.
    base = max(int(cells_XK.max()), int(tuples_RK.max())) + 2
    radix_K = base ** np.arange(cells_XK.shape[1])
    code_X, code_R = (cells_XK + 1) @ radix_K, (tuples_RK + 1) @ radix_K
    order_X = np.argsort(code_X)
    place_R = np.searchsorted(code_X[order_X], code_R).clip(max=len(code_X) - 1)
    # An unexpected tuple goes into an extra cell of probability zero.
    index_R = np.where(code_X[order_X][place_R] == code_R, order_X[place_R], len(code_X))
    counts = np.bincount(index_R, minlength=len(code_X) + 1)
    return chi_square_p_value(counts, np.array([*expected.values(), 0.0]))


def text_p_values(
    tokens_NL: NDArray[Any], target_distributions: Distributions, draft_distributions: Distributions
) -> list[float]:
    """Test texts token by token, with both of the tests below."""
    return conditional_p_values(tokens_NL[:, :3], target_distributions) + transformed_p_values(
        tokens_NL, target_distributions, draft_distributions
    )


def conditional_p_values(tokens_NL: NDArray[Any], target_distributions: Distributions) -> list[float]:
    """Test the first token, and each later one given the likeliest tokens before it (by the distribution, not in the data)."""
    beginning_1T = np.empty((1, 0), dtype=int)
    p_values = []
    for position in range(tokens_NL.shape[1]):
        distribution_V = target_distributions(beginning_1T)[0]
        counts = np.bincount(tokens_NL[:, position], minlength=len(distribution_V))
        p_values.append(chi_square_p_value(counts, distribution_V))
        beginning_1T = np.append(beginning_1T, [[distribution_V.argmax()]], axis=1)
        tokens_NL = tokens_NL[tokens_NL[:, position] == distribution_V.argmax()]
    return p_values


def transformed_p_values(
    tokens_NL: NDArray[Any], target_distributions: Distributions, draft_distributions: Distributions
) -> list[float]:
    """Test every token given its own beginning, by the probability integral transform.

    Lay each token's distribution out on [0, 1] in some order, and take a random point of the emitted token's interval. If the
    distribution is right, these points are independent and uniform. Errors show only if they push mass in one direction, so
    there are two orders: by target probability (a wrong context makes likely tokens rare), and by its ratio to the draft's
    (wrong verification leaves too much or too little of the draft). Positions are tested one by one, for errors at one depth,
    and all together, for small errors at every node.
    """
    random = np.random.default_rng(0)
    rows = np.arange(len(tokens_NL))
    counts_LOX = np.zeros((tokens_NL.shape[1], 2, _BINS))
    for position in range(tokens_NL.shape[1]):
        beginning_NT, token_N = tokens_NL[:, :position], tokens_NL[:, position]
        distribution_NV, draft_NV = target_distributions(beginning_NT), draft_distributions(beginning_NT)
        if not (distribution_NV[rows, token_N] > 0).all():
            return [0.0]
        ratio_NV = distribution_NV / np.where(draft_NV > 0, draft_NV, 1e-12)
        for index, key_NV in enumerate((distribution_NV, ratio_NV)):
            order_NV = np.argsort(-key_NV, axis=-1)
            stop_NV = np.cumsum(np.take_along_axis(distribution_NV, order_NV, axis=-1), axis=-1)
            rank_N = (order_NV == token_N[:, None]).argmax(-1)
            point_N = stop_NV[rows, rank_N] - random.random(len(rows)) * distribution_NV[rows, token_N]
            counts_LOX[position, index] = np.bincount((point_N * _BINS).astype(int).clip(0, _BINS - 1), minlength=_BINS)
    uniform = np.full(_BINS, 1 / _BINS)
    tables_TX = [*counts_LOX.reshape(-1, _BINS), *counts_LOX.sum(0)]
    return [chi_square_p_value(counts_X, uniform) for counts_X in tables_TX]


def joint_p_value(tokens_NL: NDArray[Any], target_distributions: Distributions) -> float:
    """Test whole texts against their joint distribution; for short texts over few tokens."""
    chance_X = joint_distribution(target_distributions, tokens_NL.shape[1])
    vocabulary = round(len(chance_X) ** (1 / tokens_NL.shape[1]))
    cell_N = tokens_NL @ vocabulary ** np.arange(tokens_NL.shape[1])[::-1]
    return chi_square_p_value(np.bincount(cell_N, minlength=len(chance_X)), chance_X)


def joint_distribution(target_distributions: Distributions, length: int) -> NDArray[Any]:
    """Return the probability of every text of `length` tokens, the last token varying fastest."""
    chance_X = np.ones(1)
    beginnings_XT = np.empty((1, 0), dtype=int)
    for _ in range(length):
        distribution_XV = target_distributions(beginnings_XT)
        chance_X = (chance_X[:, None] * distribution_XV).reshape(-1)
        next_X = np.tile(np.arange(distribution_XV.shape[1]), len(beginnings_XT))
        beginnings_XT = np.column_stack([beginnings_XT.repeat(distribution_XV.shape[1], axis=0), next_X])
    return chance_X
