"""Dynamic trees, decision models and lossy drafters from the command line."""

import json
import math
from pathlib import Path

import pytest

USAGE = {
    "no nodes": (["--tree", "dynamic:0"], "dynamic tree of 0 nodes; allowed: 2 to 1024"),
    "no depth": (["--tree", "dynamic:8:0"], "dynamic tree of depth 0"),
    "too deep": (["--tree", "dynamic:4:4"], "allowed: 1 to 3"),
    "not a dynamic tree": (["--tree", "dynamic:few"], "unknown tree 'dynamic:few'; allowed: dynamic, dynamic:NODES"),
    "a scheme of one's own": (["--tree", "dynamic:8", "--scheme", "race"], "dynamic trees draw nothing"),
    "fork without width": (["--tree", "fork:0x3"], "tree width 0"),
    "fork without depth": (["--tree", "target-root:3x0"], "fork depth 0"),
    "threshold above 1": (["--set", "stop_below=1.5"], "threshold 1.5 (stop_below) is out of range; allowed: 0"),
    "no decision model there": (["--decision", "no/such"], "'no/such' is not a decision model"),
    "no decision model ships": (["--decision", "auto"], "no decision model ships for draft"),
    "unknown lossy drafter": (["--lossy", "target-int"], "unknown lossy rule 'target-int'"),
    "lossy without a fork": (["--lossy", "target-init", "--tree", "4x2"], "forks only"),
    "lossy with a tree for one text": (["--lossy", "target-init", "--tree", "best:8x2/fork:3x2"], "forks only"),
    "lossy with a tree by load": (["--lossy", "target-init", "--tree", "load:fork:3x2"], "forks only"),
    "lossy with a scheme": (["--lossy", "target-init", "--scheme", "naive"], "scheme 'naive' does not work with --lossy"),
    "lossy with a walk": (["--lossy", "target-init", "--walk", "node"], "walk 'node' does not work with --lossy"),
    "lossy with n-grams": (["--lossy", "target-init", "--drafter", "lookup+model"], "drafter 'lookup+model' does not work"),
    "lossy and a warm draft": (["--lossy", "target-init", "--draft-temperature", "1"], "draft_temperature 1.0 does not work"),
    "lossy beams": (["--lossy", "target-init", "--beams", "2"], "--lossy target-init does not apply to beams"),
    "flat blocks of no n-grams": (["--lossy", "flat-blocks"], "flat-blocks cannot verify drafter 'auto'; allowed: self-draft"),
    "flat blocks and a tree": (["--lossy", "flat-blocks", "--drafter", "lookup+model"], "cannot verify drafter 'lookup+model'"),
    "flat blocks and a scheme": (
        ["--draft", "none", "--lossy", "flat-blocks", "--drafter", "ngram", "--scheme", "rrs-wr"],
        "scheme 'rrs-wr' does not work with drafter 'ngram', which has no draft; use ngram+model",
    ),
    "flat blocks and a decision": (
        ["--draft", "none", "--lossy", "flat-blocks", "--drafter", "ngram", "--decision", "auto"],
        "a decision model needs a draft",
    ),
    "self-draft as printed without itself": (["--lossy", "self-draft"], "--lossy self-draft does not work with drafter 'auto'"),
    "self-draft as printed beside a tree": (
        ["--lossy", "self-draft", "--drafter", "self-draft+model"],
        "--lossy self-draft does not work with drafter 'self-draft+model'",
    ),
    "self-draft as printed by four tokens": (
        ["--draft", "none", "--lossy", "self-draft", "--drafter", "self-draft", "--set", "ngram_prefix=4"],
        "ngram_prefix=4 does not work with --lossy self-draft, whose paper has 1",
    ),
    "self-draft as printed with beams": (
        ["--draft", "none", "--lossy", "self-draft", "--drafter", "self-draft", "--beams", "2"],
        "--drafter self-draft does not apply to beams",
    ),
    "branches of lookup": (
        ["--draft", "none", "--drafter", "lookup", "--set", "branches=6"],
        "branches=6 is for drafter self-draft, not for 'lookup'",
    ),
    "branches of a draft": (["--set", "branches=6"], "branches=6 is for drafter self-draft, not for 'auto'"),
    "branches of beams": (["--beams", "2", "--set", "branches=6"], "branches=6 is for drafter self-draft"),
    "a corpus of lookup": (
        ["--draft", "none", "--drafter", "lookup", "--corpus", "x.grams"],
        "corpus=x.grams is for drafter self-draft or corpus, not for 'lookup'",
    ),
    "a tree of n-grams alone": (
        ["--draft", "none", "--drafter", "self-draft", "--tree", "4x2"],
        "tree '4x2' does not work with drafter 'self-draft', which has no draft; use self-draft+model",
    ),
    "a tree of nothing": (["--draft", "none", "--drafter", "none", "--tree", "4x2"], "does not work with drafter 'none'"),
    "a threshold without its model": (["--set", "stop_below=0.2"], "stop_below=0.2 needs a decision model"),
    "decision without a tree": (["--tree", "none", "--decision", "auto"], "does not work with tree none, which drafts nothing"),
    "decision with a tree by load": (
        ["--tree", "load:4x2", "--decision", "auto"],
        "tree load:4x2, whose size follows the load",
    ),
    "decision without a draft": (["--draft", "none", "--decision", "auto"], "needs a draft"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(invoke, tiny: str, case: str) -> None:
    options, expected = USAGE[case]
    draft = [] if "--draft" in options else ["--draft", "early-exit:1"]
    code, out, err = invoke("generate", "hello", "--target", tiny, *draft, *options)
    assert (code, out) == (2, "") and expected in err
    assert err.startswith("polydraft: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("rests", [True, False])
def test_a_comparison_shows_what_drafting_would_cost_where_a_tree_rests(
    invoke, tiny: str, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polydraft.cli.comparison.rested", lambda stats: rests)
    options = ("--target", tiny, "--draft", "early-exit:1", "--max-new-tokens", "8", "--tree", "dynamic:8", "--compare")
    code, out, err = invoke("generate", "hello", *options)
    assert code == 0 and "tree dynamic:8" in out
    assert ("tree 1x1x1" in out) == ("to show what that costs" in err) == rests


def test_dynamic_trees_generate_the_same_text(invoke, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.draft.costs._DISTURBED", math.inf)
    options = ("generate", "hello", "--target", tiny, "--draft", "early-exit:1", "--json", "--max-new-tokens", "20")
    code, plain, _ = invoke(*options, "--tree", "2x1")
    assert code == 0
    code, out, _ = invoke(*options, "--tree", "dynamic:16:4")
    assert code == 0 and json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
    assert json.loads(out)["settings"]["tree"] == "dynamic:16:4" and json.loads(out)["settings"]["lossless"]
    assert len(list((tmp_path / "cache" / "costs").iterdir())) == 1
    # One table of costs for a machine: the same seed gives the same text.
    texts = {invoke(*options, "--tree", "dynamic:16:4", "--temperature", "1")[1].split('"sources"')[0] for _ in range(2)}
    assert len(texts) == 1


def test_decision_models_are_trained_used_and_refused(invoke, roomy: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "decision")
    model = ("--target", roomy, "--draft", "early-exit:1")
    sizes = ("--limit", "4", "--rows", "4", "--max-new-tokens", "10", "--traces", "60", "--steps", "20", "--depth", "2")
    code, out, err = invoke("train", "decision", *model, *sizes, "--out", folder)
    assert code == 0, err
    assert "AUC" in out and "calibration error" in out and (tmp_path / "decision" / "README.md").exists()
    for tree in (["2x1"], ["dynamic:8:3"], ["fork:2x2", "--lossy", "target-init"]):
        code, _, err = invoke("generate", "hello", *model, "--decision", folder, "--max-new-tokens", "8", "--tree", *tree)
        assert code == 0, err
    code, _, err = invoke("generate", "hello", "--target", roomy, "--draft", "early-exit:2", "--decision", folder)
    assert code == 2 and "trained for another draft" in err and err.count("\n") == 1
    code, _, err = invoke("train", "decision", *model, *sizes, "--out", folder)
    assert code == 2 and "is not empty" in err
    code, _, err = invoke("train", "decision", *model, *sizes, "--max-new-tokens", "0", "--out", folder)
    assert code == 2 and "--max-new-tokens 0 is out of range; allowed: whole numbers from 1" in err


def test_certify_fails_what_is_lossy(invoke, roomy: str) -> None:
    model = ("--target", roomy, "--draft", "early-exit:1", "--tree", "fork:4x3", "--limit", "2", "--max-new-tokens", "12")
    code, _, err = invoke("certify", "decoder", *model, "--lossy", "target-init")
    assert code == 1 and "not certified" in err


def test_lossy_texts_say_so(invoke, tiny: str) -> None:
    model = ("--target", tiny, "--draft", "early-exit:1", "--tree", "fork:3x2", "--max-new-tokens", "8")
    code, out, err = invoke("generate", "hello", *model, "--lossy", "target-init", "--compare")
    assert code == 0, err
    assert "target-init is lossy" in out
    code, out, _ = invoke("generate", "hello", *model, "--lossy", "target-init", "--json")
    assert json.loads(out)["settings"]["lossless"] is False
