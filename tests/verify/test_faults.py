"""Distributions that are not numbers: reported with their culprit, and never the source of a token."""

import numpy as np
import pytest
import torch

from polydraft.sampling import NO_TOKEN
from polydraft.verify import SCHEMES, WALKS, Fault

from .cases import batch_of
from .enumeration import Batch
from .sampling import sample_walk

PAIRS = [("speculative", walk) for walk in WALKS]
BROKEN = np.full(3, np.nan)


def run(name: str, walk: str, target_breaks: tuple[int, ...] | None, draft_breaks: tuple[int, ...] | None):
    """Break one distribution of each model, after one beginning; or none."""
    batch = batch_of("chain:3", 3)
    target, draft = (dict(distributions) for distributions in batch.cases[0])
    if target_breaks is not None:
        target[target_breaks] = BROKEN
    if draft_breaks is not None:
        draft[draft_breaks] = BROKEN
    return sample_walk(WALKS.get(walk)(), SCHEMES.get(name)(), Batch(batch.topology, [(target, draft)]), 500, seed=1)[1]


@pytest.mark.parametrize(("name", "walk"), PAIRS)
def test_a_broken_target_is_named(name: str, walk: str) -> None:
    assert (run(name, walk, (), None).fault_B == Fault.TARGET).all()


@pytest.mark.parametrize(("name", "walk"), PAIRS)
def test_a_broken_draft_is_named(name: str, walk: str) -> None:
    assert (run(name, walk, None, ()).fault_B == Fault.DRAFT).all()


@pytest.mark.parametrize(("name", "walk"), PAIRS)
@pytest.mark.parametrize("beginning", [(0,), (0, 1)])
@pytest.mark.parametrize("culprit", [Fault.TARGET, Fault.DRAFT])
def test_a_distribution_that_breaks_further_down_is_named_or_not_used(
    name: str, walk: str, beginning: tuple[int, ...], culprit: Fault
) -> None:
    verdict = run(name, walk, *((beginning, None) if culprit == Fault.TARGET else (None, beginning)))
    assert {Fault.NONE, culprit} >= {*verdict.fault_B.tolist()}
    for tokens, accepted, fault in zip(verdict.tokens_BD.tolist(), verdict.accepted_B.tolist(), verdict.fault_B, strict=True):
        assert fault != Fault.NONE or NO_TOKEN not in tokens[: accepted + 1]
    if culprit == Fault.TARGET:
        assert (verdict.fault_B == culprit).any()


def test_a_scheme_that_emits_nothing_is_named() -> None:
    class Silent(type(SCHEMES.get("speculative")())):
        def verify(self, target_probs_RV, draft_probs_RV, children_RK, uniforms_RU):
            return torch.full_like(children_RK[:, 0], NO_TOKEN)

    batch = batch_of("chain:3", 3)
    verdict = sample_walk(WALKS.get("node")(), Silent(), batch, 20, seed=1)[1]
    assert (verdict.fault_B == Fault.SCHEME).all()
