"""Heads written for other engines, from the command line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polydraft.models import HeadShape
from polydraft.models.heads.head_folder import new_head, save_head, tokenizer_fingerprint
from polydraft.models.loading import load_model


@pytest.fixture
def head(tiny: str, tmp_path: Path) -> Path:
    target = load_model(tiny, torch.device("cpu"), torch.float32)
    shape = HeadShape(hidden_size=32, taps=(1,), num_heads=4, num_key_heads=2, head_size=8, mlp_size=16, window=8)
    folder = tmp_path / "head"
    folder.mkdir()
    ours = new_head(shape, target.model, None, "head")
    save_head(ours, folder, tokenizer_fingerprint(target.tokenizer), {"trained_for": tiny})
    return folder


def test_a_head_is_written_and_what_cannot_be_said_is_told(invoke, head: Path, tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    code, printed, err = invoke("export", "head", str(head), "--format", "speculators", "--out", str(out), "--device", "cpu")
    assert code == 0 and printed == f"head written to {out}, for the target {tiny}\n"
    assert "note: the head reads" in err.splitlines()[-1] and "after the final norm" in err.splitlines()[-1]
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == tiny
    weights = load_file(out / "model.safetensors")
    assert len(weights["embed_tokens.weight"]) == len(weights["lm_head.weight"]) == config["draft_vocab_size"]
    assert sorted(file.name for file in out.parent.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "HEAD"], "already exists; choose another --out"),
        (["--out", "OUT", "--target", "OTHER"], "trained for another tokenizer"),
        (["--out", "OUT", "--format", "gguf"], "'gguf' is not"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    invoke, head: Path, other_vocabulary: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"HEAD": str(head), "OUT": str(tmp_path / "out"), "OTHER": other_vocabulary}
    given = [places.get(argument, argument) for argument in arguments]
    code, printed, err = invoke("export", "head", str(head), "--format", "speculators", "--device", "cpu", *given)
    assert code == 2 and printed == "" and message in err and err.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["head"]


def test_models_and_heads_without_a_target_are_refused(invoke, tiny: str, tmp_path: Path) -> None:
    command = ["export", "head", tiny, "--format", "speculators", "--out", str(tmp_path / "out"), "--device", "cpu"]
    code, _, err = invoke(*command)
    assert code == 2 and "does not say which target it was trained for; pass --target NAME" in err
    code, _, err = invoke("export", "head", "nowhere", *command[3:])
    assert code == 2 and "there is no folder nowhere" in err and not (tmp_path / "out").exists()
    code, _, err = invoke(*command, "--target", tiny)
    assert code == 2 and "is not a feature head" in err and not (tmp_path / "out").exists()
