"""The kernels that grow dynamic trees, on a GPU: as torch's operations do there."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polydraft.trees import DynamicShape

sys.path.insert(0, str(Path(__file__).parents[1] / "draft"))
from growth_cases import Growth, check_grown, check_tables, different, told

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FORMATS = [torch.float32, torch.bfloat16, torch.float16]
USUAL = DynamicShape(nodes=64, depth=6, beam=8, branch=8)
CASES = {
    "part of the tokens": Growth(USUAL, columns=24576, size=49152, known=True, rows=1),
    "all tokens": Growth(USUAL, columns=49152, size=49152, known=False, rows=4),
    "many tokens": Growth(USUAL, columns=262144, size=262144, known=False, rows=1),
    "wide": Growth(DynamicShape(nodes=256, depth=4, beam=16, branch=16), columns=5001, size=9000, known=True),
    "a chain": Growth(DynamicShape(nodes=6, depth=5, beam=1, branch=1), columns=2047, size=2047, known=False),
    "hardly any columns": Growth(USUAL, columns=3, size=70, known=True),
    "a warm draft": Growth(USUAL, columns=5000, size=9000, known=True, lead=1, temperature=1.5),
}


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trees_are_those_of_torchs_operations(case: Growth, dtype: torch.dtype) -> None:
    """But for nodes that are equal up to rounding, which stand in another order now and then."""
    case, wrong = replace(case, device="cuda"), list[list[str]]()
    for seed in range(6):
        logits = case.logits(dtype, seed)
        found = case.grown(logits, by_kernels=True)
        check_tables(found)
        wrong += [names] if (names := different(found, case.grown(logits, by_kernels=False))) else []
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_has_no_distribution_gets_no_children(dtype: torch.dtype) -> None:
    case = Growth(USUAL, columns=3000, size=3500, known=True, rows=6, device="cuda")
    logits = case.logits(torch.float32)
    root_BV, below_BWV = logits[0][:, 0], logits[1]
    root_BV[0] = -torch.inf
    root_BV[1, 2999] = torch.nan
    root_BV[2, 5] = torch.inf
    below_BWV[3, 0] = torch.nan
    below_BWV[4] = -torch.inf
    tree = check_grown(case, [level.to(dtype) for level in logits])
    assert [max(depths) for depths in tree["depths_BN"]][:5] == [0, 0, 0, 4, 1]


def test_a_replayed_round_reads_new_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES["part of the tokens"], rows=2, device="cuda")
    logits = case.logits(torch.bfloat16)
    builder, tail_B2 = case.builder(logits), torch.arange(4, device="cuda").view(2, 2) + 5
    uniforms_BU = torch.zeros(2, 0, device="cuda")
    # What the draft is asked is compared elsewhere: a capture may not look.
    monkeypatch.setattr(builder.source, "expand", lambda tokens_BW, *_: builder.source.next(tokens_BW))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        builder.build(tail_B2, uniforms_BU)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        draft = builder.build(tail_B2, uniforms_BU)
    others = case.logits(torch.bfloat16, seed=9)
    for level, other in zip(logits, others, strict=True):
        level.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    found, expected = told(builder, draft), case.grown(others, by_kernels=False)
    assert all(found[name] == expected[name] for name in ("tokens_BN", "depths_BN", "ancestors_BNN", "child_table_BNK"))
