"""Heads of others compute here what speculators computes, ours compute there what they do here; bad folders are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from models.eagle3_cases import (
    CASES,
    CHANNELS,
    DRAFTED,
    EXPECTED,
    HIDDEN,
    KEYS,
    MLP,
    QUERIES,
    TAPS,
    TOKENS,
    all_reference_chains,
    chain,
    config_of,
    features_and_tokens,
    reference_chain,
    target_model,
    weights_of,
    write,
)
from polydraft import loading
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import FailureError, PolydraftError, UsageError
from polydraft.models import FeatureHead, HeadShape
from polydraft.models.heads.eagle3 import EAGLE3
from polydraft.models.heads.feature_head import TapNorm
from polydraft.models.heads.head_export import export_speculators
from polydraft.models.heads.head_folder import TargetSizes, new_head
from polydraft.models.heads.kinds import HEAD_KINDS, kind_of
from polydraft.models.heads.known import known_draft
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded, load_draft
from polydraft.sampling import PartialVocabulary, SamplingParams
from polydraft.trees import parse_tree

CLOSE = {"rtol": 0.0, "atol": 1e-4}
SAME_STEPS = {"window": 1}
"""Steps that can be compared: speculators counts a window from the entry that a chain begins at, we and engines by position."""


@pytest.fixture
def target() -> HFModel:
    return HFModel(target_model(), "target")


def exact(head: FeatureHead) -> FeatureHead:
    """Return a head that computes in float32."""
    head.native = head.int8 = False
    return head


def seen(features: torch.Tensor) -> torch.Tensor:
    """Put last hidden states, which these heads do not read, before the features that they do."""
    return torch.cat([torch.full_like(features[..., :HIDDEN], torch.nan), features], -1)


@pytest.mark.parametrize("authors", [False, True], ids=["speculators", "authors"])
@pytest.mark.parametrize("case", CASES)
def test_each_step_of_a_chain_has_the_logits_of_speculators(target: HFModel, tmp_path: Path, case: str, authors: bool) -> None:
    config = config_of(**CASES[case])
    write(tmp_path, config, weights_of(config), authors)
    assert kind_of(tmp_path) is HEAD_KINDS.get("eagle3")
    head = exact(EAGLE3.load(tmp_path, target, None, "theirs"))
    features, tokens = features_and_tokens(len(config[TAPS]))
    steps = SAME_STEPS.get(case)
    torch.testing.assert_close(chain(head, seen(features), tokens)[:steps], load_file(EXPECTED)[case][:steps], **CLOSE)
    assert target.taps == tuple(config[TAPS])


def test_the_logits_on_file_are_those_of_speculators() -> None:
    pytest.importorskip("speculators", reason="speculators is not installed; pip install speculators==0.9.0 for this test")
    expected = load_file(EXPECTED)
    for case, logits in all_reference_chains().items():
        torch.testing.assert_close(logits, expected[case], **CLOSE)


def test_columns_in_any_order_and_missing_tables(target: HFModel, tmp_path: Path) -> None:
    config = config_of()
    weights = weights_of(config)
    features, tokens = features_and_tokens(3)
    expected = chain(exact(EAGLE3.load(write(tmp_path / "a", config, weights), target, None, "a")), seen(features), tokens)
    order = torch.randperm(DRAFTED)
    known = (weights["d2t"] + torch.arange(DRAFTED))[order]
    weights |= {"lm_head.weight": weights["lm_head.weight"][order], "d2t": known - torch.arange(DRAFTED)}
    mixed = exact(EAGLE3.load(write(tmp_path / "b", config, weights), target, None, "b"))
    torch.testing.assert_close(chain(mixed, seen(features), tokens), expected)
    assert mixed.tables[0] is not target.hf_model.get_input_embeddings().weight
    del weights["embed_tokens.weight"], weights["t2d"]
    head = EAGLE3.load(write(tmp_path / "c", config, weights), target, None, "c")
    assert torch.equal(head.tables[0], target.hf_model.get_input_embeddings().weight)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_with_such_a_head_are_the_target_s(target: HFModel, tmp_path: Path, temperature: float) -> None:
    config = config_of(norm_before_residual=True)
    head = EAGLE3.load(write(tmp_path, config, weights_of(config)), target, None, "theirs")
    prompts, params = [[5, 9, 2], [7], [3, 3, 8, 1, 30]], SamplingParams(temperature=temperature)
    decoder = Decoder(target, TreeDrafter(head, parse_tree("3x2x1")))
    results = decoder.generate(prompts, max_new_tokens=12, seed=0, sampling=params)
    assert all(len(result.token_ids) == 12 for result in results) and head.start(1, 4).fast is None
    if not temperature:
        plain = Decoder(HFModel(target_model(), "plain")).generate(prompts, max_new_tokens=12, seed=0, sampling=params)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]


OURS = HeadShape(
    hidden_size=HIDDEN, taps=(1, 3), num_heads=QUERIES, num_key_heads=KEYS, head_size=CHANNELS, mlp_size=MLP, window=100
)
FORMS: dict[str, dict[str, object]] = {
    "ours": {},
    "no taps": {"taps": ()},
    "window": {"window": 6},
    "norm per tap": {"tap_norm": TapNorm.EACH},
    "norm of all": {"tap_norm": TapNorm.ALL},
    "output before the norm": {"normed_output": False},
    "wide, with biases": {"head_size": 16, "mlp_bias": True, "qkv_bias": True, "output_bias": True},
    "EAGLE-3": {"joins": False, "reads_last": False},
    "Qwen3": {"joins": False, "normed_residual": True, "query_key_norm": True, "qkv_bias": True, "reads_last": False},
}


def random_head(target: HFModel, **form: object) -> FeatureHead:
    torch.manual_seed(3)
    head = new_head(replace(OURS, **form), target, PartialVocabulary(torch.arange(2, 62, 3), TOKENS), "ours")
    for name, weight in head.requires_grad_(False).named_parameters():
        weight.copy_(weight + 0.2 * torch.randn_like(weight) if "norm" in name else 2 * weight)
    return exact(head)


@pytest.mark.parametrize("form", FORMS)
def test_speculators_computes_our_logits(target: HFModel, tmp_path: Path, form: str) -> None:
    pytest.importorskip("speculators", reason="speculators is not installed; pip install speculators==0.9.0 for this test")
    target.hf_model.save_pretrained(tmp_path / "target")
    head = random_head(target, **FORMS[form])
    (tmp_path / "head").mkdir()
    notes = export_speculators(head, target, str(tmp_path / "target"), tmp_path / "head")
    features, tokens = features_and_tokens(len(head.shape.taps) + 1)
    # There, the last hidden states are the last of the features.
    theirs = features.roll(-HIDDEN, -1) if head.shape.reads_last else features[..., HIDDEN:]
    expected, steps = reference_chain(tmp_path / "head", theirs, tokens), SAME_STEPS.get(form)
    torch.testing.assert_close(chain(head, features, tokens)[:steps], expected[:steps], **CLOSE)
    assert len(notes) == head.shape.reads_last and all("after the final norm" in note for note in notes)


@pytest.mark.parametrize("form", ["EAGLE-3", "Qwen3"])
def test_what_is_written_can_be_read_again(target: HFModel, tmp_path: Path, form: str) -> None:
    head = random_head(target, **FORMS[form])
    export_speculators(head, target, "target", tmp_path)
    again = exact(EAGLE3.load(tmp_path, target, None, "again"))
    features, tokens = features_and_tokens(3)
    torch.testing.assert_close(chain(again, features, tokens), chain(head, features, tokens))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"rope_frequencies": (1.0, 0.5, 0.2, 0.1)}, "rotary frequencies"),
        ({"query_key_norm": True}, "norms queries and keys"),
        ({"head_size": 4}, "16 channels wide, less than its hidden size 32"),
    ],
)
def test_heads_that_cannot_be_expressed_are_refused(target: HFModel, tmp_path: Path, form, message: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be written for speculators: .*{message}") as caught:
        export_speculators(random_head(target, **form), target, "target", tmp_path)
    assert "\n" not in str(caught.value) and not [*tmp_path.iterdir()]


Change = Callable[[Path], object]


def configured(**changes: object) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        layer = config["transformer_layer_config"]
        layer |= {name: value for name, value in changes.items() if name in layer or name == "hidden_act"}
        config |= {name: value for name, value in changes.items() if name not in layer}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def weighted(**changes: torch.Tensor | None) -> Change:
    def change(folder: Path) -> None:
        weights = {**load_file(folder / "model.safetensors"), **{name.replace("__", "."): new for name, new in changes.items()}}
        save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / "model.safetensors")

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")


BAD: dict[str, tuple[Change, type[PolydraftError], str]] = {
    "another hidden size": (configured(hidden_size=64), UsageError, "hidden states of size 64, but target 'target' has 32"),
    "another target size": (configured(target_hidden_size=8), UsageError, "hidden states of size 8"),
    "another vocabulary": (configured(vocab_size=99), UsageError, "for a vocabulary of 99 tokens, but target 'target' has 64"),
    "taps too far up": (configured(**{TAPS: [1, 2, 9]}), UsageError, "reads layers 1, 2, 9, but of target 'target' layers 1"),
    "embeddings": (configured(**{TAPS: [0, 1, 2]}), UsageError, "taps is [0, 1, 2], not a list of layers"),
    "taps twice": (configured(**{TAPS: [1, 1, 2]}), UsageError, "[1, 1, 2], not a list of different layers"),
    "taps in a word": (configured(**{TAPS: "all"}), UsageError, "'all', not a list"),
    "fewer taps": (configured(**{TAPS: [1, 2]}), FailureError, "fc.weight has the shape [32, 96], where config.json asks for"),
    "default taps": (configured(**{TAPS: None}), UsageError, "[2, 2, 1], not a list of different layers"),
    "two layers": (configured(num_hidden_layers=2), UsageError, "num_hidden_layers is 2; heads of 1 layer can be loaded"),
    "another kind": (
        configured(speculators_model_type="medusa"), UsageError, "type is 'medusa'; allowed: dflash, eagle3, mtp, peagle"
    ),
    "another layer": (configured(model_type="gemma3"), UsageError, "model_type is 'gemma3'; allowed: llama, qwen2, qwen3"),
    "another activation": (configured(hidden_act="gelu"), UsageError, "hidden_act is 'gelu'"),
    "rope that depends on length": (
        configured(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), UsageError, "rope_type is 'dynamic'; allowed"
    ),
    "heads in words": (configured(num_attention_heads="many"), UsageError, "num_heads is 'many', not a whole number"),
    "a norm in words": (configured(norm_output="yes"), UsageError, "normed_output is 'yes', not true or false"),
    "no layer": (configured(transformer_layer_config=None), UsageError, "transformer_layer_config is None, not an object"),
    "a tensor missing": (weighted(fc__weight=None), FailureError, "fc.weight is missing"),
    "a norm missing": (configured(fc_norm=True), FailureError, "fc_norm.0.weight is missing"),
    "no map of tokens": (weighted(d2t=None), FailureError, "d2t is missing"),
    "tokens beyond": (weighted(d2t=torch.full((DRAFTED,), 60)), FailureError, "d2t does not name 40 different tokens below 64"),
    "maps that differ": (weighted(t2d=torch.ones(TOKENS, dtype=torch.bool)), FailureError, "t2d and d2t name different tokens"),
    "a tensor too many": (weighted(extra=torch.zeros(1)), FailureError, "extra is not part of it"),
    "torn": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), FailureError, "cannot read the weights"),
    "pickled": (pickled, UsageError, "are pickled (pytorch_model.bin), which could run any code"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), UsageError, "holds no .safetensors file"),
}  # fmt: skip


READ = ("tokens beyond", "maps that differ")
"""What is wrong in the weights themselves, which are read when the target is there."""


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_refused_in_one_line(target: HFModel, tmp_path: Path, case: str) -> None:
    change, kind, message = BAD[case]
    config = config_of()
    change(write(tmp_path, config, weights_of(config)))
    with pytest.raises(kind) as caught:
        load_draft(str(tmp_path), Loaded(target, None, ()))
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert target.taps == ()
    kind_found = kind_of(tmp_path)
    assert kind_found is not None
    if case not in READ:
        with pytest.raises(kind) as early:
            kind_found.check(tmp_path, TargetSizes(name="target", config=target.config), str(tmp_path))
        assert str(early.value) == str(caught.value)


def test_heads_are_refused_before_the_target_is_loaded(
    target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.hf_model.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("the target was loaded"))
    config = config_of()
    configured(hidden_size=64)(write(tmp_path / "eagle", config, weights_of(config)))
    with pytest.raises(UsageError, match="hidden states of size 64"):
        loading.load(str(tmp_path), str(tmp_path / "eagle"))
    assert known_draft(str(tmp_path)) is None  # one that nobody named is passed over
    write(tmp_path / "eagle", config, weights_of(config))
    assert known_draft(str(tmp_path)) == str(tmp_path / "eagle")


def test_a_name_on_a_hub(target: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place, mark = tmp_path / "models--org--theirs", "0" * 40
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(mark)
    (place / "snapshots").mkdir()
    config = config_of()
    write(place / "snapshots" / mark, config, weights_of(config), authors=True)
    head = load_draft("org/theirs", Loaded(target, None, ()))
    assert isinstance(head, FeatureHead) and head.name == "org/theirs" and target.taps == (1, 2, 3)
