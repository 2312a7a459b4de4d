"""The kernels behind the target's pass, on a GPU: what torch's operations find there, in every entry."""

import sys
from pathlib import Path

import pytest
import torch

from polydraft.sampling import SamplingParams
from polydraft.verify.node import greedy_verdict
from verify.follow_cases import different_tokens, different_verdicts, distributions_of, same, static_tree, torch_alone

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_verdicts_and_outcomes() -> None:
    assert different_verdicts("cuda") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_likeliest_tokens(dtype: torch.dtype) -> None:
    # Of equal logits torch promises the first on a CPU only, so this is what the kernels are compared with.
    for size in (40, 4096, 49152, 262144):
        assert different_tokens(size, dtype, "cuda") == 0


@pytest.mark.parametrize("tree", ["4x2x2x1x1", "8x3x2", "chain:12"])
def test_whole_trees_of_large_vocabularies(tree: str) -> None:
    draft = static_tree(tree, 3, 0, "cuda")
    logits_BNV = torch.randn(*draft.tokens_BN.shape, 49152, generator=torch.Generator().manual_seed(0)).to("cuda")
    children_BN = draft.all_children().amax(-1).clamp(min=0)
    distributions = distributions_of(logits_BNV.scatter(2, children_BN[..., None], 20.0), SamplingParams(temperature=0))
    with torch_alone():
        expected = greedy_verdict(draft, distributions)
    found = greedy_verdict(draft, distributions)
    assert same(found, expected) and int(found.accepted_B.max()) > 0
