"""`polydraft tune`, from the command line to what other commands make of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polydraft.defaults import DEFAULTS
from polydraft.engine import Decoder
from polydraft.profile import VARIABLE
from polydraft.tune.options import TuneOptions
from polydraft.tune.rounds import Run, Use
from polydraft.tune.tuning import Tuning

COMMON = ("--limit", "2", "--max-new-tokens", "12", "--batches", "1,4", "--raw", "--device", "cpu", "--dtype", "float32")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("one two three one two three\nfour five six\n")
    return str(file)


def test_from_probes_to_a_profile_that_is_used(invoke, roomy: str, cache: Path, prompts: str) -> None:
    arguments = ("--target", roomy, "--draft", "early-exit:1", "--prompts", prompts, "--check", "2", *COMMON)
    code, out, err = invoke("tune", *arguments, "--json", "--plot", str(cache / "plot.svg"))
    assert code == 0, err
    report = json.loads(out)
    kinds = {one["kind"] for one in report["choices"]}
    assert kinds == {"plain", "chain", "static tree", "dynamic tree", "n-grams", "union"}
    assert all(value > 0 for one in report["choices"] for value in one["expected"].values())
    # The best two, and plain decoding beside them; where the machine is busy that may be one of the two.
    measured = [one["kind"] for one in report["choices"] if one["measured"]]
    assert "plain" in measured and len(measured) in (2, 3), measured
    assert [(one["temperature"], one["batch"]) for one in report["picks"]] == [(0.0, 1), (0.0, 4)]
    assert report["picks"][0]["measured"] is not None and report["picks"][1]["measured"] is None
    assert Path(report["profile"]).is_file() and (cache / "plot.svg").read_text().startswith("<svg")
    code, out, err = invoke(
        "generate",
        "one two",
        "--target",
        roomy,
        "--draft",
        "early-exit:1",
        "--raw",
        "--max-new-tokens",
        "4",
        "--dtype",
        "float32",
    )
    assert code == 0 and "as tuned here" in err


def test_several_temperatures_in_a_table(invoke, tiny: str, cache: Path, prompts: str) -> None:
    file = cache / "mine.json"
    code, out, err = invoke(
        "tune", "--target", tiny, "--prompts", prompts, "--temperature", "0,1", "--check", "0", "--out", str(file), *COMMON
    )
    assert code == 0, err
    assert "T=0: expected speed-up here" in out and "T=1: expected" in out and f"kept in {file}" in out
    assert "chain" not in out and "lookup" in out  # there is no draft
    assert [one["temperature"] for one in json.loads(file.read_text())["picks"]] == [0, 0, 1, 1]


def test_predicting_another_gpu_keeps_nothing(invoke, roomy: str, cache: Path, prompts: str) -> None:
    arguments = ("tune", "--target", roomy, "--draft", "early-exit:1", "--prompts", prompts, *COMMON)
    code, out, err = invoke(*arguments, "--predict", "h100x8", "--size", "70b")
    assert code == 0, err
    assert "as 70b" in out and "on h100x8, reckoned" in out and "kept" not in out and "ran at" not in out
    assert not (cache / "cache" / "profiles").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--predict", "h1"), "unknown GPU 'h1'"),
        (("--size", "70b"), "works only with --predict"),
        (("--predict", "h100", "--size", "5b"), "unknown target size '5b'"),
        (("--predict", "h100", "--out", "x.json"), "writes no profile"),
        (("--batches", "1,zero"), "is not a list of numbers"),
        (("--batches", "0"), "--batches 0 is out of range"),
        (("--temperature", "-1"), "--temperature -1 is out of range"),
        (("--temperature", ","), "is out of range"),
        (("--limit", "0"), "--limit 0 is out of range"),
        (("--check", "-1"), "--check -1 is out of range"),
        (("--prompts", "no-such-file"), "not found"),
        (("--out", "no-folder/x.json"), "there is no folder"),
        (("--plot", "no-folder/x.svg"), "there is no folder"),
        (("--out", "."), "cannot write .: it is a folder"),
        (("--device", "tpu"), "unknown device"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(invoke, tiny: str, cache: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = invoke("tune", "--target", tiny, *arguments)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("batches", "check_batch", "measured"), [((2,), None, {2}), ((1,), None, {1}), ((4, 2), None, {2, 4}), ((1,), 3, {1, 3})]
)
def test_only_batches_that_were_asked_for_are_measured(
    roomy: str, cache: Path, batches, check_batch, measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    class Watched(Run):
        def __init__(self, decoder, use, batch) -> None:
            seen.add(batch)
            super().__init__(decoder, use, batch)

    monkeypatch.setattr("polydraft.tune.tuning.Run", Watched)
    asked = TuneOptions(target=roomy, limit=8, raw=True, device="cpu", dtype="float32", max_new_tokens=8, check=1)
    tuning = Tuning(replace(asked, batches=batches, check_batch=check_batch))
    monkeypatch.setattr("polydraft.tune.tuning._NGRAMS", ("lookup",))
    picks = tuning.run()
    assert seen == measured and [one.batch for one in picks] == [*batches]


def test_a_cache_that_cannot_be_written_to(
    invoke, tiny: str, cache: Path, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = cache / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(blocked))
    code, _, err = invoke("tune", "--target", tiny, "--prompts", prompts, "--check", "0", *COMMON)
    assert code == 1 and "cannot keep the profile" in err


def test_a_gpu_is_warm_before_it_counts_and_rates_its_own_default(
    roomy: str, cache: Path, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures that are made while rounds are timed would be most of the time; shown on a CPU that passes for a GPU."""
    options = TuneOptions(
        target=roomy, draft="early-exit:1", source=prompts, limit=2, raw=True, device="cpu", dtype="float32", max_new_tokens=8
    )
    tuning = Tuning(options)
    greedy, drawn = Use(temperature=0.0, max_new_tokens=8), Use(temperature=1.0, max_new_tokens=8)
    assert tuning._default(greedy) == ()
    monkeypatch.setattr(tuning, "_place", torch.device("cuda"))
    default = tuple(one.tree.partition("/")[0] for one in DEFAULTS if "/" in one.tree)
    assert tuning._default(greedy) == default and tuning._default(drawn) == ()
    warmed = []
    monkeypatch.setattr(Decoder, "warm_up", lambda self, **asked: warmed.append(asked))
    run = tuning._turns([tuning._decoder("chain:2")], greedy, 2, "test")[0]
    assert run.rounds().tokens >= 1
    longest = max(map(len, tuning._prompts)) + 9
    assert [(one["batch_size"], one["longest"], one["sampling"].temperature) for one in warmed] == [(2, longest, 0.0)]
