"""Tiny models of every family, built once a process, and what the plain Hugging Face forward says of a text."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import FAMILIES
from polydraft.models.hf import HFModel

torch.set_num_threads(1)  # the tests run side by side; two threads each would only get in each other's way


@cache
def _tiny(name: str) -> HFModel:
    with torch.inference_mode(False):  # whatever the test that asks first is in
        return HFModel(FAMILIES.get(name).build())


@cache
def _perturbed(name: str, noise: float) -> HFModel:
    """The same model with noise in its weights: a draft that agrees in part."""
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode(False), torch.no_grad():
        model = copy.deepcopy(_tiny(name).hf_model)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
        return HFModel(model)


@torch.inference_mode()
def _path_logits(model: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each text, by the model's own plain forward; padding on the right is behind a causal model's back."""
    longest = max(map(len, texts))
    padded = torch.tensor([list(text) + [0] * (longest - len(text)) for text in texts])
    logits = model(input_ids=padded, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


@pytest.fixture(name="cache")
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what polydraft keeps."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], HFModel]:
    return _tiny


@pytest.fixture(scope="session")
def perturbed() -> Callable[[str, float], HFModel]:
    return _perturbed


@pytest.fixture(scope="session")
def path_logits() -> Callable[[Any, Sequence[Sequence[int]]], Tensor]:
    return _path_logits
