"""The kernels that write children into trees, on a GPU: the trees of torch's operations there."""

import sys
from pathlib import Path

import pytest
import torch

from polydraft.sampling import NO_TOKEN, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "draft"))
from planting_cases import UNEQUAL, Growth, check_grown

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Growth("best:24x4", columns=24576, size=49152, known=True, rows=1, device="cuda"),
        Growth("best:64x6", columns=49152, size=49152, known=False, rows=4, device="cuda"),
        Growth("32x2", columns=262144, size=262144, known=False, rows=1, device="cuda"),
        Growth("16x1", columns=5001, size=9000, known=True, rows=3, device="cuda"),
        Growth("1x1x1", columns=2047, size=2047, known=False, rows=2, device="cuda"),
        Growth(UNEQUAL, columns=7, size=30, known=True, rows=2, device="cuda"),
    ],
    ids=lambda case: f"{case.tree[:9]}-{case.columns}-of-{case.size}",
)
def test_the_likeliest_are_those_of_torchs_operations(case: Growth, dtype: torch.dtype) -> None:
    for seed in range(3):
        check_grown(case, case.logits(dtype, seed))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_has_no_weight_is_no_child(dtype: torch.dtype) -> None:
    case = Growth("4x1", columns=3000, size=3500, known=True, rows=6, device="cuda")
    logits_BNV = case.logits(torch.float32)
    logits_BNV[:2, 0] = -torch.inf
    logits_BNV[1, 0, 2900] = -3.0
    logits_BNV[2, 0, 2999] = torch.nan
    logits_BNV[3, 0, 100] = torch.inf
    logits_BNV[4, 0] = -100
    logits_BNV[4, 0, 7:10] = torch.tensor([20.0, -39.5, -40.0])
    tokens_BN = check_grown(case, logits_BNV.to(dtype))
    assert (tokens_BN[:, 1:5] != NO_TOKEN).sum(-1).tolist() == [0, 1, 0, 0, 2, 4]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0, repetition_penalty=1.2)], ids=["1", "0"])
@pytest.mark.parametrize("known", [True, False], ids=["part of the tokens", "all tokens"])
def test_drawn_children_are_planted_as_by_torch(params: SamplingParams, known: bool) -> None:
    size = 9000 if known else 3000
    case = Growth("best:24x4", columns=3000, size=size, known=known, rows=5, params=params, scheme="rrs-wor", device="cuda")
    check_grown(case, case.logits(torch.bfloat16))


def test_a_replayed_level_reads_new_logits() -> None:
    case = Growth("4x2x1", columns=24576, size=49152, known=True, device="cuda")
    growth, logits_BNV = case.builder(), case.logits(torch.bfloat16)
    uniforms_BU = torch.rand(case.rows, growth.num_uniforms, device="cuda", dtype=torch.float64)
    tokens_BN = growth.plant(torch.zeros(case.rows, dtype=torch.long, device="cuda"))

    def grow() -> None:
        first = 0
        for level in growth.plan.levels:
            nodes = level.nodes_GK.shape[0]
            growth.draw(level, logits_BNV[:, first : first + nodes], tokens_BN, uniforms_BU)
            first += nodes

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        grow()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        grow()
    other_BNV = case.logits(torch.bfloat16, seed=9)
    logits_BNV.copy_(other_BNV)
    graph.replay()
    torch.cuda.synchronize()
    assert tokens_BN.tolist() == case.tokens(other_BNV, by_kernels=False).tolist()
