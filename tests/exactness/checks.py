"""The checkers that the kit and these tests share: each returns a number, none decides. They live in `polydraft.certify`."""

from polydraft.certify.certificate import FALSE_ALARM
from polydraft.certify.chi_square import (
    Laws,
    chi_square_p_value,
    conditional_p_values,
    text_p_values,
    token_p_value,
    transformed_p_values,
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
    "Laws",
    "chi_square_p_value",
    "conditional_p_values",
    "drawings",
    "enumerated_acceptance",
    "enumeration_error",
    "largest_count",
    "random_cases",
    "sample_node",
    "text_p_values",
    "token_p_value",
    "transformed_p_values",
    "tuple_p_value",
    "unequal_texts",
]
