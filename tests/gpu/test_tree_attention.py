"""Tree attention on a GPU: every shape, and one captured launch that follows the text as it grows."""

import pytest
import torch

from models.attention_cases import Case, largest_error
from polydraft.backends.triton.attention import attend_tree, obstacle
from polydraft.models.attention import tree_attention

WHY_NOT = obstacle(torch.device("cuda")) if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

LENGTHS = {"one": (1,), "none": (0, 5), "ragged": (4096, 1, 700, 0), "long": (4096,)}
HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("size", [1, 5, 13, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_it_is_masked_attention(size, group, lengths):
    for dtype in (torch.bfloat16, torch.float32, *([torch.float16] if size == 13 else [])):
        case = Case(lengths=LENGTHS[lengths], size=size, group=group, dtype=dtype, channels=64 if group == 3 else 128)
        assert largest_error(case, "cuda") < case.tolerance, case


@pytest.mark.parametrize("channels", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_every_head_size(channels, dtype):
    case = Case(lengths=(513, 77), size=13, earlier=9, group=3, channels=channels, dtype=dtype)
    assert largest_error(case, "cuda") < case.tolerance


def test_a_captured_launch_follows_lengths_and_masks():
    case = Case(lengths=(300, 20), size=13, group=3, dtype=torch.bfloat16, room=4096)
    query, key, value, lengths, visible = case.build("cuda")
    key, value = key.nan_to_num(0.5), value.nan_to_num(0.5)
    lengths, visible = lengths.clone(), visible.clone()
    attend_tree(query, key, value, lengths, visible, 0.125, 4096)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend_tree(query, key, value, lengths, visible, 0.125, 4096)
    for step in (0, 1, 900, 2500):
        lengths.add_(step)
        visible.logical_xor_(torch.ones_like(visible).tril(-1))
        graph.replay()
        expected = tree_attention.reference(query.float(), key.float(), value.float(), lengths, visible, 0.125, 0)
        assert float((got.float() - expected).abs().max()) < case.tolerance
