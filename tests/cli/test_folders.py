"""Folders of models that are not what they say: one line each, before anything large is made, and nothing made up."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polydraft.errors import FailureError, UsageError
from polydraft.models import HeadShape
from polydraft.models.heads.head_folder import load_head, new_head, save_head, tokenizer_fingerprint
from polydraft.models.loading import Loaded, load_model
from polydraft.papers.decision import DecisionKind, DecisionModel, DecisionShape, load_decision, save_decision

Change = Callable[[Path], object]


class Harmful:
    """What a pickle may hold besides tensors."""

    def __reduce__(self):
        return print, ("this code ran",)


@pytest.fixture
def target(tiny: str) -> Loaded:
    return load_model(tiny, torch.device("cpu"), torch.float32)


@pytest.fixture
def head(target: Loaded, tmp_path: Path) -> Path:
    model = target.model
    shape = HeadShape(
        hidden_size=model.hidden_size, taps=(1,), num_heads=4, num_key_heads=2, head_size=8, mlp_size=16, window=8
    )
    save_head(new_head(shape, model, None, "head"), tmp_path, tokenizer_fingerprint(target.tokenizer), {})
    return tmp_path


def configured(**changes: object) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def without_first_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[min(weights)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_another_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "extra": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})


CONFIGS = {
    "heads in words": (configured(num_heads="many"), "num_heads is 'many', not a whole number"),
    "no heads": (configured(num_heads=0), "num_heads is 0"),
    "true heads": (configured(num_heads=True), "num_heads is True"),
    "half a head": (configured(num_heads=0.5), "num_heads is 0.5"),
    "more than can be counted": (configured(window=10**30), "window is 1000000"),
    "taps in a word": (configured(taps="abc"), "taps is 'abc', not a list of layers"),
    "taps in words": (configured(taps=["a"]), "taps is ['a']"),
    "no taps": (configured(taps=None), "taps is None"),
    "theta in a word": (configured(rope_theta="x"), "rope_theta is 'x', not a number"),
    "theta below zero": (configured(rope_theta=-1), "rope_theta is -1"),
    "groups that do not fit": (configured(num_key_heads=3), "not a multiple"),
    "odd heads": (configured(head_size=7), "head_size is odd"),
}
WEIGHTS = {
    "an mlp of a billion": (configured(mlp_size=10**9), "gate_up.weight has the shape [32, 32], where config.json asks for"),
    "an mlp beyond all": (configured(mlp_size=2**31), "gate_up.weight has the shape"),
    "another number of taps": (configured(taps=[1, 2]), "fuse.weight has the shape"),
    "a tensor missing": (without_first_tensor, "attention_norm.weight is missing"),
    "a tensor too many": (with_another_tensor, "extra is not part of it"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "No such file"),
    "torn weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "header"),
}


@pytest.mark.parametrize("case", [*CONFIGS, *WEIGHTS])
def test_heads_are_checked_before_they_are_made(head: Path, target: Loaded, case: str) -> None:
    change, expected = {**CONFIGS, **WEIGHTS}[case]
    change(head)
    with pytest.raises(UsageError if case in CONFIGS else FailureError) as caught:
        load_head(head, target.model, target.tokenizer, "mine")
    assert expected in str(caught.value) and "draft 'mine'" in str(caught.value) and "\n" not in str(caught.value)


def test_whole_heads_are_loaded(head: Path, target: Loaded) -> None:
    loaded = load_head(head, target.model, target.tokenizer, "mine")
    assert loaded.shape.mlp_size == 16 and loaded.shape.taps == (1,)


def test_decision_models_are_checked_before_they_are_made(target: Loaded, tmp_path: Path) -> None:
    size = target.model.hidden_size
    model = DecisionModel(DecisionShape(kind=DecisionKind.HIDDEN, inputs=size, width=4))
    save_decision(model, target.model, tmp_path, {})
    assert load_decision(str(tmp_path), target.model).shape.width == 4
    configured(width=10**9)(tmp_path)
    with pytest.raises(FailureError, match=r"mlp.0.weight has the shape \[4, "):
        load_decision(str(tmp_path), target.model)
    configured(width=10**30)(tmp_path)
    with pytest.raises(FailureError, match="impossible sizes"):
        load_decision(str(tmp_path), target.model)


def pickled(content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


def without_a_shard(folder: Path) -> None:
    shard = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}}))


MODELS = {
    "no config": (lambda folder: (folder / "config.json").unlink(), UsageError, "its folder has no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), UsageError, "its folder has no weights"),
    "no shard": (without_a_shard, UsageError, "its folder has no model-00001-of-00002.safetensors"),
    "torn config": (lambda folder: (folder / "config.json").write_text('{"model'), UsageError, "not a valid JSON file"),
    "torn tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"ver'), UsageError, "Unterminated string"),
    "sizes in words": (configured(hidden_size="many"), FailureError, "hidden_size"),
    "other sizes": (configured(intermediate_size=24), FailureError, "other shapes than config.json says)"),
    "larger than any memory": (configured(intermediate_size=10**9), FailureError, "more weights than the files could hold"),
    "more layers": (configured(num_hidden_layers=5), FailureError, "of its tensors, such as model.layers.3."),
    "harmful pickle": (pickled(pickle.dumps(Harmful())), FailureError, "pickled and hold more than tensors"),
    "empty pickle": (pickled(b""), FailureError, "EOFError"),
    "no pickle at all": (pickled(b"junk" * 9), FailureError, "download or save it again"),
}


@pytest.mark.parametrize("case", MODELS)
def test_folders_say_what_is_wrong_with_them(invoke, tiny: str, tmp_path: Path, case: str) -> None:
    change, kind, expected = MODELS[case]
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    change(folder)
    code, out, err = invoke("generate", "hello", "--target", str(folder), "--draft", "none", "--max-new-tokens", "1")
    assert (code, out) == (2 if kind is UsageError else 1, "") and expected in err
    assert err.startswith("polydraft: error: ") and err.count("\n") == 1
