"""The checkers that the kit and these tests share: each returns a number, none decides. They live in `polydraft.certify`."""

from polydraft.certify.chi_square import (
    FALSE_ALARM,
    chi_square_p_value,
    text_p_values,
    token_p_value,
    tuple_p_value,
    unequal_texts,
)
from polydraft.certify.enumeration import (
    FIXTURE_DRAFT_V,
    FIXTURE_SAMPLES,
    FIXTURE_TARGET_V,
    TOLERANCE,
    drawings,
    enumerated_acceptance,
    enumeration_error,
    largest_count,
    random_cases,
    sample_node,
)

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
