"""The kernels between a layer's matrix products, in Triton's interpreter; on a GPU they run in tests/gpu."""

import pytest
import torch
from fused_cases import check_add_norm, check_gate, check_rotate_store, check_vector_product

import interpreted
from polydraft.models._bodies import lean_body
from polydraft.models._fused import FusedBody, FusedHead
from polydraft.models.feature_head import FeatureHead, HeadShape, TapNorm
from polydraft.models.tree_attention import obstacle
from polydraft.trees import SlicedMask, causal_block, parse_tree

interpreted.turn_on()

WHY_NOT = obstacle(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}; pip install triton, and no GPU, for this test")


@pytest.mark.parametrize("channels", [8, 48, 96])
@pytest.mark.parametrize("added", [False, True])
def test_add_norm(channels: int, added: bool) -> None:
    check_add_norm("cpu", torch.float32, channels, added)


@pytest.mark.parametrize(("queries", "keys", "channels"), [(3, 1, 8), (4, 4, 6), (8, 2, 16)])
def test_rotate_store(queries: int, keys: int, channels: int) -> None:
    check_rotate_store("cpu", torch.float32, queries, keys, channels)


@pytest.mark.parametrize("channels", [5, 64, 1500])
def test_gate(channels: int) -> None:
    check_gate("cpu", torch.float32, channels)


@pytest.mark.parametrize(("rows", "channels"), [(5, 8), (64, 1500), (6, 2048)])
@pytest.mark.parametrize("biased", [False, True])
def test_vector_product(rows: int, channels: int, biased: bool) -> None:
    check_vector_product("cpu", torch.float32, rows, channels, biased)


def test_a_body_computes_what_the_plain_one_does_and_multiplies_by_its_product(tiny, monkeypatch) -> None:
    model = tiny("llama")
    body, shapes = FusedBody(lean_body(model.hf_model)), []
    product, block = body.product, SlicedMask.of(parse_tree("2x1"), torch.device("cpu")).level(0, 5).expand(1)
    body.product = lambda *inputs: (shapes.append(tuple(inputs[1].shape)), product(*inputs))[1]
    found = []
    for fused in (None, body):
        monkeypatch.setattr(model, "fused", fused)
        context = model.start(1, 16)
        context.prefill([[5, 6, 7]])
        found.append(context.extend(torch.tensor([[11, 12, 13, 14, 15]]), block))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    layers, passes = model.num_layers, 2
    assert shapes == [(64, 32), (32, 32), (96, 32), (32, 48)] * layers * passes


EAGLE3 = {"joins": False, "reads_last": False, "normed_output": False}
FORMS = {
    "ours": {},
    "EAGLE-3": EAGLE3,
    "EAGLE-3, Qwen2": {**EAGLE3, "normed_residual": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "EAGLE-3, Qwen3": {**EAGLE3, "query_key_norm": True, "normed_output": True, "tap_norm": TapNorm.EACH},
    "other turns": {**EAGLE3, "rope_frequencies": (1.0, 0.3, 0.2, 0.1), "rope_gain": 1.1},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_head_computes_what_the_plain_one_does(form: str) -> None:
    shape = HeadShape(
        hidden_size=32, taps=(1, 2), num_heads=4, num_key_heads=2, head_size=8, mlp_size=24, window=40, **FORMS[form]
    )
    torch.manual_seed(0)
    head = FeatureHead(shape, *torch.randn(2, 16, 32)).requires_grad_(False)
    head.native = False
    block = SlicedMask.of(parse_tree("2x1"), torch.device("cpu")).level(0, 5).expand(1)
    inputs = torch.randn(1, 3, 32), torch.randn(1, 5, 32)
    found = []
    for fused in (None, FusedHead(head, shape.norm_epsilon)):
        context = head.start(1, 16)
        context.read(torch.tensor([[5, 6, 7]]), inputs[0], causal_block(1, 3, torch.device("cpu")))
        context.rewind([3])
        context._fused = fused
        found.append(context.read(torch.tensor([[11, 12, 13, 14, 15]]), inputs[1], block))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
