"""Probabilities by a kernel, in Triton's interpreter: those of torch. On a GPU it runs in tests/gpu."""

import pytest
import torch
from torch import Tensor

import interpreted
from polydraft.backends.triton import interpreting
from polydraft.sampling import RowParams, SamplingParams, Warper
from polydraft.sampling.warper import softened

pytestmark = [
    pytest.mark.skipif(not interpreted.turn_on(), reason="needs Triton's interpreter: pip install triton, and no GPU"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


def logits_of(columns: int) -> Tensor:
    logits_BGV = 5 * torch.randn(3, 4, columns + 3, generator=torch.Generator().manual_seed(columns))
    logits_BGV[0, 1, : columns // 2] = -torch.inf
    logits_BGV[1, 0, 1] = torch.nan
    logits_BGV[1, 2] = -torch.inf
    logits_BGV[2, 3, 2] = torch.inf
    return logits_BGV[:, 1:, :columns]  # a view, as a slice of a tree's nodes is


@pytest.mark.parametrize("columns", [3, 300, 70_000])
@pytest.mark.parametrize("tempered", [False, True])
def test_probabilities_are_torchs(columns: int, tempered: bool) -> None:
    logits_BGV, temperature_B11 = logits_of(columns), torch.tensor([0.3, 1.0, 2.5])[:, None, None]
    scores_BGV = logits_BGV / temperature_B11 if tempered else logits_BGV
    expected_BGV = torch.softmax(scores_BGV.double(), -1).float()
    with interpreting():
        found_BGV = softened(logits_BGV, temperature_B11 if tempered else None)
    torch.testing.assert_close(found_BGV, expected_BGV, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert found_BGV.is_contiguous() and expected_BGV.isnan().any() and not expected_BGV.isnan().all()


@pytest.mark.parametrize(
    ("params", "launched"),
    [
        ([SamplingParams()], True),
        ([SamplingParams(temperature=0.7), SamplingParams(temperature=1.3)], True),
        ([SamplingParams(top_k=3)], False),
        ([SamplingParams(top_p=0.9), SamplingParams()], False),
        ([SamplingParams(presence_penalty=0.5)], False),
        ([SamplingParams(logit_bias={1: 2.0})], False),
        ([SamplingParams(temperature=0)], False),
        ([SamplingParams(temperature=0), SamplingParams(temperature=0.5)], True),
    ],
)
def test_a_warper_uses_it_where_nothing_else_is_asked_for(
    params: list[SamplingParams], launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, calls = RowParams(tuple(params)), []
    warper = Warper(rows, 300, [[1]] * len(rows), torch.device("cpu"))
    logits_BGV = torch.randn(len(rows), 2, 300, generator=torch.Generator().manual_seed(0))
    paths_BGP = torch.zeros(len(rows), 2, 0, dtype=torch.long)
    expected_BGV = warper.probs(logits_BGV, paths_BGP)
    monkeypatch.setattr("polydraft.sampling.warper.softened", lambda *inputs: (calls.append(inputs), softened(*inputs))[1])
    with interpreting():
        torch.testing.assert_close(warper.probs(logits_BGV, paths_BGP), expected_BGV, rtol=1e-5, atol=1e-7)
    assert bool(calls) == launched
