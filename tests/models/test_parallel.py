"""P-EAGLE and DFlash heads compute all levels as speculators does, alone and inside the engine; bad folders are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.eagle3_cases import target_model
from models.parallel_cases import (
    CASES,
    EXPECTED,
    HIDDEN,
    LENGTHS,
    all_reference_levels,
    config_of,
    features_and_tokens,
    levels_of,
    taps_of,
    weights_of,
    write,
)
from polydraft.models.heads.kinds import HEAD_KINDS, kind_of
from polydraft.models.heads.parallel_head import ParallelHead
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded, load_draft

CLOSE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture
def target() -> HFModel:
    return HFModel(target_model(), "target")


def exact(head: object) -> ParallelHead:
    """Return a head that computes in float32."""
    assert isinstance(head, ParallelHead)
    for layer in head.all_layers:
        layer.native = layer.int8 = False
    return head


def seen(features: torch.Tensor) -> torch.Tensor:
    """Put last hidden states, which these heads do not read, before the features that they do."""
    return torch.cat([torch.full_like(features[..., :HIDDEN], torch.nan), features], -1)


@pytest.mark.parametrize("case", CASES)
def test_all_levels_have_the_logits_of_speculators(target: HFModel, tmp_path: Path, case: str) -> None:
    kind, changes = CASES[case]
    config = config_of(kind, **changes)
    write(tmp_path, config, weights_of(config))
    assert kind_of(tmp_path) is HEAD_KINDS.get(kind)
    head = exact(load_draft(str(tmp_path), Loaded(target, None, ())))
    assert target.taps == tuple(taps_of(config))
    features, tokens = features_and_tokens(len(taps_of(config)))
    expected = load_file(EXPECTED)[case]
    with torch.no_grad():
        for rows in ((0,), (1,), (0, 1)):  # alone, where the host knows every place, and side by side
            torch.testing.assert_close(levels_of(head, seen(features), tokens, rows), expected[list(rows)], **CLOSE)


def test_the_logits_on_file_are_those_of_speculators() -> None:
    pytest.importorskip("speculators", reason="speculators is not installed; pip install speculators==0.9.0 for this test")
    expected = load_file(EXPECTED)
    for case, logits in all_reference_levels().items():
        torch.testing.assert_close(logits, expected[case], **CLOSE)
