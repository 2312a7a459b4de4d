"""An inflated model says what the small one says, as Hugging Face computes it and as the engine does."""

import dataclasses
import random

import pytest
import torch

from families import FAMILIES
from models.test_families import Forest
from polydraft.defaults import default_draft
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import FailureError, UsageError
from polydraft.models import HeadShape
from polydraft.models import inflated as module
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel, early_exit
from polydraft.models.inflated import SHAPES, BigShape, InflatedModel, inflate, parse_inflated, source_name
from polydraft.models.loading import load_model
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

# The tiny Llama: 32 wide, 3 layers, 4 heads of 8 channels over 2 key heads, 48 MLP rows.
WIDER = BigShape(hidden_size=80, num_layers=5, num_heads=6, num_key_heads=6, head_size=16, mlp_size=100)
BIG = {
    "as 7b": WIDER,
    "same heads": dataclasses.replace(WIDER, num_heads=12, num_key_heads=6, head_size=8),
    "larger groups": dataclasses.replace(WIDER, num_heads=12, num_key_heads=3, head_size=32),
    "odd groups": dataclasses.replace(WIDER, num_heads=9, num_key_heads=3, head_size=8),
    "only wider": dataclasses.replace(WIDER, num_layers=3, num_heads=4, num_key_heads=2, head_size=8, mlp_size=48),
}
PROMPTS = [[5, 9, 2], [3, 3, 8, 1, 30, 4, 22, 11, 6], [12, 40]]

every_shape = pytest.mark.parametrize("shape", BIG.values(), ids=list(BIG))


def grouped(**overrides):
    """Three query heads a key head, like the bundled model, and norms that are not all ones."""
    model = FAMILIES.get("llama").build(seed=3, **overrides)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def wider(registered):
    registered(SHAPES, "wider", WIDER)
    return "wider"


@every_shape
@pytest.mark.parametrize("heads", [(4, 2), (4, 1)], ids=str)
@torch.no_grad()
def test_logits_are_the_small_models(shape, heads):
    small = grouped(num_attention_heads=heads[0], num_key_value_heads=heads[1], tie_word_embeddings=heads[1] == 1)
    big = inflate(small, shape)
    assert sum(parameter.numel() for parameter in big.parameters()) == shape.num_parameters(small.config.vocab_size)
    assert not big.config.tie_word_embeddings
    tokens = torch.tensor([[7, 3, 90, 41, 5, 5, 12, 60, 2, 33] * 8])
    expected, got = small(tokens).logits, big(tokens).logits
    assert (got - expected).abs().max() < 1e-4
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert expected.std() > 0.1, "distributions near uniform would hide errors"


@torch.no_grad()
def test_the_rest_is_noise_and_not_zeros():
    """Zeros would draw less power than a real model's weights."""
    small = grouped()
    big = inflate(small, WIDER)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        for layer in big.model.layers:
            weight = layer.get_submodule(name).weight
            assert (weight == 0).float().mean() < (0.4 if "q_proj" in name else 0.01)


@pytest.mark.parametrize("lean", [True, False])
@torch.inference_mode()
def test_trees_and_memory(path_logits, wider, lean):
    small = HFModel(grouped())
    big = InflatedModel(small, wider, lean=lean)
    assert (big.lean is not None) == lean
    forest = Forest(big, path_logits, [11, 6], random.Random(7))
    forest.model = type("Small", (), {"hf_model": small.hf_model, "head": big.head})  # what paths are compared with
    forest.check()
    forest.commit_last_leaf()
    forest.check()


@pytest.mark.parametrize("taps", [(), (1, 2)], ids=str)
@pytest.mark.parametrize("lean", [True, False])
@torch.no_grad()
def test_features_are_the_small_models(wider, taps, lean):
    small = HFModel(grouped(), lean=lean)
    big = InflatedModel(small, wider, lean=lean)
    features, contexts = [], [small.start(1, 16), big.start(1, 16)]
    for model, context in zip((small, big), contexts, strict=True):
        model.tap(taps)
        context.prefill([PROMPTS[1]], lambda rows, starts, counts, seen: features.append(seen))
    assert features[0].shape == features[1].shape == (1, 9, 32 * (1 + len(taps)))
    assert (features[0] - features[1]).abs().max() < 1e-4
    assert contexts[1].cache.keys_LBHSC.shape == (5, 1, 6, 16, 16), "memory costs what the large model's does"


