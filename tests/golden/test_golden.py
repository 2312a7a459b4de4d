"""Texts, rounds and acceptance are what they were when the golden file was written."""

import json
from typing import Any

import pytest

from .cases import CASES, FILE

EXPECTED: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


def test_every_case_is_there() -> None:
    assert EXPECTED.keys() == CASES.keys(), "write the file anew: PYTHONPATH=tests python -m tests.golden.cases"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_it_was(name: str) -> None:
    found = CASES[name]()
    assert found.keys() == EXPECTED[name].keys()
    for key, value in EXPECTED[name].items():
        assert found[key] == value, key
