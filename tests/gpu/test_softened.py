"""Probabilities by a kernel, on a GPU: those of torch, and for each node the same bits whatever is beside it."""

import pytest
import torch

from polydraft.sampling.warper import softened

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [5, 5001, 24_576, 49_152, 262_144])
def test_probabilities_are_torchs(columns: int, dtype: torch.dtype) -> None:
    logits_BGV = (4 * torch.randn(2, 9, columns, generator=torch.Generator().manual_seed(0))).to("cuda", dtype)
    logits_BGV[0, 1, : columns // 2] = -torch.inf
    logits_BGV[1, 2, 3] = torch.nan
    temperature_B11 = torch.tensor([0.7, 1.0], device="cuda")[:, None, None]
    expected_BGV = torch.softmax(logits_BGV.double() / temperature_B11, -1).float()
    found_BGV = softened(logits_BGV, temperature_B11)
    torch.testing.assert_close(found_BGV, expected_BGV, rtol=1e-4, atol=1e-7, equal_nan=True)
    alone_11V = softened(logits_BGV[1:, 4:5], temperature_B11[1:])
    assert torch.equal(alone_11V[0, 0], found_BGV[1, 4])
