"""P-EAGLE and DFlash heads compute all levels as speculators does, alone and inside the engine; bad folders are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.eagle3_cases import TOKENS, target_model
from models.parallel_cases import (
    CASES,
    EXPECTED,
    HIDDEN,
    SLIDING,
    all_reference_levels,
    as_authors,
    config_of,
    features_and_tokens,
    levels_of,
    plain_levels,
    taps_of,
    weights_of,
    write,
)
from models.test_eagle3 import Change, configured, pickled, weighted
from polydraft.beam import BeamDecoder
from polydraft.draft import TreeDrafter
from polydraft.draft.costs import costs_of, measure
from polydraft.draft.head_source import ParallelSource
from polydraft.engine import Decoder
from polydraft.errors import FailureError, PolydraftError, UsageError
from polydraft.models.heads.head_export import export_speculators
from polydraft.models.heads.head_folder import TargetSizes
from polydraft.models.heads.kinds import HEAD_KINDS, kind_of
from polydraft.models.heads.parallel_head import ParallelHead
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded, load_draft
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape, parse_tree

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


@pytest.mark.parametrize("kind", ["peagle", "dflash"])
def test_every_round_drafts_from_what_a_few_lines_compute(
    target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Texts of different lengths, one of a single token, in a tree: whatever was accepted, the next levels follow the text."""
    config = config_of(kind)
    weights = weights_of(config)
    head = exact(load_draft(str(write(tmp_path, config, weights)), Loaded(target, None, ())))
    rounds: list[tuple[list[list[int]], torch.Tensor]] = []
    read = ParallelSource._read_fresh

    def noted(source: ParallelSource) -> torch.Tensor:
        output = read(source)
        rounds.append(([list(text) for text in source._texts], source._logits_BDV.clone()))
        return output

    monkeypatch.setattr(ParallelSource, "_read_fresh", noted)
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 11, 2]]
    decoder = Decoder(target, TreeDrafter(head, parse_tree("3x2x1x1")))
    results = decoder.generate(prompts, max_new_tokens=12, seed=0, sampling=SamplingParams(temperature=1.0))
    assert results[0].stats.drafted_tokens > 0 and len(rounds) > 3
    compared = 0
    for texts, logits_BDV in rounds:
        for row, text in enumerate(texts):
            if len(text) == 1 or len(text) >= len(prompts[row]) + 12:  # nothing to read, or done
                continue
            with torch.no_grad():
                states = target.hf_model(torch.tensor([text]), output_hidden_states=True).hidden_states
                features = torch.cat([states[tap][0, :-1] for tap in taps_of(config)], -1)
                expected = plain_levels(config, weights, features, text)
            torch.testing.assert_close(logits_BDV[row], expected, **CLOSE)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("kind", ["peagle", "dflash"])
def test_greedy_texts_are_the_target_s(target: HFModel, tmp_path: Path, kind: str) -> None:
    config = config_of(kind)
    head = load_draft(str(write(tmp_path, config, weights_of(config))), Loaded(target, None, ()))
    assert isinstance(head, ParallelHead) and all(layer.int8 for layer in head.all_layers)
    prompts, params = [[5, 9, 2], [7], [3, 3, 8, 1, 30]], SamplingParams(temperature=0.0)
    plain = Decoder(HFModel(target_model(), "plain")).generate(prompts, max_new_tokens=12, seed=0, sampling=params)
    for shape in (parse_tree("3x2x1"), DynamicShape(nodes=12, depth=4)):
        results = Decoder(target, TreeDrafter(head, shape)).generate(prompts, max_new_tokens=12, seed=0, sampling=params)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]


def test_a_head_in_the_authors_format_and_without_the_target_s_tables(target: HFModel, tmp_path: Path) -> None:
    config = config_of("dflash", draft_vocab_size=TOKENS)
    weights = weights_of(config)
    features, tokens = features_and_tokens(3)
    expected = load_file(EXPECTED)["dflash, whole vocabulary"]
    for table in ("lm_head.weight", "embed_tokens.weight"):
        del weights[table]
    write(tmp_path, as_authors(config), weights)
    assert kind_of(tmp_path) is HEAD_KINDS.get("dflash")
    head = exact(load_draft(str(tmp_path), Loaded(target, None, ())))
    with torch.no_grad():
        torch.testing.assert_close(levels_of(head, seen(features), tokens, (0, 1)), expected, **CLOSE)


