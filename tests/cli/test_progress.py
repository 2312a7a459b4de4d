"""Commands that take long say so at once, and then how far they are and how long it will be, legibly in a pipe too."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import polydraft
from polydraft.cli.terminal import PhaseProgress

LONG = (
    ["analyze"],
    ["batch", "rows.jsonl", "--out", "out"],
    ["bench", "--out", "out"],
    ["bench", "--reproduce", "mcsd", "--out", "out"],
    ["certify", "hybrid"],
    ["certify", "decoder"],
    ["certify", "endpoint", "--url", "http://localhost:1", "--model", "m"],
    ["export", "head", "smollm2-head", "--format", "speculators", "--out", "out"],
    ["train", "head", "--out", "out"],
    ["train", "draft", "--out", "out"],
    ["train", "decision", "--out", "out"],
    ["train", "corpus-cache", "--text", "text.txt", "--out", "out"],
    ["tune"],
)
WITHOUT_TORCH = """
import json, sys
from polydraft.cli.main import run

class Blocker:
    def find_spec(self, name, *_):
        if name in ("torch", "transformers", "huggingface_hub"):
            print("importing", name, file=sys.stderr)
            raise SystemExit

sys.meta_path.insert(0, Blocker())
for command in json.loads(sys.argv[1]):
    print("#", *command, file=sys.stderr)
    try:
        run(command)
    except SystemExit:
        pass
"""


def test_something_is_said_before_anything_slow_is_imported(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "text.txt"):
        (tmp_path / name).write_text('{"prompt": "hello"}\n')
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(LONG)]
    environment = {"PYTHONPATH": str(Path(polydraft.__file__).parents[1]), "PATH": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    said = dict(part.split("\n", 1) for part in ended.stderr.split("# ")[1:])
    assert {*said} == {" ".join(command) for command in LONG}
    for command, lines in said.items():
        assert lines.startswith("loading torch and transformers ...\nimporting "), (command, lines)


def legible(err: str) -> list[str]:
    """Return the lines of what a pipe got, which holds nothing that moves a cursor."""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", err), err
    return err.splitlines()


def test_a_pipe_hears_of_each_phase_as_it_begins_and_then_now_and_then(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("polydraft.cli.terminal.time.monotonic", lambda: now)
    with PhaseProgress() as progress:
        for done in range(5):
            progress("reading", done, 40)
            now += 2
        progress("writing", 7, 9, "fast")
        progress("writing", 8, 9)
        now += 600
        progress("writing", 8, 9)
    lines = legible(capsys.readouterr().err)
    assert lines == ["reading 0/40", "reading 3/40, about 74 s left", "writing 7/9  fast", "writing 8/9, about 10 min left"]


@pytest.mark.slow
def test_tune_shows_the_whole_and_its_end(invoke, roomy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("polydraft.cli.terminal._SILENCE_SECONDS", -1.0)
    monkeypatch.setattr("polydraft.cli.terminal.sys", SimpleNamespace(modules={}))  # as if torch were to be imported
    options = ("--max-new-tokens", "8", "--batch-size", "2", "--raw", "--device", "cpu", "--dtype", "float32")
    code, _, err = invoke("tune", "--target", roomy, "--draft", "early-exit:1", *options)
    assert code == 0, err
    lines = legible(err)
    assert lines[:2] == ["loading torch and transformers ...", f"loading {roomy} ..."]
    told = [line for line in lines[2:] if line.startswith("tuning ")]  # a busy machine has more to say
    steps = [re.fullmatch(r"tuning (\d+)/100(, about .* left)?(  T=0, batch size 2: (.*))?", line) for line in told]
    assert all(steps), lines
    done = [int(step[1]) for step in steps]
    assert done == sorted(done) and done[0] == 0 and done[-1] == 100 and done[-2] > 90
    assert {step[4].split()[0] for step in steps[:-1]} == {"preparing", "timing"}
    assert all(step[2] for step in steps[-20:-1])


def test_train_head_says_what_it_estimates_and_then_how_far_it_is(invoke, tiny: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("polydraft.cli.terminal._SILENCE_SECONDS", -1.0)
    monkeypatch.setattr("polydraft.cli.terminal.sys", SimpleNamespace(modules={}))  # as if torch were to be imported
    sizes = ("--length", "32", "--tokens", "512", "--steps", "2", "--batch-size", "2", "--mlp", "16", "--sampling-rows", "4")
    code, _, err = invoke("train", "head", "--target", tiny, "--out", str(tmp_path / "out"), *sizes)
    assert code == 0, err
    lines = legible(err)
    assert lines[:3] == ["loading torch and transformers ...", f"loading {tiny} ...", "estimating 0/5"]
    estimated = next(number for number, line in enumerate(lines) if line.startswith("this will take about"))
    assert lines[estimated - 1].startswith("estimating 5/5")
    assert lines[estimated + 1] == "sampling 0/512", "before the first text is written"
    trained = [line for line in lines if line.startswith("training ")]  # a busy machine has more to say
    assert trained[0].startswith("training 0/2") and trained[-1].startswith("training 2/2")


def test_an_interrupted_training_says_what_it_keeps_and_how_to_go_on(invoke, tiny: str, tmp_path: Path, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    sizes = ("--length", "32", "--tokens", "512", "--steps", "2", "--batch-size", "2", "--mlp", "16", "--sampling-rows", "4")
    command = ("train", "head", "--target", tiny, "--out", str(out), *sizes)
    with monkeypatch.context() as patch:
        patch.setattr("polydraft.train.training.make_pupil", interrupted)
        code, _, err = invoke(*command, "--resume")
    assert code == 130 and f"{out} holds no training yet: this one starts from the beginning\n" in err
    assert f"{out} keeps what was done: give the same command with --resume to continue\n" in err and "this will take" in err
    code, _, err = invoke("generate", "Hi", "--target", tiny, "--draft", str(out))
    assert code == 2 and "its training has not ended" in err
    code, _, err = invoke(*command, "--resume")
    assert code == 0 and "sampling" not in err, "the text that was written is kept"


def test_a_training_does_not_write_into_a_models_folder(invoke, tiny: str) -> None:
    for more in ((), ("--resume",)):
        code, _, err = invoke("train", "head", "--target", tiny, "--out", tiny, *more)
        assert code == 2 and err.endswith(f"{tiny} is not empty; choose another --out\n")
    assert not (Path(tiny) / "training").exists()
