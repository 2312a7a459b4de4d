"""Quantised weights, ours and others': texts are those of the same model's plain decoding, and refusals name the scheme."""

import copy
import json

import pytest
import torch
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM

from covering import keeping
from models.recurrent_cases import build as build_recurrent
from polydraft.backends.native import kernels
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import FAMILIES
from polydraft.models.hf import HFModel
from polydraft.models.loading import load_model
from polydraft.models.quantised import quantise
from polydraft.models.twin import sharpen, twin_config
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

GREEDY = SamplingParams(temperature=0)
PROMPTS = [torch.randint(5, 90, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 20, 3)]
compiled = pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")


def build(name):
    if name in FAMILIES:
        return FAMILIES.get(name).build()
    return with_outliers(1) if name == "gemma3_text" else copy.deepcopy(build_recurrent(name))


def with_outliers(factor):
    """A small Gemma 3 one of whose channels is far larger than all others, as in the real one, before it is scaled back."""
    config = twin_config(AutoConfig.for_model("gemma3_text"))
    config.num_hidden_layers, config.layer_types = 8, config.layer_types * 4
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        sharpen(model)
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[:1] *= factor
            layer.mlp.down_proj.weight[:, :1] /= factor
    return model


def check_texts(model, draft):
    """Compare plain decoding and trees, in a ragged batch, with `generate`, all with the same weights."""
    expected = []
    for prompt in PROMPTS:
        tokens_BT = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(tokens_BT), "pad_token_id": 0, "do_sample": False}
        expected.append(model.generate(tokens_BT, max_new_tokens=12, eos_token_id=None, **options)[0, len(prompt) :].tolist())
    target = HFModel(model)
    for drafter in (None, TreeDrafter(HFModel(draft, trusted=True), parse_tree("3x2x1"))):
        results = Decoder(target, drafter).generate(PROMPTS, sampling=GREEDY, max_new_tokens=12)
        assert [result.token_ids for result in results] == expected
    assert results[0].stats.tokens_per_pass > 1
    return target


@compiled
@pytest.mark.parametrize("name", [*FAMILIES, *keeping(["gemma3_text", "lfm2", "jamba", "mamba"], "gemma3_text")])
def test_int8_texts_of_every_family_are_those_of_plain_decoding(name):
    assert check_texts(quantise(build(name)), build(name)).int8


@compiled
def test_inputs_far_larger_than_others_are_no_obstacle_in_int8():
    """They make the steps of all inputs large, and passes of any kind differ by one here and there: no mask is to blame."""
    assert HFModel(quantise(with_outliers(1000))).int8


class Packed(torch.Tensor):
    """A weight in int8 that is multiplied by code of its own, as torchao's are; it has no storage to look at."""

    def __new__(cls, steps_FX, scales_F1):
        tensor = torch.Tensor._make_wrapper_subclass(cls, steps_FX.shape, dtype=scales_F1.dtype)
        tensor.parts = steps_FX, scales_F1
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(*args[0].parts)
        args, kwargs = tree_map_only(cls, lambda one: one.parts[0] * one.parts[1], (args, kwargs or {}))
        return function(*args, **kwargs)


class Unwilling(Packed):
    """One whose code fails."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(*args[0].parts)
        raise NotImplementedError("no kernel for this machine")


def packed(model, kind=Packed):
    with torch.no_grad():
        for part in list(model.modules()):
            if type(part) is torch.nn.Linear and part is not model.get_output_embeddings():
                scales_F1 = part.weight.abs().amax(dim=1, keepdim=True) / 127
                steps_FX = (part.weight / scales_F1).round().to(torch.int8)
                part.weight = torch.nn.Parameter(kind(steps_FX, scales_F1), requires_grad=False)
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])  # of our own body, and of a type that is tried
def test_weights_that_others_quantised_run_by_their_own_code(name):
    target = check_texts(packed(build(name)), build(name))
    assert target.lean is None and target.fast is None and target.quantised_by == Packed.__module__.split(".")[0]


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_torchao(name, kind, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    build(name).save_pretrained(tmp_path)
    scheme = TorchAoConfig(getattr(torchao, kind)())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=scheme)
    assert check_texts(model, build(name)).quantised_by == "torchao"
    with pytest.raises(UsageError, match="quantised by torchao already"):
        quantise(model)


def test_quantised_weights_that_do_not_run_are_refused_by_their_scheme():
    name = Packed.__module__.split(".")[0]
    with pytest.raises(UsageError, match=rf"'llama', quantised by {name}, .*no kernel for this machine.*not quantised"):
        HFModel(packed(build("llama"), Unwilling))


@compiled
def test_weights_are_not_quantised_twice():
    with pytest.raises(UsageError, match="already; use float32 or bfloat16"):
        quantise(packed(build("llama")))


def test_a_folder_whose_scheme_is_missing_is_refused_by_it(tmp_path, monkeypatch):
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))

    def fail(*args, **options):
        raise ImportError("No module named 'torchao'")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(
        UsageError, match=r"quantised by torchao \(No module named 'torchao'\); install .*, or use weights that are"
    ):
        load_model(str(tmp_path), torch.device("cpu"), torch.float32)
