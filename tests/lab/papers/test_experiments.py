"""Papers measured again, with tiny models."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from polydraft.lab.bench.method import MethodSpec
from polydraft.lab.papers import PAPERS, Run
from polydraft.trees import parse_tree


def test_improved_is_measured_again(
    invoke, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: Callable[..., None]
) -> None:
    paper = PAPERS.get("improved")
    runs = tuple(run for run in paper.runs if run.name in ("spec_bench-t0", "speed-t0"))
    registered(PAPERS, "improved", replace(paper, runs=runs))
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("polydraft.draft.costs._DISTURBED", math.inf)  # kept even by a busy machine
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "category": "a", "prompt": "hello"}) + "\n")
    options = ("--target", tiny, "--draft", "early-exit:2", "--prompts", str(prompts), "--max-new-tokens", "4")
    code, _, err = invoke("bench", "--reproduce", "improved", *options, "--out", str(tmp_path / "out"))
    assert code == 0, err
    text = (tmp_path / "out" / "reproduction.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 0 | ")]
    dynamic = next(row for row in rows if row[2].startswith("dynamic tree"))
    assert "–" not in dynamic[3:5], "it may find that drafting does not pay, but it decodes"
    chains = [row for row in rows if row[2].startswith("SD, ") and row[1] in ("eager", "captured")]
    assert len(chains) == 2 and all(row[-1].endswith("× |") for row in chains), "eq. 1's improvement factor is printed"
    assert any("**lossy**" in row[1] for row in rows)
    assert "| speed at T=0: target-initialised, MCSD, SD, plain decoding |" in text and "no interval" in text
    assert "Plain decoding against itself, as a second arm: " in text
    for drawing in ("figure-3-t0.svg", "figure-3-length-t0.svg", "figure-5-t0.svg", "figure-6.svg"):
        assert (tmp_path / "out" / drawing).read_text().startswith("<svg") and drawing in text
    results = json.loads((tmp_path / "out" / "spec_bench-t0" / "results.json").read_text())
    fork = results["methods"]["fork:6x5"]
    assert 0 <= fork["accepted_share"] <= 1
    assert sum(one["share"] for one in fork["winning_branches"]) == pytest.approx(1), "some path was accepted"
    assert results["methods"]["target-init:6x5"]["identical"] is None, "lossy texts are not compared"
    costs = list((tmp_path / "cache" / "costs").glob("*.json"))
    assert len(costs) == 1 and min(json.loads(costs[0].read_text())["level"].values()) > 0


def test_every_tree_of_improved_can_be_written() -> None:
    for run in PAPERS.get("improved").runs:
        for spec in map(MethodSpec.parse, run.methods):
            if spec.name in ("fork", "target-init"):
                width, depth = map(int, spec.argument.split("x"))
                assert parse_tree(f"fork:{spec.argument}").num_nodes == 1 + width * depth


def test_optimal_is_measured_again(invoke, tiny: str, tmp_path: Path, registered: Callable[..., None]) -> None:
    paper = PAPERS.get("optimal")
    runs = tuple(run for run in paper.runs if run.name in ("spec_bench-t0.6", "distributions-alpaca", "distributions-drafts"))
    registered(PAPERS, "optimal", replace(paper, runs=runs))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "category": "a", "prompt": "hello"}) + "\n")
    options = ("--target", tiny, "--draft", "early-exit:2", "--prompts", str(prompts), "--max-new-tokens", "4")
    code, out, err = invoke("bench", "--reproduce", "optimal", *options, "--out", str(tmp_path / "out"))
    assert code == 0, err
    text = (tmp_path / "out" / "reproduction.md").read_text()
    assert text in out
    for words in ("Table 1", "Figure 2", "Table 2", "Table 3", "EAGLE's sparse tree", "Greedy"):
        assert words in text
    tables = [line.split(" | ") for line in text.splitlines() if line.startswith("| 0.6 | ")]
    ours = [row for row in tables if row[1] == "hybrid *"]
    assert len(ours) == 2 and all("–" not in row for row in ours), "every tree has figures"
    hub = next(row for row in tables if row[1] == "SpecHub")
    assert hub[2] != "–" and hub[4] == hub[6] == "–", "two drafts at most"
    distributions = json.loads((tmp_path / "out" / "distributions-drafts" / "analysis.json").read_text())
    assert {row["drafts"] for row in distributions["rows"]} == {1, 2, 3, 4, 6, 8}
    swept = [row for row in (line.split(" | ") for line in text.splitlines()) if row[0] == "| RRS wor"]
    assert len(swept) == 1 and "–" not in " ".join(swept[0]), "Figure 2 has all its points; Figure 1 was not measured"
    before = (tmp_path / "out" / "distributions-drafts" / "analysis.json").stat().st_mtime_ns
    code, _, err = invoke("bench", "--reproduce", "optimal", *options, "--out", str(tmp_path / "out"), "--resume")
    assert code == 0 and (tmp_path / "out" / "distributions-drafts" / "analysis.json").stat().st_mtime_ns == before, err


def test_every_tree_of_optimal_can_be_written() -> None:
    runs = [run for run in PAPERS.get("optimal").runs if isinstance(run, Run)]
    methods = {method for run in runs for method in run.methods if method != "ar"}
    trees = {parse_tree(MethodSpec.parse(method).argument).num_nodes for method in methods}
    assert trees == {1 + 2 + 4 + 8 + 16, 1 + 4 + 16 + 64, 1 + 25}
