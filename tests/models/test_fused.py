"""The kernels between a layer's matrix products, in Triton's interpreter; on a GPU they run in tests/gpu."""

import pytest
import torch

import interpreted
from models.fused_cases import (
    FORMS,
    PLACES,
    check_add_norm,
    check_entries,
    check_fused_features,
    check_gate,
    check_head,
    check_move_up,
    check_place,
    check_rotate_store,
    check_vector_product,
)
from polydraft.backends.triton.attention import obstacle
from polydraft.backends.triton.layers import FusedBody, linear
from polydraft.models.bodies import lean_body
from polydraft.models.heads.feature_head import TapNorm
from polydraft.trees import SlicedMask, parse_tree

interpreted.turn_on()

WHY_NOT = obstacle(torch.device("cpu"), torch.float32)
pytestmark = [
    pytest.mark.slow,  # a covering few run by default: tests/backends
    pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}; pip install triton, and no GPU, for this test"),
]


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
    shapes = []
    block = SlicedMask.of(parse_tree("2x1"), torch.device("cpu")).level(0, 5).expand(1)
    body = FusedBody(
        lean_body(model.hf_model), product=lambda *inputs: (shapes.append(tuple(inputs[1].shape)), linear(*inputs))[1]
    )
    found = []
    for fused in (None, body):
        monkeypatch.setattr(model, "fast", fused)
        context = model.start(1, 16)
        context.prefill([[5, 6, 7]])
        found.append(context.extend(torch.tensor([[11, 12, 13, 14, 15]]), block))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    layers, passes = model.num_layers, 2
    assert shapes == [(64, 32), (32, 32), (96, 32), (32, 48)] * layers * passes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_head_computes_what_the_plain_one_does(form: str, dtype: torch.dtype) -> None:
    check_head("cpu", dtype, FORMS[form])


@pytest.mark.parametrize("norm", TapNorm)
@pytest.mark.parametrize("reads_last", [False, True])
def test_features_are_normed_and_fused(norm: TapNorm, reads_last: bool) -> None:
    check_fused_features("cpu", torch.float32, {"tap_norm": norm, "reads_last": reads_last})


@pytest.mark.parametrize("case", PLACES)
def test_tokens_go_to_their_places(case: str) -> None:
    check_place("cpu", **PLACES[case])


@pytest.mark.parametrize(("layers", "rows", "heads", "channels"), [(2, 3, 2, 8), (1, 1, 3, 6)])
def test_accepted_tokens_move_up(layers: int, rows: int, heads: int, channels: int) -> None:
    check_move_up("cpu", torch.float32, layers, rows, heads, channels)


def test_entries_before_and_after_a_tree() -> None:
    check_entries("cpu", torch.float32)
