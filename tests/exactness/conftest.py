"""Fixtures of the exactness tests."""

from typing import Any

import pytest

from polydraft.engine.workspace import Workspace
from stand_in import StandIn, round_recorder


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut 32 tokens into four blocks: the look-up takes as many steps as in a long vocabulary, and less padding."""
    monkeypatch.setattr("polydraft.sampling.categorical._BLOCK", 8)
    monkeypatch.setattr("polydraft.sampling.categorical.loaded", lambda: None)  # the compiled look-up has blocks of its own


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Let the workspaces of decoders with `graphs` record; return their recorders."""
    made: list[StandIn] = []
    original = Workspace.__init__

    def with_recorder(workspace: Workspace, target: Any, drafter: Any, params: Any, graphs: bool, *others: Any) -> None:
        original(workspace, target, drafter, params, graphs, *others)
        if graphs:
            workspace.launcher.recorder = round_recorder(workspace)
            made.append(workspace.launcher.recorder)

    monkeypatch.setattr(Workspace, "__init__", with_recorder)
    return made
