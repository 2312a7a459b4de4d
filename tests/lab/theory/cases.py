"""Pairs of distributions that the tests of this folder share."""

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
