"""Pairs of distributions that the tests of this folder share."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exactness.checks import random_cases

CASES = 34
SHAPES = [(vocabulary, count) for vocabulary in (2, 3, 4, 5, 6) for count in (1, 2, 3, 4) if count <= vocabulary]
"""Vocabulary and drafts; the support of a draft distribution is often smaller than either."""


def tiny(vocabulary: int, count: int, cases: int = CASES) -> tuple[Tensor, Tensor]:
    """Smooth, peaked, holey and one-hot distributions, each tenth pair equal, and some drafts nearly sure of few tokens."""
    target_CV, draft_CV = random_cases(vocabulary, cases, seed=100 * vocabulary + count)
    draft_CV[1::7] = draft_CV[1::7] ** 9
    return target_CV, draft_CV / draft_CV.sum(-1, keepdim=True)


def language_like(rows: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Zipf's distribution with noise, as heavy-tailed as a language model's at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    common_RV = torch.randn(rows, vocabulary, generator=generator) - 1.3 * torch.arange(1, vocabulary + 1).log()
    noise_XRV = 0.7 * torch.randn(2, rows, vocabulary, generator=generator)
    target_RV, draft_RV = (common_RV + noise_XRV).double().softmax(-1)
    return target_RV, draft_RV


def product_distribution(*drafts: Sequence[float]) -> dict[tuple[int, ...], float]:
    """One independent draft from each distribution; the same distribution n times is drawing with replacement."""
    tokens = itertools.product(*([token for token, chance in enumerate(distribution) if chance > 0] for distribution in drafts))
    return {
        tuples: math.prod(distribution[token] for distribution, token in zip(drafts, tuples, strict=True)) for tuples in tokens
    }


def hybrid_distribution(draft: Sequence[float], count: int, fixed: int) -> dict[tuple[int, ...], float]:
    """Return the `fixed` likeliest tokens, then independent drafts from the others; n − 1 fixed ones are the greedy scheme."""
    ranked = sorted((token for token, chance in enumerate(draft) if chance > 0), key=lambda token: -draft[token])
    top, rest = tuple(ranked[:fixed]), ranked[fixed:]
    total = math.fsum(draft[token] for token in rest)
    if not rest:
        return {top: 1.0}
    others = [draft[token] / total if token in rest else 0.0 for token in range(len(draft))]
    return {top + drafts: chance for drafts, chance in product_distribution(*[others] * (count - fixed)).items()}
