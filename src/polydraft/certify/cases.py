"""Laws to try a rule on: a fixture where mistakes show, random and degenerate pairs, and all pairs of round numbers."""

from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Chosen so that structural errors (WR for WOR, dedup, sorting, wrong residual) show in few samples.
FIXTURE_TARGET_V = torch.tensor([0.15, 0.05, 0.24, 0.56], dtype=torch.float64)
FIXTURE_DRAFT_V = torch.tensor([0.06, 0.72, 0.20, 0.02], dtype=torch.float64)

_BARELY = 1e-7
"""A mass that is all but nothing; much below it rounding of float64 sums would be judged, not rules."""


def random_cases(vocabulary: int, cases: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return target and draft laws [C, V]: smooth, peaked, with zeros, one-hot, and each tenth pair equal."""
    random = np.random.default_rng(seed)

    def law() -> NDArray[Any]:
        kind = random.integers(4)
        if kind == 3:
            one_hot: NDArray[Any] = np.eye(vocabulary)[random.integers(vocabulary)]
            return one_hot
        weights: NDArray[Any] = random.dirichlet(np.full(vocabulary, 0.3 if kind == 1 else 1.0))
        if kind == 2:
            weights[random.random(vocabulary) < 0.4] = 0
            weights[random.integers(vocabulary)] += 0.1
        weights /= weights.sum()
        return weights

    pairs = [(law(), law()) for _ in range(cases)]
    pairs = [(draft if index % 10 == 0 else target, draft) for index, (target, draft) in enumerate(pairs)]
    targets, drafts = zip(*pairs, strict=True)
    return torch.tensor(np.array(targets)), torch.tensor(np.array(drafts))


def degenerate_cases(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return every pair of laws from a list of awkward ones [C, V]: one-hot, equal, disjoint, barely there, nearly equal."""
    ranks_V = torch.arange(vocabulary, dtype=torch.float64)
    weights = [
        ranks_V == 0,
        ranks_V == vocabulary - 1,
        torch.ones(vocabulary),
        ranks_V < (vocabulary + 1) // 2,
        ranks_V >= vocabulary // 2,
        ranks_V + 1,
        torch.where(ranks_V == 0, 1.0, _BARELY),
        torch.where(ranks_V == 0, _BARELY, 1.0),
        1 + 1e-10 * ranks_V,
    ]
    laws_XV = torch.stack([weight_V.double() / weight_V.double().sum() for weight_V in weights])
    return laws_XV.repeat_interleave(len(laws_XV), 0), laws_XV.repeat(len(laws_XV), 1)


def round_cases(vocabulary: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return all pairs of laws [C, V] whose probabilities are multiples of 1/`parts`, each with a target and a draft."""
    bars_XB = torch.tensor(list(combinations(range(parts + vocabulary - 1), vocabulary - 1))).reshape(-1, vocabulary - 1)
    edges_XB = torch.nn.functional.pad(torch.nn.functional.pad(bars_XB, (1, 0), value=-1), (0, 1), value=parts + vocabulary - 1)
    laws_XV = (edges_XB.diff(dim=1) - 1).double() / parts
    return laws_XV.repeat_interleave(len(laws_XV), 0), laws_XV.repeat(len(laws_XV), 1)
