"""Decision models: what they look at, how they are kept, and that they learn."""

import json
from pathlib import Path

import pytest
import torch

from polydraft.certify.reference import echo_pair
from polydraft.errors import FailureError, UsageError
from polydraft.papers.decision import (
    DecisionKind,
    DecisionModel,
    DecisionShape,
    check_threshold,
    distribution_inputs,
    draft_fingerprint,
    load_decision,
    save_decision,
    shipped_decision,
)
from polydraft.train import DecisionSettings
from polydraft.train.decision_training import TOP, Traces, collect, fit, quality_of

TARGET, DRAFT = echo_pair().target, echo_pair().draft


def model(kind: DecisionKind = DecisionKind.DISTRIBUTION, inputs: int = TOP + 1) -> DecisionModel:
    torch.manual_seed(0)
    return DecisionModel(DecisionShape(kind=kind, inputs=inputs, width=8)).requires_grad_(False)


def traces(count: int) -> Traces:
    settings = DecisionSettings(traces=count, depth=3, rows=64, max_new_tokens=40)
    return collect(settings, TARGET, DRAFT, [[3, 4], list(echo_pair().prompt)])


def test_a_distribution_is_seen_by_its_largest_probabilities_and_its_entropy() -> None:
    logits_RV = torch.tensor([[0.0, 0.0, 0.0, 0.0], [5.0, -torch.inf, -torch.inf, -torch.inf]])
    inputs_RF = distribution_inputs(logits_RV, 3)
    torch.testing.assert_close(
        inputs_RF[0], torch.tensor([0.25, 0.25, 0.25, 4.0]).where(torch.arange(4) < 3, torch.tensor(4.0).log())
    )
    assert inputs_RF[1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert distribution_inputs(logits_RV, 6).shape == (2, 7), "a small vocabulary is filled up"


@pytest.mark.parametrize(("kind", "layers"), [(DecisionKind.HIDDEN, 3), (DecisionKind.DISTRIBUTION, 2)])
def test_layers_are_the_papers(kind: DecisionKind, layers: int) -> None:
    assert sum(isinstance(layer, torch.nn.Linear) for layer in model(kind).mlp) == layers


def test_a_row_goes_on_while_one_of_its_nodes_is_likely() -> None:
    decision = model()
    logits_BGV = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(1)) * 3
    chances_BG = decision.chances(decision.inputs(logits_BGV, logits_BGV))
    decision.threshold = float(chances_BG.median())
    assert decision.goes_on(logits_BGV, logits_BGV).tolist() == (chances_BG.amax(-1) >= decision.threshold).tolist()
    decision.threshold = 0.0
    assert decision.goes_on(logits_BGV, logits_BGV).all()


def test_a_folder_serves_its_own_draft_only(tmp_path: Path) -> None:
    saved = model()
    save_decision(saved, DRAFT, tmp_path, {})
    loaded = load_decision(str(tmp_path), DRAFT, threshold=0.7)
    assert loaded.threshold == 0.7
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    with pytest.raises(UsageError, match="trained for another draft"):
        load_decision(str(tmp_path), TARGET)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(FailureError, match="cannot read the weights"):
        load_decision(str(tmp_path), DRAFT)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UsageError, match="is not a decision model"):
        load_decision(str(tmp_path), DRAFT)
    with pytest.raises(UsageError, match="no decision model ships for draft"):
        load_decision("auto", DRAFT)
    with pytest.raises(UsageError, match="no decision model of kind 'hidden' ships for draft"):
        load_decision("hidden", DRAFT)


def test_the_shipped_model_is_of_a_kind_that_is_known() -> None:
    folder = shipped_decision("smollm2-head", "auto")
    assert folder is not None and folder == shipped_decision("smollm2-head", "distribution")
    assert DecisionKind(json.loads((folder / "config.json").read_text())["kind"]) is DecisionKind.DISTRIBUTION
    assert shipped_decision("another", "auto") is None


def test_a_fingerprint_is_of_the_weights_not_of_their_format() -> None:
    from families import FAMILIES
    from polydraft.models.hf import HFModel

    first = FAMILIES.get("llama").build(seed=1)
    mark = draft_fingerprint(HFModel(first))
    assert draft_fingerprint(HFModel(FAMILIES.get("llama").build(seed=2))) != mark
    assert draft_fingerprint(HFModel(first.to(torch.bfloat16))) == mark


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_threshold_is_a_probability(value: float) -> None:
    with pytest.raises(UsageError, match=r"threshold .* out of range; allowed: 0"):
        check_threshold(value)


def test_traces_say_what_verification_did() -> None:
    found = traces(4_000)
    assert ((found.ratios_R >= 0) & (found.ratios_R <= 1)).all()
    # What is certain to be accepted is, and what cannot be is not; in between as often as the ratio says.
    assert (found.accepted_R[found.ratios_R == 1] == 1).all()
    assert (found.accepted_R[found.ratios_R == 0] == 0).all()
    between_R = (found.ratios_R > 0) & (found.ratios_R < 1)
    gap = found.accepted_R[between_R].mean() - found.ratios_R[between_R].mean()
    assert between_R.sum() > 200 and abs(float(gap)) < 4 * 0.5 / float(between_R.sum()) ** 0.5


@pytest.mark.parametrize("kind", [DecisionKind.DISTRIBUTION, pytest.param(DecisionKind.HIDDEN, marks=pytest.mark.slow)])
def test_models_learn_which_tokens_are_accepted(kind: DecisionKind) -> None:
    settings = DecisionSettings(kind=kind, steps=300, learning_rate=3e-3, width=32)
    _, quality = fit(settings, traces(8_000), torch.device("cpu"))
    assert quality.auc > 0.6 and quality.calibration_error < 0.08
    assert 0.3 < quality.accepted < 0.95


def test_quality_is_measured_right() -> None:
    chances_R = torch.tensor([0.1, 0.4, 0.35, 0.8])
    quality = quality_of(chances_R, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert quality.auc == pytest.approx(0.75) and quality.accepted == 0.5
    assert quality_of(torch.full((10,), 0.5), torch.tensor([1.0, 0.0] * 5)).auc == pytest.approx(0.5)
    assert quality_of(torch.full((10,), 0.9), torch.tensor([1.0, 0.0] * 5)).calibration_error == pytest.approx(0.4)
