"""Where nothing can be written: one line that says so, a code that is not zero, and nothing half-written.

Permissions do not bind everybody, so these places refuse root as well: a path below a file, /proc, and a folder where a file
should go.
"""

import json
import logging
from pathlib import Path

import pytest
from safetensors import SafetensorError

from polydraft.train.training import make_pupil

SIZES = ["--tokens", "400", "--length", "40", "--steps", "2", "--batch-size", "2", "--device", "cpu"]
HEAD, DRAFT = ["head", "--taps", "none", *SIZES], ["draft", "--layers", "1", "--width", "32", *SIZES]
DECISION = [
    "decision",
    "--draft",
    "early-exit:1",
    "--traces",
    "200",
    "--steps",
    "5",
    "--device",
    "cpu",
    "--max-new-tokens",
    "8",
]


@pytest.fixture(autouse=True)
def messages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go to the standard error of the moment, not to that of the first test."""
    monkeypatch.setattr(logging.getLogger("polydraft"), "handlers", [])


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt": "why"}\n')
    return str(file)


@pytest.fixture
def commands(tiny: str, prompts: str) -> dict[str, list[str]]:
    """Everything that takes --out."""
    pair = ["--target", tiny, "--draft", "early-exit:1", "--prompts", prompts, "--max-new-tokens", "4"]
    return {
        "head": ["train", *HEAD, "--target", tiny],
        "draft": ["train", *DRAFT, "--target", tiny],
        "decision": ["train", *DECISION, "--target", tiny, "--prompts", prompts],
        "corpus-cache": ["train", "corpus-cache", "--tokenizer", tiny, "--text", prompts],
        "export": ["export", "head", "smollm2-head", "--format", "speculators", "--target", tiny],
        "analyze": ["analyze", *pair, "--positions", "2", "--schemes", "race", "--drafts", "2"],
        "bench": ["bench", *pair, "--methods", "ar"],
        "reproduction": ["bench", *pair, "--reproduce", "mcsd"],
    }


@pytest.mark.parametrize("name", ["head", "draft", "decision", "corpus-cache", "export", "analyze", "bench", "reproduction"])
@pytest.mark.parametrize("place", ["below a file", "/proc"])
def test_a_place_for_nothing_is_refused_in_one_line(invoke, commands, tmp_path: Path, name: str, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "below" if place == "below a file" else Path("/proc/polydraft-out")
    if place == "/proc" and not Path("/proc/self").exists():
        pytest.skip("no /proc")
    before = sorted(tmp_path.rglob("*"))
    code, printed, err = invoke(*commands[name], "--out", str(out))
    last = err.strip().splitlines()[-1]
    assert code != 0 and printed == ""
    assert last.startswith("polydraft: error: ") and str(out) in last and "Traceback" not in err
    assert "choose another --out" in last or name == "corpus-cache"
    # Before others are refused that the system gives no reason to suspect, they have shown how far they are.
    if name != "corpus-cache" and (name, place) != ("analyze", "/proc"):
        assert code == 2 and err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["head", "draft", "decision"])
def test_a_folder_with_something_in_it_is_refused_before_a_model_is_loaded(
    invoke, commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("polydraft.models.loading.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for more in ([], ["--resume"]) if name != "decision" else ([],):
        code, printed, err = invoke(*commands[name], *more, "--out", str(tmp_path / "out"))
        assert (code, printed) == (2, "") and err.count("\n") == 1
        assert f"{tmp_path / 'out'} is not empty; choose another --out" in err
    if name != "decision":
        (tmp_path / "out" / "training").mkdir()
        (tmp_path / "out" / "training" / "settings.json").write_text("{}")
        code, printed, err = invoke(*commands[name], "--out", str(tmp_path / "out"))
        assert (code, printed) == (2, "") and err.count("\n") == 1
        assert "is not empty; pass --resume to continue training, or choose another --out" in err


@pytest.mark.parametrize("name", ["head", pytest.param("draft", marks=pytest.mark.slow)])
def test_a_draft_that_cannot_be_put_in_its_place_is_no_traceback(
    invoke, commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What was trained is kept: with the obstacle out of the way the same command goes on to the end."""
    out = tmp_path / "out"

    def blocked(*given):
        (out / "model.safetensors").mkdir()
        return make_pupil(*given)

    with monkeypatch.context() as patch:
        patch.setattr("polydraft.train.training.make_pupil", blocked)
        code, printed, err = invoke(*commands[name], "--out", str(out))
    last = err.strip().splitlines()[-1]
    assert (code, printed) == (1, "") and last.startswith(f"polydraft: error: cannot write the draft to {out} (")
    assert "run again with --resume" in last and not list((out / "model.safetensors").iterdir())
    (out / "model.safetensors").rmdir()
    assert invoke(*commands[name], "--resume", "--out", str(out))[0] == 0
    assert (out / "model.safetensors").is_file()


def test_a_decision_model_that_cannot_be_written_is_no_traceback(
    invoke, commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given, **named) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("polydraft.papers.decision.save_file", full)
    code, printed, err = invoke(*commands["decision"], "--out", str(tmp_path / "out"))
    last = err.strip().splitlines()[-1]
    assert (code, printed) == (1, "") and "cannot write the decision model" in last and "No space left" in last


def test_measured_costs_that_cannot_be_kept_stop_nothing(
    invoke, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("polydraft.draft.costs._tables", {})
    monkeypatch.setattr("polydraft.draft.costs._SECONDS", 0.0)
    monkeypatch.setattr("polydraft.draft.costs._DISTURBED", float("inf"))  # a busy machine's costs are not kept anyway
    options = ("--target", tiny, "--max-new-tokens", "8", "--json")
    code, out, _ = invoke("generate", "hello", *options, "--draft", "early-exit:1", "--tree", "dynamic:8")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert code == 0 and "cannot keep the measured costs" in warning and "Not a directory" in warning
    plain = invoke("generate", "hello", *options, "--draft", "none")[1]
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
    assert (tmp_path / "file").read_text() == "mine"
