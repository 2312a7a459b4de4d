"""Checkers: each returns a number, none decides. Those that the kit shares live in `polydraft.certify`."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from polydraft.certify.chi_square import (
    FALSE_ALARM,
    chi_square_p_value,
    text_p_values,
    token_p_value,
    tuple_p_value,
)
from polydraft.certify.enumeration import (
    FIXTURE_DRAFT_V,
    FIXTURE_SAMPLES,
    FIXTURE_TARGET_V,
    TOLERANCE,
    drawings,
    enumerate_rule,
    largest_count,
    random_cases,
    sample_node,
)
from polydraft.sampling import NO_TOKEN
from polydraft.verify import Scheme

__all__ = [
    "FALSE_ALARM",
    "FIXTURE_DRAFT_V",
    "FIXTURE_SAMPLES",
    "FIXTURE_TARGET_V",
    "TOLERANCE",
    "chi_square_p_value",
    "drawings",
    "enumerated_acceptance",
    "enumeration_error",
    "largest_count",
    "random_cases",
    "sample_node",
    "text_p_values",
    "token_p_value",
    "tuple_p_value",
    "unequal_texts",
]


def enumeration_error(
    scheme: Scheme, target_probs_CV: Tensor, draft_probs_CV: Tensor, count: int, missing: int = 0
) -> tuple[float, float]:
    """Return the largest error of the emitted token's distribution, and of single rows from being a distribution."""
    enumeration = enumerate_rule(scheme, target_probs_CV, draft_probs_CV, count, missing)
    return enumeration.error_C.max().item(), enumeration.improper_R.max().item()


def enumerated_acceptance(scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int) -> float:
    """Return the chance that the emitted token is one of the children."""
    enumeration = enumerate_rule(scheme, target_V[None], draft_V[None], count)
    distribution_RV, children_RK = enumeration.distribution_RV, enumeration.children_RK
    among_RV = (
        torch.zeros_like(distribution_RV).scatter_add_(1, children_RK.clamp(min=0), (children_RK != NO_TOKEN).double()) > 0
    )
    return float((enumeration.chance_R[:, None] * distribution_RV * among_RV).sum())


def unequal_texts(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Count rows that differ."""
    return sum(list(one) != list(other) for one, other in zip_longest(texts, others, fillvalue=()))
