"""Sizes that keep these tests short, and modules of rules as users write them."""

from pathlib import Path

import pytest

from polydraft.certify import Sizes
from polydraft.certify._text_trials import settings_of

TINY = Sizes(
    vocabularies=(3,), counts=(2,), cases=20, node_samples=4_000, texts=100, small_texts=300, prompts=3, greedy_tokens=4
)

LEAST = Sizes(
    vocabularies=(3,), counts=(2,), cases=10, node_samples=1_200, texts=40, small_texts=100, prompts=1, greedy_tokens=3
)
"""For functions, which are called node by node, and for rules so wrong that little shows it."""


@pytest.fixture
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Let `--quick` try even less."""
    monkeypatch.setattr("polydraft.certify.QUICK", TINY)
    return TINY


@pytest.fixture
def least_sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Let `--quick` try hardly anything: one tree, one pair of models."""
    monkeypatch.setattr("polydraft.certify.QUICK", LEAST)
    monkeypatch.setattr("polydraft.certify._text_trials._GREEDY_TREES", ("3x2x1",))
    monkeypatch.setattr("polydraft.certify._text_trials.settings_of", lambda sizes: settings_of(sizes)[:1])
    return LEAST


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of rules into the folder one works in, and return its name."""
    name = f"rules_of_{tmp_path.name}".replace("-", "_").replace("[", "_").replace("]", "_")
    (tmp_path / f"{name}.py").write_text((Path(__file__).parent / "rules.py").read_text())
    monkeypatch.chdir(tmp_path)
    return name
