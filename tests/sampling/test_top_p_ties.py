"""Tokens of equal probability at the edge of top-p: as many stay as with Hugging Face, and the same ones in any company."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import TopPLogitsWarper

from polydraft.certify.chi_square import chi_square_p_value
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams, Warper, truncation
from polydraft.trees import parse_tree

VOCABULARY = 40
NONE_BGP = torch.empty(1, 1, 0, dtype=torch.long)
FALSE_ALARM = 1e-4


def tied_distribution(likely: int, equals: int, seed: int) -> torch.Tensor:
    """Return some tokens of 1/8, then equals of 1/32, which sum to one: binary fractions, so that nothing is rounded."""
    order_V = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    distribution_V = torch.zeros(VOCABULARY)
    distribution_V[order_V[:likely]] = 1 / 8
    distribution_V[order_V[likely : likely + equals]] = 1 / 32
    assert distribution_V.sum() == 1
    return distribution_V


DISTRIBUTIONS = [tied_distribution(likely, 32 - 4 * likely, seed) for seed, likely in enumerate((7, 4, 1, 0))]
TOP_P = [0.25, 0.5, 0.75, 0.8125, 0.9, 0.984375]


def hugging_face(distribution_RV: torch.Tensor, top_p: float, stable: bool = True) -> torch.Tensor:
    """Return what its warper makes of a distribution. It sorts without a word on equals; a stable sort leaves no choice."""
    with pytest.MonkeyPatch.context() as patch:
        if stable:
            patch.setattr(torch, "sort", partial(torch.sort, stable=True))
        return TopPLogitsWarper(top_p)(torch.zeros(len(distribution_RV), 1, dtype=torch.long), distribution_RV.log()).softmax(
            -1
        )


def ours(distribution_RV: torch.Tensor, top_p: float) -> torch.Tensor:
    warp = Warper(SamplingParams(top_p=top_p), VOCABULARY, [[1]], torch.device("cpu"))
    return warp.probs(distribution_RV.log()[None], NONE_BGP.expand(1, len(distribution_RV), 0))[0]


@pytest.mark.parametrize("candidates", [4, 2048], ids=["a full sort", "candidates"])
@pytest.mark.parametrize("top_p", TOP_P)
def test_of_equals_at_the_edge_those_stay_that_hugging_face_keeps(
    top_p: float, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncation, "_TOP_P_CANDIDATES", candidates)
    distribution_RV = torch.stack(DISTRIBUTIONS)
    got_RV = ours(distribution_RV, top_p)
    torch.testing.assert_close(got_RV, hugging_face(distribution_RV, top_p), rtol=0, atol=1e-7)
    # However it sorts, as many stay, and with the same chances.
    any_RV = hugging_face(distribution_RV, top_p, stable=False)
    torch.testing.assert_close(got_RV.sort(-1).values, any_RV.sort(-1).values, rtol=0, atol=1e-7)


@pytest.mark.parametrize("top_p", TOP_P)
def test_a_distribution_is_the_same_in_any_company(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat neighbour, which needs more than the likeliest candidates, changes nobody's choice."""
    monkeypatch.setattr(truncation, "_TOP_P_CANDIDATES", 8)
    flat_V = torch.full((VOCABULARY,), 1 / VOCABULARY)
    for distribution_V in DISTRIBUTIONS:
        assert torch.equal(ours(torch.stack([distribution_V, flat_V]), top_p)[0], ours(distribution_V[None], top_p)[0])


def test_logits_as_coarse_as_half_precision_keep_what_hugging_face_keeps() -> None:
    """Ties as they really come: many, and anywhere; sums that rounding may put on either side of the edge are left out."""
    logits_RV = (2 * torch.randn(80, VOCABULARY, generator=torch.Generator().manual_seed(3))).bfloat16().mul(2).round().div(2)
    distribution_RV, cut = logits_RV.float().softmax(-1), 0
    for distribution_V in distribution_RV:
        mass_V = distribution_V.double().sort(descending=True).values.cumsum(0)
        for top_p in (0.6, 0.8, 0.95):
            if (mass_V - top_p).abs().min() > 1e-5:
                kept_V, expected_V = ours(distribution_V[None], top_p)[0] > 0, hugging_face(distribution_V[None], top_p)[0] > 0
                assert torch.equal(kept_V, expected_V)
                cut += int((distribution_V[~expected_V] == distribution_V[expected_V].min()).any())
    assert cut > 40, "the edge must go through equals"


def tied_models() -> tuple[TabularModel, TabularModel]:
    """Make a target of eight tokens, after each of which four are equal, and a draft that likes others."""
    generator = torch.Generator().manual_seed(5)
    order_VV = torch.stack([torch.randperm(8, generator=generator) for _ in range(8)])
    distribution_V = torch.tensor([1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 16, 1 / 16])
    target_VV = torch.zeros(8, 8).scatter(1, order_VV, distribution_V.log().expand(8, 8))
    return TabularModel(target_VV), TabularModel(target_VV + torch.randn(8, 8, generator=generator))


@pytest.mark.parametrize("tree", ["none", "3x2x1"])
def test_texts_follow_hugging_faces_distribution_with_and_without_drafts(tree: str) -> None:
    target, draft = tied_models()
    distribution_VV = hugging_face(target.logits_XV.softmax(-1), 0.6).double().numpy()
    assert ((distribution_VV > 0).sum(-1) == 4).all(), "the edge goes through the five equals"
    drafter = None if tree == "none" else TreeDrafter(draft, parse_tree(tree))
    results = Decoder(target, drafter).generate([[3]] * 1500, sampling=SamplingParams(top_p=0.6), max_new_tokens=3, seed=1)
    tokens_NL = np.array([result.token_ids for result in results])
    distribution_XXX = distribution_VV[3][:, None, None] * distribution_VV[:, :, None] * distribution_VV[None, :, :]
    cells_N = tokens_NL @ np.array([64, 8, 1])
    assert chi_square_p_value(np.bincount(cells_N, minlength=512), distribution_XXX.reshape(-1)) > FALSE_ALARM
    assert tree == "none" or 0.2 < results[0].stats.acceptance_rate < 0.95
