"""EAGLE heads in the authors' format compute what their paper's layer computes, and bad ones are refused early."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.eagle3_cases import CHANNELS, ENTRIES, HIDDEN, KEYS, MLP, QUERIES, STEPS, TOKENS, chain, target_model
from models.test_eagle3 import exact
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import FailureError, PolydraftError, UsageError
from polydraft.models.heads.eagle import EAGLE
from polydraft.models.heads.feature_head import FeatureHead
from polydraft.models.heads.head_export import export_speculators
from polydraft.models.heads.head_folder import TargetSizes
from polydraft.models.heads.kinds import HEAD_KINDS, kind_of
from polydraft.models.hf import HFModel
from polydraft.models.loading import Loaded, load_draft
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bias": True, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": MLP,
    "model_type": "llama", "num_attention_heads": QUERIES, "num_key_value_heads": KEYS, "num_hidden_layers": 1,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": TOKENS, "head_dim": CHANNELS,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "no bias": {"bias": False},
    "another base": {"rope_theta": 5e5, "rms_norm_eps": 1e-3},
    "Qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "named": {"architectures": ["LlamaForCausalLMEagle"]},
}


class Layer(nn.Module):
    """The layer as the paper has it, in transformers' parts."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        said = {
            name: value for name, value in config.items() if name not in ("architectures", "bias", "model_type", "rope_theta")
        }
        whole = LlamaConfig(**said, rope_parameters=rope, attn_implementation="eager")
        self.embed_tokens, self.fc = nn.Embedding(TOKENS, HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN, bias=config["bias"])
        self.layers, self.rotary = nn.ModuleList([LlamaDecoderLayer(whole, 0)]), LlamaRotaryEmbedding(whole)
        self.layers[0].input_layernorm = nn.Identity()
        if config["model_type"] == "qwen2":
            attention = self.layers[0].self_attn
            for part in (attention.q_proj, attention.k_proj, attention.v_proj):
                part.bias = nn.Parameter(torch.zeros(part.out_features))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * (1.5 / weight.shape[-1] ** 0.5))

    def forward(self, features_EH: Tensor, tokens_E: Tensor) -> Tensor:
        """Return the outputs of all entries of a text."""
        size, places_1E = len(tokens_E), torch.arange(len(tokens_E))[None]
        joined_1EH = self.fc(torch.cat([self.embed_tokens(tokens_E), features_EH], -1))[None]
        mask_EE = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)
        turns = self.rotary(joined_1EH, places_1E)
        output = self.layers[0](
            joined_1EH, attention_mask=mask_EE[None, None], position_ids=places_1E, position_embeddings=turns
        )
        return (output[0] if isinstance(output, tuple) else output)[0]

    @torch.no_grad()
    def chain(self, features_EH: Tensor, tokens_E: Tensor, table_VH: Tensor) -> Tensor:
        """Return the logits of each step: features are known of the beginning, then come the layer's own outputs."""
        features_EH, logits = features_EH[:ENTRIES], []
        for _ in range(STEPS):
            last_H = self(features_EH, tokens_E[: len(features_EH)])[-1]
            logits.append(functional.linear(last_H, table_VH))
            features_EH = torch.cat([features_EH, last_H[None]])
        return torch.stack(logits)


@pytest.fixture
def target() -> HFModel:
    return HFModel(target_model(), "target")


def write(folder: Path, **changes: Any) -> Layer:
    """Write a head and return its layer."""
    config = {**CONFIG, **changes}
    layer = Layer(config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.clone() for name, weight in layer.state_dict().items()}, folder / "model.safetensors")
    return layer


def loaded(folder: Path, target: HFModel) -> FeatureHead:
    head = load_draft(str(folder), Loaded(target, None, ()))
    assert isinstance(head, FeatureHead)
    return head


