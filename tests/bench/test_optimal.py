"""The paper on optimal multi-draft decoding, measured again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from polydraft.bench.method import MethodSpec
from polydraft.bench.papers import PAPERS
from polydraft.trees import parse_tree


def test_it_is_measured_again(invoke, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = PAPERS.get("optimal")
    monkeypatch.setitem(PAPERS._items, "optimal", replace(paper, runs={0.6: paper.runs[0.6]}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "category": "a", "prompt": "hello"}) + "\n")
    options = ("--target", tiny, "--draft", "early-exit:2", "--prompts", str(prompts), "--max-new-tokens", "4")
    code, out, err = invoke("bench", "--reproduce", "optimal", *options, "--out", str(tmp_path / "out"))
    assert code == 0, err
    text = (tmp_path / "out" / "reproduction.md").read_text()
    assert text in out
    for words in ("Table 1", "polydraft analyze --sweep temperature", "Table 2", "Table 3", "EAGLE's sparse tree", "Greedy"):
        assert words in text
    tables = [line.split(" | ") for line in text.splitlines() if line.startswith("| 0.6 | ")]
    ours = [row for row in tables if row[1] == "hybrid *"]
    assert len(ours) == 2 and all("–" not in row for row in ours), "every tree has figures"
    hub = next(row for row in tables if row[1] == "SpecHub")
    assert hub[2] != "–" and hub[4] == hub[6] == "–", "two drafts at most"


def test_every_tree_of_the_paper_can_be_written() -> None:
    methods = {method for names in PAPERS.get("optimal").runs.values() for method in names if method != "ar"}
    trees = {parse_tree(MethodSpec.parse(method).argument).num_nodes for method in methods}
    assert trees == {1 + 2 + 4 + 8 + 16, 1 + 4 + 16 + 64, 1 + 25}