@torch.no_grad()
def test_the_output_head_costs_what_the_large_one_does(wider):
    big = InflatedModel(HFModel(grouped()), wider)
    seen = []
    big.hf_model.lm_head.register_forward_hook(lambda part, inputs, output: seen.append(inputs[0].shape))
    big.head(torch.randn(4, 32))
    assert seen == [(4, 80)] and big.hf_model.lm_head.weight.shape == (96, 80)


def head_tree(target):
    shape = HeadShape(hidden_size=32, taps=(1, 2), num_heads=4, num_key_heads=2, head_size=8, mlp_size=48, window=12)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = new_head(shape, target, None, "test").requires_grad_(False)
    target.tap(shape.taps)
    return TreeDrafter(head, parse_tree("3x2x1"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_feature_head_of_the_small_model_drafts_the_same_for_the_large_one(wider, temperature):
    small = HFModel(grouped())
    results = []
    for target in (small, InflatedModel(small, wider)):
        decoder = Decoder(target, head_tree(target))
        sampling = SamplingParams(temperature=temperature)
        results.append(decoder.generate(PROMPTS, max_new_tokens=24, sampling=sampling, seed=5))
    for one, other in zip(*results, strict=True):
        assert one.token_ids == other.token_ids
    assert results[0][0].stats.rounds == results[1][0].stats.rounds
    assert results[0][0].stats.drafted_tokens == results[1][0].stats.drafted_tokens > 0


@torch.no_grad()
def test_early_exit_is_the_small_models(wider):
    small = HFModel(grouped())
    big = InflatedModel(small, wider)
    distributions = []
    for model in (early_exit(small, 2), early_exit(big, 2)):
        context = model.start(1, 16)
        context.prefill([PROMPTS[1]], lambda rows, starts, counts, seen, model=model: distributions.append(model.head(seen)))
    assert (distributions[0] - distributions[1]).abs().max() < 1e-4


def test_by_name(wider, roomy, monkeypatch):
    name = f"inflated:wider:{roomy}"
    loaded = load_model(name, torch.device("cpu"), torch.float32)
    assert isinstance(loaded.model, InflatedModel) and loaded.model.name == name
    assert "inflated" in loaded.model.note and loaded.tokenizer is not None and loaded.eos_token_ids
    small = load_model(roomy, torch.device("cpu"), torch.float32)
    greedy = SamplingParams(temperature=0)
    texts = [Decoder(one.model).generate([5, 6, 7], sampling=greedy, max_new_tokens=12).token_ids for one in (small, loaded)]
    assert texts[0] == texts[1]
    assert source_name(name) == roomy and default_draft("inflated:7b") == default_draft("smollm2")
    assert parse_inflated("inflated:7b") == ("7b", "smollm2")
    monkeypatch.setattr(module, "free_bytes", lambda device: 3000)
    with pytest.raises(FailureError, match="smaller shape"):
        inflate(small.model.hf_model, WIDER)


@pytest.mark.parametrize("name", ["inflated", "inflated:", "inflated:9b", "inflated:7b:inflated:7b"])
def test_bad_names(name):
    with pytest.raises(UsageError, match=r"7b|smollm2"):
        load_model(name, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        ("gpt2", WIDER, "gpt2"),
        ("llama", dataclasses.replace(WIDER, hidden_size=16), "hidden_size=32"),
        ("llama", dataclasses.replace(WIDER, num_layers=2), "num_layers=3"),
        ("llama", dataclasses.replace(WIDER, num_heads=3, num_key_heads=3), "num_key_heads=4"),
        ("llama", dataclasses.replace(WIDER, head_size=12), "do not divide"),
    ],
)
def test_what_does_not_fit_is_refused(family, shape, reason):
    with pytest.raises(UsageError, match=reason):
        inflate(FAMILIES.get(family).build(), shape)


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.0), ("7b", 6.9), ("13b", 13.2)])
def test_named_shapes_have_their_size_and_room_for_the_bundled_model(name, billions):
    shape = SHAPES.get(name)
    assert shape.num_parameters(49152) / 1e9 == pytest.approx(billions, abs=0.06)
    assert shape.hidden_size >= 576 and shape.num_layers >= 30 and shape.mlp_size >= 1536 and shape.head_size % 64 == 0
    group = shape.num_heads // shape.num_key_heads
    assert shape.num_key_heads >= 3 * -(-3 // group)
