"""Fixtures of the exactness tests."""

import pytest


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut 32 tokens into four blocks: the look-up takes as many steps as in a long vocabulary, and less padding."""
    monkeypatch.setattr("polydraft.sampling.categorical._BLOCK", 8)
    monkeypatch.setattr("polydraft.sampling.categorical.loaded", lambda: None)  # the compiled look-up has blocks of its own
