"""A target to train drafts for, and the shortest settings that still learn something."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polydraft.models.loading import Loaded, load_model
from polydraft.train import DraftSize, HeadSize, TrainSettings

SETTINGS = {
    "head": TrainSettings(size=HeadSize(taps=(1,), rollouts=2, mlp_size=32), target="tiny"),
    "draft": TrainSettings(size=DraftSize(layers=1, width=32), target="tiny"),
}


def short(kind: str, **changes) -> TrainSettings:
    usual = {
        "tokens": 1200,
        "length": 40,
        "steps": 12,
        "batch_size": 4,
        "save_every": 4,
        "evaluate_every": 6,
        "sampling_rows": 32,
    }
    return replace(SETTINGS[kind], **{**usual, **changes})


@pytest.fixture
def target(tiny: str) -> Loaded:
    return load_model(tiny, torch.device("cpu"), torch.float32)


@pytest.fixture(params=["head", "draft"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