def test_trees_are_no_deeper_than_a_pass_gives(target: HFModel, tmp_path: Path) -> None:
    config = config_of("dflash")
    head = load_draft(str(write(tmp_path, config, weights_of(config))), Loaded(target, None, ()))
    assert head is not None
    for shape in (parse_tree("chain:5"), DynamicShape(nodes=12, depth=5)):
        with pytest.raises(UsageError, match=r"gives 4 levels per pass, but the tree has 5; .* such as chain:4"):
            TreeDrafter(head, shape)
    usual = TreeDrafter(head, parse_tree("3x2x1x1x1"), alone=DynamicShape(nodes=64, depth=7), pauses=True)
    assert usual.topology == parse_tree("3x2x1x1") and usual.alone == DynamicShape(nodes=64, depth=4)
    with pytest.raises(UsageError, match="does not read candidates, as beams need"):
        BeamDecoder(Decoder(target, TreeDrafter(head, parse_tree("chain:4"))))
    with pytest.raises(UsageError, match="cannot be written for speculators: it drafts several levels"):
        export_speculators(head, target, "target", tmp_path)


def test_one_pass_is_paid_by_the_round_and_not_by_its_levels(target: HFModel, tmp_path: Path) -> None:
    config = config_of("peagle")
    head = load_draft(str(write(tmp_path, config, weights_of(config))), Loaded(target, None, ()))
    table = measure(target, head, 8)
    assert table["root"]["pass"] > 0
    costs, free = costs_of(table), costs_of({**table, "root": {}})
    assert costs.overhead > free.overhead and costs.draft_level == free.draft_level


def layered(**changes: object) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["transformer_layer_config"] |= changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


BAD: dict[str, tuple[str, Change, type[PolydraftError], str]] = {
    "another hidden size": ("dflash", configured(hidden_size=64), UsageError, "states of size 64, but target 'target' has 32"),
    "another vocabulary": ("peagle", configured(vocab_size=99), UsageError, "of 99 tokens, but target 'target' has 64"),
    "taps too far up": ("dflash", configured(aux_hidden_state_layer_ids=[1, 9]), UsageError, "reads layers 1, 9, but of"),
    "more layers": ("dflash", configured(num_hidden_layers=3), FailureError, "layers.2.input_layernorm.weight is missing"),
    "fewer layers": ("peagle", configured(num_hidden_layers=1), FailureError, "layers.1.input_layernorm.weight is not part"),
    "layers in words": ("peagle", configured(num_hidden_layers="two"), UsageError, "num_hidden_layers is 'two', not a whole"),
    "types of other layers": ("dflash", layered(layer_types=["full_attention"]), UsageError, "not a list of 2 types"),
    "a window in words": ("dflash", layered(**SLIDING | {"sliding_window": "wide"}), UsageError, "sliding_window is 'wide'"),
    "no mask": ("dflash", configured(mask_token_id=None), UsageError, "mask_token_id is None, not a whole number from 0 to 63"),
    "a mask beyond": ("peagle", configured(mask_token_id=64), UsageError, "mask_token_id is 64"),
    "no block": ("dflash", configured(block_size=1), UsageError, "block_size is 1, not a whole number from 2 to 65"),
    "no levels": ("peagle", configured(speculators_config={}), UsageError, "no usable config.json ('proposal_methods')"),
    "a flag in words": ("dflash", configured(sample_from_anchor="yes"), UsageError, "sample_from_anchor is 'yes', not true"),
    "no mask features": ("peagle", weighted(mask_hidden=None), FailureError, "mask_hidden is missing"),
    "no table of its own": ("dflash", weighted(lm_head__weight=None), FailureError, "lm_head.weight is missing"),
    "another kind's": ("dflash", configured(speculators_model_type="dflash2"), UsageError, "'dflash2'; allowed: dflash"),
    "pickled": ("dflash", pickled, UsageError, "are pickled (pytorch_model.bin), which could run any code"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_refused_in_one_line_before_the_target_is_loaded(target: HFModel, tmp_path: Path, case: str) -> None:
    kind, change, error, message = BAD[case]
    config = config_of(kind)
    change(write(tmp_path, config, weights_of(config)))
    found = kind_of(tmp_path)
    assert found is not None
    for check in (
        lambda: load_draft(str(tmp_path), Loaded(target, None, ())),
        lambda: found.check(tmp_path, TargetSizes(name="target", config=target.config), str(tmp_path)),
    ):
        with pytest.raises(error) as caught:
            check()
        assert message in str(caught.value) and "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert target.taps == ()
