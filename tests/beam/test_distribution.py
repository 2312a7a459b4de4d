"""Distributions of beams: those of a text are its own, whoever is passed along with it and whichever way they are brought."""

import pytest
import torch

from polydraft.beam._distribution import DistributionMaker, joined
from polydraft.beam._node import Node
from polydraft.sampling import SamplingParams

VOCABULARY = 64
DISTRIBUTIONS = {
    "top-p": SamplingParams(top_k=6, top_p=0.6),
    "min-p": SamplingParams(top_k=6, min_p=0.3, temperature=0.8),
    "top-k": SamplingParams(top_k=6),
}


def tied_logits() -> torch.Tensor:
    """Logits as coarse as half precision makes them; every third row has more ties at its k-th place than are brought along."""
    logits_RV = torch.randint(-3, 4, (60, VOCABULARY), generator=torch.Generator().manual_seed(1)).float() / 2
    logits_RV[::3] = logits_RV[::3].clamp(max=0.5)
    return logits_RV


def as_dict(distribution, row: int) -> dict[int, float]:
    start, stop = distribution.bounds[row : row + 2]
    return dict(zip(distribution.tokens_X[start:stop].tolist(), distribution.scores_X[start:stop].tolist(), strict=True))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_text_has_the_same_distribution_in_any_company(name: str) -> None:
    maker = DistributionMaker(DISTRIBUTIONS[name], [1, 2], VOCABULARY, torch.device("cpu"))
    logits_RV, nodes = tied_logits(), [Node(3) for _ in range(60)]
    together = maker(logits_RV, nodes)
    packed_RX = maker.packed(logits_RV)
    long_way = packed_RX[:, 0].isnan()
    assert 10 < int(long_way.sum()) < 50, "some texts must be looked at whole, and some not"
    for row, node in enumerate(nodes):
        alone = maker(logits_RV[row : row + 1], [node])
        assert as_dict(together, row) == pytest.approx(as_dict(alone, 0), abs=1e-6)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_was_packed_is_the_distribution(name: str) -> None:
    maker = DistributionMaker(DISTRIBUTIONS[name], [1, 2], VOCABULARY, torch.device("cpu"))
    logits_RV, nodes = tied_logits(), [Node(3) for _ in range(60)]
    rows = {node: row for row, node in enumerate(nodes)}
    brought = maker.unpacked(maker.packed(logits_RV).numpy(), nodes, lambda texts: logits_RV[[rows[node] for node in texts]])
    expected = maker(logits_RV, nodes)
    assert [as_dict(brought, row) for row in range(60)] == [as_dict(expected, row) for row in range(60)]


def test_of_equals_at_the_edge_of_top_p_the_last_tokens_stay() -> None:
    maker = DistributionMaker(SamplingParams(top_k=6, top_p=0.45), [1], VOCABULARY, torch.device("cpu"))
    logits_RV = -9.0 - torch.arange(VOCABULARY).float()[None]
    logits_RV[0, [40, 7, 23, 11]] = 2.0  # a quarter each: two of them reach it
    assert sorted(as_dict(maker(logits_RV, [Node(3)]), 0)) == [23, 40], "as the warper, and Hugging Face's with a stable sort"


def test_joined_rows_come_in_the_order_asked_for() -> None:
    maker = DistributionMaker(DISTRIBUTIONS["top-k"], [1], VOCABULARY, torch.device("cpu"))
    logits_RV, nodes = tied_logits()[:4], [Node(3) for _ in range(4)]
    distribution, other = maker(logits_RV, nodes), maker(logits_RV[2:], nodes[2:])
    mixed = joined([(other, 1), (distribution, 0), (other, 1), (distribution, 2)])
    assert [as_dict(mixed, row) for row in range(4)] == [as_dict(distribution, row) for row in (3, 0, 3, 2)]
