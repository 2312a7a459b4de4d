"""Quantised weights, ours and others': texts are those of the same model's plain decoding, and refusals name the scheme."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM

from covering import keeping
from families import FAMILIES
from models.recurrent_cases import build as build_recurrent
from polydraft.backends.native import kernels
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel
from polydraft.models.loading import load_model
from polydraft.models.quantised import quantise
from polydraft.models.twin import sharpen, twin_config
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree
from stand_in import head_shape

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


DIFFERENT = ["llama", "gemma2", "phi", "opt", "gpt2", "gpt_neo", "gemma3_text"]
"""Families whose layers are unlike: the others have those of Llama, Phi or Gemma 2."""


@compiled
@pytest.mark.parametrize("name", keeping([*FAMILIES, "gemma3_text", "lfm2", "jamba", "mamba"], *DIFFERENT))
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


class Counted(torch.nn.Module):
    """A linear layer of whole numbers and scales, without a weight: GPTQ's and AWQ's are of this shape."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales_F1 = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 7
        self.register_buffer("scales", scales_F1)
        self.register_buffer("qweight", (linear.weight.detach() / scales_F1).round().to(torch.int32))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, input_XF):
        return torch.nn.functional.linear(input_XF, self.qweight * self.scales, self.bias)


class Halved(torch.nn.Linear):
    """A linear layer whose weight is in float8, with a scale beside it, as FP8 checkpoints have them."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight_scale_inv = torch.nn.Parameter(linear.weight.detach().abs().max() / 448, requires_grad=False)
        steps_FX = (linear.weight.detach() / self.weight_scale_inv).to(torch.float8_e4m3fn)
        self.weight, self.bias = torch.nn.Parameter(steps_FX, requires_grad=False), linear.bias

    def forward(self, input_XF):
        return torch.nn.functional.linear(input_XF, self.weight.float() * self.weight_scale_inv, self.bias)


class Refusing(Counted):
    """One that wants another number format."""

    def forward(self, input_XF):
        raise RuntimeError("expected scalar type Half but found Float")


def replaced(model, kind, scheme, head=False):
    """Put other layers in place of a model's linear ones, as transformers does for this scheme."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and (head or child is not model.get_output_embeddings()):
                setattr(module, name, kind(child))
    model.config.quantization_config, model.hf_quantizer = {"quant_method": scheme}, SimpleNamespace(is_compileable=False)
    return model


REPLACED = [(Counted, "gptq", True), (Counted, "awq", False), (Halved, "fp8", False)]


@pytest.mark.parametrize(
    ("name", "kind", "scheme", "head"),
    [*(("llama", *one) for one in REPLACED), ("gemma3_text", *REPLACED[0])]
    + [pytest.param("gemma3_text", *one, marks=pytest.mark.slow) for one in REPLACED[1:]],
)
def test_layers_that_others_have_replaced_run_under_trees(name, kind, scheme, head):
    target = check_texts(replaced(build(name), kind, scheme, head), build(name))
    assert target.quantised_by == scheme and target.lean is None and target.fast is None


def test_layers_that_do_not_run_are_refused_by_their_scheme():
    with pytest.raises(UsageError, match=r"quantised by awq, does not run with trees in float32 \(.*Half.*try another dtype"):
        HFModel(replaced(build("llama"), Refusing, "awq"))


def test_feature_heads_read_tables_that_are_numbers():
    sizes = {"mlp_size": 48, "window": 8}
    target = HFModel(replaced(build("llama"), Halved, "fp8"))
    head = new_head(head_shape(target, **sizes), target, None, "mine")
    assert head.tables[1].shape == (target.vocab_size, target.hidden_size)
    target = HFModel(replaced(build("llama"), Counted, "gptq", head=True))
    with pytest.raises(UsageError, match="which gptq has packed; use a draft model"):
        new_head(head_shape(target, **sizes), target, None, "mine")


class Forgetful(Counted):
    """One whose products depend on how many tokens there are, which no sound scheme's do."""

    def forward(self, input_XF):
        return super().forward(input_XF) * (1 + 0.1 * input_XF.shape[-2])


def test_quantised_models_of_known_types_are_tried():
    with pytest.raises(UsageError, match="'llama', quantised by gptq, "):
        HFModel(replaced(build("llama"), Forgetful, "gptq"))


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


INT4 = {"weight_dtype": torch.int4}
TORCHAO = {"Int8WeightOnlyConfig": {}, "Int8DynamicActivationInt8WeightConfig": {}, "IntxWeightOnlyConfig": INT4}


@pytest.mark.parametrize("kind", TORCHAO)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_torchao(name, kind, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    build(name).save_pretrained(tmp_path)
    scheme = TorchAoConfig(getattr(torchao, kind)(**TORCHAO[kind]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=scheme)
    assert check_texts(model, build(name)).quantised_by == "torchao"
    with pytest.raises(UsageError, match="quantised by torchao already"):
        quantise(model)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    build("llama").save_pretrained(tmp_path)
    # Above the threshold, which columns are rounded depends on all tokens of a pass, in plain decoding too.
    scheme = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, llm_int8_threshold=0.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=scheme)
    assert check_texts(model, build("llama")).quantised_by == "bitsandbytes"


def test_quantised_weights_that_do_not_run_are_refused_by_their_scheme():
    name = Packed.__module__.split(".")[0]
    with pytest.raises(UsageError, match=rf"'llama', quantised by {name}, .*no kernel for this machine.*not quantised"):
        HFModel(packed(build("llama"), Unwilling))


@compiled
def test_weights_are_not_quantised_twice():
    with pytest.raises(UsageError, match="already; use float32 or bfloat16"):
        quantise(packed(build("llama")))


def save_as(folder, scheme):
    """Save a model whose configuration says that it is quantised."""
    build("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))


def test_a_folder_of_a_scheme_that_transformers_does_not_know_is_refused(tmp_path):
    """It would load scaled whole numbers as if they were the weights themselves."""
    save_as(tmp_path, {"quant_method": "frobnicate"})
    with pytest.raises(
        UsageError, match=r"quantised by frobnicate \(which transformers .* does not know\); install the package for that"
    ):
        load_model(str(tmp_path), torch.device("cpu"), torch.float32)


def test_a_folder_whose_scheme_is_missing_is_refused_by_it(tmp_path, monkeypatch):
    save_as(tmp_path, {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}})

    def fail(*args, **options):
        raise ImportError("No module named 'torchao'")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(
        UsageError, match=r"quantised by torchao \(No module named 'torchao'\); install torchao, or use weights that are"
    ):
        load_model(str(tmp_path), torch.device("cpu"), torch.float32)


def test_quantised_weights_are_loaded_where_they_belong(tmp_path, monkeypatch):
    """Some cannot be moved to a GPU afterwards."""
    save_as(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    asked = []

    def fail(*args, **options):
        asked.append(options.get("device_map"))
        raise ImportError("no such package")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(UsageError, match=r"quantised by bitsandbytes \(no such package\); install bitsandbytes, or"):
            load_model(str(tmp_path), torch.device(device), torch.float32)
    assert asked == [None, {"": torch.device("cuda:0")}]
