"""`polydraft tune`, from the command line to what other commands make of it."""

import json
from pathlib import Path

import pytest

from polydraft.defaults import default_tree
from polydraft.engine import Decoder
from polydraft.profile import VARIABLE
from polydraft.tune import TuneOptions
from polydraft.tune.tuning import Tuning, Use, usual_candidates

COMMON = ("--max-new-tokens", "8", "--minutes", "0.001", "--raw", "--device", "cpu", "--dtype", "float32")


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


def test_from_prompts_to_a_profile_that_is_used(invoke, roomy: str, cache: Path, prompts: str) -> None:
    pair = ("--target", roomy, "--draft", "early-exit:1")
    code, out, err = invoke("tune", *pair, "--prompts", prompts, "--batch-size", "1,4", *COMMON, "--json")
    assert code == 0, err
    report = json.loads(out)
    for batch in (1, 4):
        own = [one for one in report["results"] if one["batch"] == batch]
        assert own[0]["tree"] == "none" and own[0]["speedup"] == 1.0
        assert {one["tree"] for one in own} >= {"none", "dynamic:8", "chain:2", "4x2x1"}
        assert all(0 < one["low"] <= one["high"] and one["tokens_per_pass"] >= 1 for one in own)
        (picked,) = [one for one in own if one["picked"]]
        assert picked is own[0] or picked["low"] >= 1, "above 1, before it is rounded"
    file = Path(report["profile"])
    written = json.loads(file.read_text())
    assert [(one["temperature"], one["batch"]) for one in written["picks"]] == [(0.0, 1), (0.0, 4)]
    request = ("generate", "one two", *pair, "--raw", "--max-new-tokens", "4", "--dtype", "float32")
    code, _, err = invoke(*request)
    assert code == 0 and "as tuned on this machine" in err
    file.write_text(json.dumps({**written, "format": 1}))
    code, _, err = invoke(*request)
    (line,) = [line for line in err.splitlines() if "profile" in line]
    assert code == 0 and "another version of polydraft wrote it" in line and line.endswith("run polydraft tune again")


def test_several_temperatures_in_tables(invoke, tiny: str, cache: Path, prompts: str) -> None:
    file = cache / "mine.json"
    options = ("--prompts", prompts, "--temperature", "0,1", "--batch-size", "2", "--out", str(file), *COMMON)
    code, out, err = invoke("tune", "--target", tiny, *options)
    assert code == 0, err
    assert "T=0, batch size 2" in out and "T=1, batch size 2" in out and str(file) in out
    assert "chain" not in out and "lookup" in out and "plain decoding" in out  # there is no draft
    assert "tokens/s" in out and "speed-up (95 %)" in out and out.count("* ") == 3  # and a line that says what it marks
    assert [one["temperature"] for one in json.loads(file.read_text())["picks"]] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", "1,zero"), "is not a list of whole numbers"),
        (("--batch-size", "0"), "--batch-size 0 is out of range"),
        (("--temperature", "-1"), "--temperature -1 is out of range"),
        (("--temperature", ","), "is not a list of numbers"),
        (("--minutes", "0"), "--minutes 0 is out of range"),
        (("--max-new-tokens", "1"), "--max-new-tokens 1 is out of range"),
        (("--prompts", "no-such-file"), "not found"),
        (("--out", "no-folder/x.json"), "there is no folder"),
        (("--out", "."), "cannot write .: it is a folder"),
        (("--device", "tpu"), "unknown device"),
        (("--predict", "h100"), "--predict"),
    ],
)
def test_mistakes_are_refused_in_a_line(invoke, tiny: str, cache: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = invoke("tune", "--target", tiny, *arguments)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_a_cache_that_cannot_be_written_to(invoke, tiny: str, cache: Path, prompts: str, monkeypatch) -> None:
    blocked = cache / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(blocked))
    code, _, err = invoke("tune", "--target", tiny, "--prompts", prompts, "--batch-size", "1", *COMMON)
    assert code == 1 and "cannot write the profile" in err


def test_everything_is_warm_before_it_is_timed(roomy: str, cache: Path, prompts: str, monkeypatch) -> None:
    """On a GPU, captures would otherwise be most of the time."""
    asked = {"target": roomy, "draft": "early-exit:1", "source": prompts, "raw": True, "device": "cpu", "dtype": "float32"}
    tuning, events, generate = Tuning(TuneOptions(**asked, batch_sizes=(2,), minutes=0.001)), [], Decoder.generate
    monkeypatch.setattr(Decoder, "warm_up", lambda self, **asked: events.append(("warm", self, asked)))
    monkeypatch.setattr(
        Decoder, "generate", lambda self, *rest, **asked: events.append(("timed", self, {})) or generate(self, *rest, **asked)
    )
    tuning.run()
    kinds = [kind for kind, _, _ in events]
    warm = kinds.index("timed")
    assert {*kinds[:warm]} == {"warm"} and {*kinds[warm:]} == {"timed"}
    assert [one for _, one, _ in events[:warm]] == [one for _, one, _ in events[warm : 2 * warm]]
    assert all(given["batch_size"] == 2 and given["longest"] >= 64 for _, _, given in events[:warm])


def test_candidates_include_the_default_and_follow_the_device() -> None:
    def trees(temperature: float, batch: int, device: str, columns: int = 100) -> list[str]:
        return [one.tree for one in usual_candidates(Use(temperature, batch), device, defaults[device], columns)]

    defaults = {"cpu": "dynamic:8", "cuda": default_tree(gpu=True, dtype="bfloat16")}
    assert trees(0.0, 1, "cpu") == trees(1.0, 8, "cpu") and "dynamic:64" in trees(0.0, 1, "cpu")
    assert "dynamic:64:7:fixed" in trees(0.0, 1, "cuda") and "dynamic:64:7:fixed" in trees(1.0, 1, "cuda")
    for batch in (trees(1.0, 8, "cuda"), trees(0.0, 8, "cuda")):
        assert batch[:2] == ["none", defaults["cuda"]] and "dynamic:64:7:fixed" not in batch
    assert "4x2x1" not in trees(0.0, 1, "cpu", columns=3)  # a draft of three tokens has no four children
    assert {one.drafter for one in usual_candidates(Use(0.0, 1), "cpu", "none", None)} == {"auto", "lookup", "suffix"}
