"""Methods that propose from n-grams, and Self-Draft's paper measured again."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sample_results import sample_results
from transformers import AutoTokenizer

from polydraft.errors import UsageError
from polydraft.lab.bench.session import BenchOptions, BenchSession
from polydraft.lab.commands.bench import results_table
from polydraft.lab.papers import PAPERS
from polydraft.ngrams import tokenizer_fingerprint
from polydraft.ngrams.counting import GramCounter
from polydraft.ngrams.gram_trie import save_trie

METHODS = [
    "ar",
    "self-draft:2x3,nodes=6",
    "ngram",
    "lookup,nodes=8,depth=4",
    "suffix+ngram",
    "lookup+mcsd:2x1",
    "self-draft+sd:2",
]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    prompts = [{"id": name, "category": name, "prompt": "a b a b a b a b "} for name in "xy"]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


def test_methods_give_the_same_text_and_say_who_proposed(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    options = ("--target", tiny, "--draft", "early-exit:1", "--prompts", prompt_file, "--max-new-tokens", "12", "--raw")
    code, out, err = invoke("bench", *options, "--methods", " ".join(METHODS), "--out", str(tmp_path / "out"))
    assert code == 0, err
    methods = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert list(methods) == METHODS
    assert all(figures["identical"] == 2 for figures in methods.values())
    assert all(sum(figures["tokens_by_source"].values()) == figures["tokens"] for figures in methods.values())
    assert methods["lookup+mcsd:2x1"]["tokens_by_source"]["model"] > 0
    # A model of random weights repeats nothing, but the prompt repeats itself, so something was offered.
    assert all(figures["acceptance_rate"] is not None for name, figures in methods.items() if name != "ar")
    assert "self-draft+sd:2" in out


def test_the_table_says_who_proposed() -> None:
    results = sample_results()
    names = list(results["methods"])
    assert "drafted by" not in printed(results)
    results["methods"][names[1]]["tokens_by_source"] = {"target": 50, "lookup": 30, "model": 20}
    assert "drafted by" in printed(results) and "lookup 30 %, model 20 %" in printed(results)


def printed(results: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(results_table(results))
    return console.file.getvalue()


@pytest.fixture
def corpus_file(roomy: str, tmp_path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(roomy)
    with GramCounter(len(tokenizer)) as counter:
        counter.add(tokenizer("a b c a b d a b c")["input_ids"])
        save_trie(counter.count(tokenizer_fingerprint(tokenizer), max_bytes=1 << 16), tmp_path / "corpus")
    return str(tmp_path / "corpus")


def test_the_paper_is_measured_again(
    invoke, roomy: str, prompt_file: str, corpus_file: str, tmp_path: Path, registered: Callable[..., None]
) -> None:
    paper = PAPERS.get("self-draft")
    runs = [run for run in paper.runs if run.name in ("spec_bench-t0", "spec_bench-t1", "speed-t0", "grid-t0")]
    small = (tuple(name for name in run.methods if "10x" not in name and "x10" not in name) for run in runs)
    runs = tuple(replace(run, methods=methods) for run, methods in zip(runs, small, strict=True))
    registered(PAPERS, "self-draft", replace(paper, runs=runs))
    options = ("--target", roomy, "--draft", "early-exit:1", "--prompts", prompt_file, "--max-new-tokens", "3", "--raw")
    options += ("--corpus", corpus_file)
    code, out, err = invoke("bench", "--reproduce", "self-draft", *options, "--out", str(tmp_path / "out"))
    assert code == 0, err
    text = (tmp_path / "out" / "reproduction.md").read_text()
    assert text in out
    for words in ("Table 2", "code-llama-7b", "Figure 4", "Figures 5 to 7: throughput", "Figure 8", "figure-7.svg", "SpeDe"):
        assert words in text
    for temperature in (0, 1):
        (overall,) = (line for line in text.splitlines() if line.startswith(f"| {temperature} | all of spec_bench |"))
        assert "–" not in overall and overall.count("|") == 10
    (ablated,) = (line for line in text.splitlines() if line.startswith("| all of spec_bench |"))
    assert "–" not in ablated and ablated.count("|") == 9, "as printed, and ours without branches"
    assert "corpus cache corpus" in text
    assert sorted(path.name for path in (tmp_path / "out").glob("*.svg")) == ["figure-5.svg", "figure-7.svg", "figure-8.svg"]


def test_a_paper_that_needs_a_corpus_says_so(invoke, tiny: str, prompt_file: str, tmp_path: Path) -> None:
    options = ("--target", tiny, "--prompts", prompt_file, "--max-new-tokens", "3", "--out", str(tmp_path / "out"))
    code, _, err = invoke("bench", "--reproduce", "self-draft", *options)
    assert (code, err.count("\n")) == (2, 1) and "no cache left" in err


@pytest.mark.parametrize(("method", "message"), [
    ("lookup:5", "takes no argument"),
    ("self-draft:6", "not a size of branches"),
    ("self-draft:0x0", "branch_length=0"),
    ("lookup,nodes=many", "whole numbers"),
    ("lookup,nodes=0", "nodes=0"),
    ("lookup,size=3", "no option 'size'"),
    ("self-draft,corpus=maybe", "allowed: yes, no"),
    ("lookup+sd:2+mcsd:2", "'2+mcsd:2' is not an argument; allowed: one tree"),
    ("lookup+sd+fork:2x2", "has 2 trees"),
    ("lookup+hf:2", "unknown method in 'lookup+hf:2': 'hf'"),
    ("lookup,lossy=all", "allowed: flat-blocks, self-draft, target-init"),
    ("lookup,lossy=self-draft", "--lossy self-draft does not work with drafter 'lookup'"),
    ("lookup,lossy=target-init", "does not work with --lossy target-init"),
    ("lookup+sd:2,lossy=flat-blocks", "flat-blocks cannot verify drafter 'lookup+model'"),
    ("self-draft:2x2,lossy=self-draft,prefix=2", "ngram_prefix=2 does not work with --lossy self-draft"),
    ("self-draft:2x2,lossy=self-draft,seeds=prompt", "branch_seeds=prompt does not work with --lossy self-draft"),
    ("lookup,lossy=flat-blocks,chance=0", "chance=0.0 does not work with lossy=flat-blocks"),
    ("lookup,branches=2", "branches=2 is for drafter self-draft, not for 'lookup'"),
    ("suffix,prefix=2", "ngram_prefix=2 is for drafter self-draft or ngram, not for 'suffix'"),
    ("lookup,decision=auto", "has no option 'decision'"),
    ("mcsd:2x1,stop_below=0.1", "stop_below=0.1 needs a decision model"),
    ("mcsd:2x1,lossy=target-init", "has no option 'lossy'"),
    ("dynamic:8,lossy=flat-blocks", "has no option 'lossy'"),
])  # fmt: skip
def test_wrong_methods_are_refused_in_one_line(tiny: str, prompt_file: str, method: str, message: str) -> None:
    options = BenchOptions(methods=("ar", method), target=tiny, draft="early-exit:1", source=prompt_file, raw=True)
    with pytest.raises(UsageError) as caught:
        BenchSession(options)
    assert message in str(caught.value) and "\n" not in str(caught.value)