def features_and_tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = ENTRIES + STEPS
    return torch.randn(size, HIDDEN, generator=generator), torch.randint(TOKENS, (size,), generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_each_step_of_a_chain_has_the_logits_of_the_layer_alone(target: HFModel, tmp_path: Path, case: str) -> None:
    layer = write(tmp_path, **CASES[case])
    assert kind_of(tmp_path) is HEAD_KINDS.get("eagle")
    head, (features, tokens) = exact(loaded(tmp_path, target)), features_and_tokens()
    expected = layer.chain(features, tokens, target.hf_model.lm_head.weight)
    torch.testing.assert_close(chain(head, features[None], tokens[None]), expected, rtol=0.0, atol=1e-4)
    assert (expected[1:] - expected[:-1]).abs().max() > 0.1 and target.taps == ()


def swapped(head: FeatureHead) -> None:
    assert head.join is not None
    head.join.weight.data = head.join.weight.data.roll(HIDDEN, 1)


def normed(head: FeatureHead) -> None:
    head.attention_norm = head.mlp_norm


def final_norm(head: FeatureHead) -> None:
    head.output_norm = head.mlp_norm


@pytest.mark.parametrize("plant", [swapped, normed, final_norm])
def test_errors_planted_on_purpose_are_caught(target: HFModel, tmp_path: Path, plant: Callable[[FeatureHead], None]) -> None:
    layer = write(tmp_path)
    head, (features, tokens) = exact(loaded(tmp_path, target)), features_and_tokens()
    plant(head)
    expected = layer.chain(features, tokens, target.hf_model.lm_head.weight)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(chain(head, features[None], tokens[None]), expected, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_with_such_a_head_are_the_target_s(target: HFModel, tmp_path: Path, temperature: float) -> None:
    write(tmp_path)
    head = loaded(tmp_path, target)
    prompts, params = [[5, 9, 2], [7], [3, 3, 8, 1, 30]], SamplingParams(temperature=temperature)
    decoder = Decoder(target, TreeDrafter(head, parse_tree("3x2x1")))
    results = decoder.generate(prompts, max_new_tokens=12, seed=0, sampling=params)
    assert all(len(result.token_ids) == 12 for result in results) and head.start(1, 4).fast is None
    if not temperature:
        plain = Decoder(HFModel(target_model(), "plain")).generate(prompts, max_new_tokens=12, seed=0, sampling=params)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]


def test_it_cannot_be_written_for_others(target: HFModel, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UsageError, match="norms neither features nor tokens"):
        export_speculators(loaded(tmp_path, target), target, "target", tmp_path)


def test_a_language_model_of_one_layer_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in CONFIG.items() if name != "bias"}))
    assert kind_of(tmp_path) is None


def weighted(**changes: Tensor | None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        weights = {**load_file(folder / "model.safetensors"), **{name.replace("__", "."): w for name, w in changes.items()}}
        save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors")

    return change


def configured(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")


BAD: dict[str, tuple[Callable[[Path], object], type[PolydraftError], str]] = {
    "another hidden size": (configured(hidden_size=64), UsageError, "hidden states of size 64, but target 'target' has 32"),
    "another vocabulary": (configured(vocab_size=99), UsageError, "vocabulary of 99 tokens, but target 'target' has 64"),
    "a tensor missing": (weighted(fc__weight=None), FailureError, "fc.weight is missing"),
    "features of several layers": (weighted(fc__weight=torch.zeros(32, 96)), FailureError, "fc.weight has the shape [32, 96]"),
    "a norm too many": (weighted(norm__weight=torch.ones(32)), FailureError, "norm.weight is not part of it"),
    "pickled": (pickled, UsageError, "are pickled (pytorch_model.bin), which could run any code"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_refused_in_one_line(target: HFModel, tmp_path: Path, case: str) -> None:
    change, kind, message = BAD[case]
    write(tmp_path)
    change(tmp_path)
    for found in (target, TargetSizes(name="target", config=target.config)):
        with pytest.raises(kind) as caught:
            EAGLE.check(tmp_path, found, "theirs")
        assert message in str(caught.value) and "\n" not in str(caught.value)
