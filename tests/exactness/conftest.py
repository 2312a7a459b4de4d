"""Fixtures of the exactness tests."""

from collections.abc import Iterator

import pytest

from polydraft import operations


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut 32 tokens into four blocks: the look-up takes as many steps as in a long vocabulary, and less padding."""
    monkeypatch.setattr("polydraft.sampling.categorical._BLOCK", 8)
    with operations.using("triton"):  # the look-up in C has blocks of its own
        yield
