"""Linear layers of models without a compiled body: the same products, only inside our passes, and nothing left behind."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from covering import covering
from families import FAMILIES
from native.native_models import block_of, random_text, random_tree, read
from polydraft.backends.native import build
from polydraft.backends.native.product import NativeProduct
from polydraft.engine import Decoder
from polydraft.models.hf import HFModel, early_exit
from polydraft.models.products import fast_linears
from polydraft.sampling import SamplingParams

SHAPES = ["qwen3", "gemma", "gemma2", "phi", "phi3", "opt", "gpt_neox", "gpt_neo"]
"""Families that run by the code of `transformers`; all layers of their tiny models are below the least size."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
compiled = pytest.mark.usefixtures("compiled")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def small_linears(model):
    """Compiled products for layers of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polydraft.backends.native.linears.LEAST_WEIGHTS", 1)
        return fast_linears(model)


def with_small_layers(model):
    """Let layers of any size take part."""
    model.linears = small_linears(model.hf_model)
    return model


@pytest.fixture
def asked(monkeypatch):
    """Rows of all compiled products so far."""
    found, real = [], NativeProduct.__call__
    monkeypatch.setattr(NativeProduct, "__call__", lambda self, x: found.append(x[..., 0].numel()) or real(self, x))
    return found


def layer_of(rows, columns, dtype, bias=True):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        for part in layer.parameters():
            part.copy_(torch.randn(part.shape, generator=generator))
    return layer.to(DTYPES[dtype])


def inputs(rows, columns, dtype):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])


@compiled
@every_dtype
@pytest.mark.parametrize("rows,columns,bias", [(1, 1, True), (37, 83, True), (130, 257, False), (64, 512, True)])
def test_products_have_the_same_bits_for_1_to_64_rows(rows, columns, bias, dtype):
    layer, whole_RX = layer_of(rows, columns, dtype, bias), inputs(64, columns, dtype)
    linears = small_linears(layer)
    with torch.inference_mode(), linears:
        whole_RF = layer(whole_RX)
        for count in range(1, 65):
            assert torch.equal(layer(whole_RX[:count]), whole_RF[:count]), count
        assert torch.equal(layer(whole_RX.view(4, 16, columns)), whole_RF.view(4, 16, rows))
        assert torch.equal(layer(whole_RX.view(4, 16, columns)[:, 3:5]), whole_RF.view(4, 16, rows)[:, 3:5])
        assert torch.equal(layer(whole_RX[5]), whole_RF[5])
        if columns > 1:
            assert torch.equal(layer(whole_RX.T.contiguous().T), whole_RF), "inputs in another order of memory"
    assert whole_RF.dtype == DTYPES[dtype]
    expected_RF = functional.linear(whole_RX.double(), layer.weight.double(), layer.bias.double() if bias else None)
    limit = 1e-5 if dtype == "float32" else 0.02
    assert (whole_RF - expected_RF).abs().max() < limit * (1 + expected_RF.abs().max())


@compiled
def test_nothing_but_our_passes_is_touched(asked):
    layer, input_RX = layer_of(40, 50, "float32"), inputs(3, 50, "float32")
    linears = small_linears(layer)
    with torch.no_grad():
        layer(input_RX)
        assert not asked
        with linears:
            assert "forward" in vars(layer)
            layer(input_RX)
            assert asked == [3]
            layer(inputs(65, 50, "float32"))
            assert layer(inputs(0, 50, "float32")).shape == (0, 40)
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(input_RX).dtype == torch.bfloat16
            with torch.enable_grad():
                assert layer(input_RX).requires_grad, "training goes by torch"
            other = threading.Thread(target=lambda: layer(input_RX))
            other.start()
            other.join()
            assert asked == [3], "so do long inputs, empty ones, other dtypes and other threads"
        layer(input_RX)
    assert asked == [3] and "forward" not in vars(layer)
    with pytest.raises(ZeroDivisionError), linears:
        1 / 0  # noqa: B018
    assert "forward" not in vars(layer)


@compiled
def test_long_texts_too_where_torch_has_no_instructions_for_the_format(asked, monkeypatch):
    monkeypatch.setattr("polydraft.backends.native.linears.cpu_computes_bfloat16", lambda: False)
    layer, input_BTX = layer_of(40, 50, "bfloat16"), inputs(130, 50, "bfloat16").view(2, 65, 50)
    with torch.no_grad(), small_linears(layer):
        got = layer(input_BTX)
    assert asked == [64, 64, 2], "torch would take minutes for a prompt"
    with torch.no_grad(), small_linears(layer):
        alone = torch.stack([layer(row_TX[place : place + 1])[0] for row_TX in input_BTX for place in range(65)])
    assert got.shape == (2, 65, 40) and torch.equal(got.flatten(0, 1), alone)


@compiled
def test_a_model_is_checked_by_the_products_that_run_it(asked):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "gemma3_text", hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, vocab_size=2048, sliding_window=16,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).eval()
    HFModel(model)
    assert asked, "its output head is large enough"


@compiled
def test_threads_that_share_a_layer():
    """Who leaves first leaves the layer to the other."""
    layer = layer_of(40, 50, "float32")
    linears, others = small_linears(layer), small_linears(nn.Sequential(layer))
    entered, leave = threading.Event(), threading.Event()

    def second():
        with others:
            entered.set()
            leave.wait(10)

    with linears:
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait(10)
    assert "forward" in vars(layer)
    leave.set()
    thread.join()
    assert "forward" not in vars(layer)


@compiled
def test_what_the_owner_does_is_followed():
    layer, input_RX = layer_of(40, 50, "float32"), inputs(3, 50, "float32")
    linears = small_linears(layer)

    def check():
        with torch.no_grad(), linears:
            got_RF = layer(input_RX.to(layer.weight.dtype))
        with torch.no_grad():
            expected_RF = layer(input_RX.to(layer.weight.dtype))
        assert got_RF.dtype == expected_RF.dtype and (got_RF - expected_RF).abs().max() < 1e-4

    check()
    with torch.no_grad():
        layer.weight.mul_(2)
        check()
        layer.weight.data = layer.weight.data.clone() * 3
        check()
        layer.bias = nn.Parameter(layer.bias.clone() + 1)
        check()
        layer.weight = nn.Parameter(torch.randn(50, 40).T)  # columns side by side
        check()
    layer.double()
    check()
    layer.float()
    seen = []
    hook = layer.register_forward_hook(lambda module, given, output: seen.append(output) or output + 1)
    check()
    assert len(seen) == 2
    hook.remove()
    layer.forward = lambda x: functional.linear(x, layer.weight)  # somebody else's, such as an adapter's
    own = layer.forward
    check()
    assert layer.forward is own
    twin = copy.deepcopy(layer_of(40, 50, "float32"))
    assert "forward" not in vars(twin)


@compiled
@pytest.mark.parametrize(("shape", "dtype"), covering(SHAPES, DTYPES))
@torch.inference_mode()
def test_models(shape, dtype, asked):
    with torch.inference_mode(False):
        model = FAMILIES.get(shape).build(seed=3).to(DTYPES[dtype])
        ours, theirs = with_small_layers(HFModel(model)), HFModel(model, native=False)
    assert ours.fast is None and ours.linears is not None and theirs.linears is None
    text, tree, logits = random_text(20), block_of([random_tree(7)]), []
    for each in (ours, theirs):
        context = each.start(1, 40)
        context.prefill([text])
        logits.append(each.head(context.extend(torch.tensor([random_text(7, seed=1)]), tree)))
    assert logits[0].dtype == logits[1].dtype and asked.count(7) > ours.num_layers, "all layers and the output head"
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE[dtype] * logits[1].abs().max()
    assert not any("forward" in vars(part) for part in model.modules())


@compiled
def test_texts_of_drafted_decoding():
    """The target's own, and its first layers draft while it verifies."""
    from polydraft.draft import TreeDrafter
    from polydraft.trees import parse_tree

    model = FAMILIES.get("qwen3").build(seed=3)
    target = with_small_layers(HFModel(model))
    draft = with_small_layers(early_exit(target, 1))
    greedy, prompt = SamplingParams(temperature=0), random_text(9)
    plain = Decoder(target).generate(prompt, sampling=greedy, max_new_tokens=40).token_ids
    drafted = Decoder(target, TreeDrafter(draft, parse_tree("2x2x1"))).generate(prompt, sampling=greedy, max_new_tokens=40)
    assert drafted.token_ids == plain


@compiled
def test_which_models_take_part():
    tiny = FAMILIES.get("qwen3").build()
    assert fast_linears(tiny) is None, "too small"
    assert small_linears(tiny.half()) is None
    large = FAMILIES.get("qwen3").build(hidden_size=512, intermediate_size=1024)
    assert HFModel(large).linears is not None and HFModel(large, native=False).linears is None
    assert HFModel(FAMILIES.get("llama").build(hidden_size=512)).linears is None, "it is compiled as a whole"
    block = nn.Sequential(nn.Linear(512, 512))
    block.compile()
    assert fast_linears(block) is None, "it would be compiled again at every pass"


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    before = build._STATE.tried, build._STATE.found
    build.forget()
    try:
        model = HFModel(FAMILIES.get("qwen3").build(hidden_size=512, intermediate_size=1024))
        assert model.linears is None
        assert read(model, [random_text(6)], [4, 2]).shape == (1, 6, 512)
    finally:
        with build._STATE.lock:
            build._STATE.tried, build._STATE.found = before


def test_switched_off(monkeypatch):
    monkeypatch.setenv(build.SWITCH, "0")
    assert fast_linears(nn.Linear(512, 512)) is None
