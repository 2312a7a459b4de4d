"""Small prompts, and drafts of every kind for the tiny target."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from polydraft.models import HeadShape
from polydraft.models.heads.head_folder import new_head, save_head, save_vocabulary, tokenizer_fingerprint
from polydraft.models.loading import Loaded, load_model
from polydraft.sampling import PartialVocabulary

TEXTS = ["hello", "a tree", "why", "so"]
NEW_TOKENS = 8
DRAFTS = ("early-exit", "head", "partial")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is read from or written to the user's cache."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "user-cache"))
    return tmp_path / "user-cache"


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts = [{"id": f"p{number}", "category": "a", "prompt": text} for number, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


@pytest.fixture(scope="session")
def loaded(tiny: str) -> Loaded:
    return load_model(tiny, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def drafts(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names of a draft of each kind."""
    loaded, folder = load_model(tiny, torch.device("cpu"), torch.float32), tmp_path_factory.mktemp("drafts")
    config = loaded.model.config
    known = PartialVocabulary(torch.arange(0, loaded.model.vocab_size, 2), loaded.model.vocab_size)
    shape = HeadShape(
        hidden_size=loaded.model.hidden_size,
        taps=(1,),
        num_heads=config.num_attention_heads,
        num_key_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        mlp_size=32,
        window=8,
    )
    torch.manual_seed(3)
    (folder / "head").mkdir()
    save_head(new_head(shape, loaded.model, known, "head"), folder / "head", tokenizer_fingerprint(loaded.tokenizer), {})
    shutil.copytree(tiny, folder / "partial")
    save_vocabulary(known, folder / "partial")
    return {"early-exit": "early-exit:2", "head": str(folder / "head"), "partial": str(folder / "partial")}


@pytest.fixture
def analyze(invoke, tiny: str, prompt_file: str):
    """Run the command on the tiny target; options given later win."""

    def call(*options: str) -> tuple[int, str, str]:
        usual = ("--target", tiny, "--draft", "early-exit:2", "--prompts", prompt_file, "--device", "cpu")
        return invoke("analyze", *usual, "--max-new-tokens", str(NEW_TOKENS), "--dtype", "float32", *options)

    return call
