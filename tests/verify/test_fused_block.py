"""The block walk's kernels, in Triton's interpreter: their distributions to 1e-9, and that wrong kernels are caught.

Which distribution torch's operations follow is enumerated in `test_block` and `exactness/test_selection`. On a GPU the kernels
run in tests/gpu. Needs Triton (`pip install triton`) and no GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted
from polydraft import operations
from polydraft.backends.triton import interpreting
from polydraft.backends.triton.verification import FusedRound
from polydraft.devices import values_hidden
from polydraft.trees import DraftTree
from polydraft.verify import SCHEMES, BlockWalk, Hybrid, RaceBucketed, Scheme, Verdict, block
from polydraft.verify.hybrid import threshold_of
from polydraft.verify.walk import Fault

from .drawn_trees import small_trees
from .enumeration import _DistributionsEverywhere
from .test_at_once import check_same

INTERPRETED = interpreted.turn_on()
if INTERPRETED:
    import triton.language as tl

pytestmark = [
    pytest.mark.slow,  # a covering few run by default: tests/backends
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU"),
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning"),
]
HYBRID = Hybrid(buckets=16)
STEP = 1e-9
"""How near to the end of an outcome's numbers the kernels are asked."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Verify by kernels, as a device does that the host may not look at."""
    with values_hidden(), interpreting():
        yield monkeypatch


def by_torch(
    walk: BlockWalk, scheme: Scheme, draft: DraftTree, distributions: _DistributionsEverywhere, uniforms_BU: Tensor
) -> Verdict:
    with operations.using():
        return walk.run(scheme, draft, distributions, uniforms_BU)


@pytest.mark.parametrize("tree", ["1x1", "2x1"])
def test_verdicts_on_trees_that_are_shallower_than_they_say(tree: str, kernels: pytest.MonkeyPatch) -> None:
    # As trees by load are, whose outcomes all have the form of the largest one's.
    draft, distributions, _ = small_trees(tree, 4, HYBRID, seed=5)
    deep = replace(
        draft,
        depth=5,
        distributions=draft.distributions + (draft.distributions[-1][:, :1],) * (5 - draft.depth),
        reach=draft.depth,
    )
    numbers = BlockWalk().uniforms(HYBRID, 5)
    uniforms_BU = torch.rand(4, numbers, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = BlockWalk().run(HYBRID, deep, distributions, uniforms_BU)
    check_same(found, by_torch(BlockWalk(), HYBRID, deep, distributions, uniforms_BU))
    assert found.path_BD.shape == (4, 6) and int(found.accepted_B.max()) > 0


def borders(weights_V: Tensor) -> Tensor:
    """Return numbers just below and just above the end of each token's share, those of tokens without any left out."""
    running_V = weights_V.double().cumsum(0) / weights_V.double().sum()
    inner_X = running_V[(weights_V > 0) & (running_V > 1e-6) & (running_V < 1 - 1e-6)]
    return torch.cat([inner_X - STEP, inner_X + STEP])


@cache
def hard_rows(scheme: Scheme) -> tuple[DraftTree, _DistributionsEverywhere, Tensor, Verdict]:
    """Return a tree again and again, with numbers 1e-9 from where decisions change, and what torch's operations decide."""
    walk, drawn = BlockWalk(), []
    draft, distributions, uniforms_BU = small_trees("2x1", 300, scheme, seed=1, cases=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "draw_one", lambda *inputs: (drawn.append(inputs[0]), draw_one(*inputs))[1])
        by_torch(walk, scheme, draft, distributions, uniforms_BU)
    row = int(drawn[0][:, :3].amin(-1).argmax())  # it may stop anywhere
    marks = [(-2, number) for number in borders(drawn[0][row])] + [(-1, number) for number in borders(drawn[1][row])]
    rows = torch.full((len(marks),), row)
    asked_BU = uniforms_BU[rows].clone()
    for place, (column, number) in enumerate(marks):
        asked_BU[place, column] = number
    distributions.distribution_RNV = distributions.distribution_RNV[rows]
    expected = by_torch(walk, scheme, _rows(draft, rows), distributions, asked_BU)
    assert len({*expected.accepted_B.tolist()}) == 3  # there is something to get wrong
    return _rows(draft, rows), distributions, asked_BU, expected


def wrong_decisions() -> int:
    """Count the hard rows that kernels decide otherwise."""
    draft, distributions, uniforms_BU, expected = hard_rows(HYBRID)
    found = BlockWalk().run(HYBRID, draft, distributions, uniforms_BU)
    valid_BD = torch.arange(3) <= expected.accepted_B[:, None]
    same_B = (found.accepted_B == expected.accepted_B) & (found.path_BD == expected.path_BD).all(-1)
    return int((~(same_B & (found.tokens_BD * valid_BD == expected.tokens_BD * valid_BD).all(-1))).sum())


draw_one = block.draw_one


def _rows(draft: DraftTree, rows: Tensor) -> DraftTree:
    tables = {key: value[rows] for key, value in vars(draft).items() if isinstance(value, Tensor)}
    return DraftTree(
        **{**vars(draft), **tables, "distributions": tuple(distribution[rows] for distribution in draft.distributions)}
    )


def test_distributions_are_the_enumerated_ones(kernels: pytest.MonkeyPatch) -> None:
    assert wrong_decisions() == 0


def weight_not_carried_on(weight, ratio):
    return tl.minimum(ratio, 1.0)


def stopped_by_weight_alone(mass, weight):
    return weight


def certain_ones_race(weight_K, more_K, total, count, THRESHOLD, BLOCK_K):
    return tl.sum(weight_K * 0, 0).to(tl.int32)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_next_weight", weight_not_carried_on),
        ("_stop_chance", stopped_by_weight_alone),
        ("count_certain", certain_ones_race),
    ],
)
def test_wrong_kernels_are_caught(name: str, wrong: Callable[..., Any], kernels: pytest.MonkeyPatch) -> None:
    from polydraft.backends.triton import block_kernels as _kernels

    kernels.setattr(_kernels, name, wrong)
    assert wrong_decisions() > 0


def test_the_picked_childs_distribution_is_the_enumerated_one(kernels: pytest.MonkeyPatch) -> None:
    scheme = Hybrid(buckets=16)
    draft, distributions, uniforms_BU = small_trees("3x1", 4, scheme, seed=2)
    fused = FusedRound(scheme, draft, distributions.everywhere(draft), uniforms_BU, 0.0)
    fused.pick()
    for row in range(4):
        target_1V, distribution_1V = fused.target_BNV[row, :1], draft.distributions[0][row]
        contest = scheme.contest(target_1V, distribution_1V, draft.all_children()[row, :1])
        certain = int((contest.certain_RK > 0).sum()) if contest.certain_RK is not None else 0
        place = row * fused.nodes
        assert fused.facts_RX[place, 1] == certain or float(contest.certain_RK.sum()) == 0
        expected = contest.distribution_RV[0]
        child = int(fused.picks_R[place])
        token = int(draft.tokens_BN[row, child])
        chance = fused.target_BNV[row, 0, token].double() / (fused.ratios_R[place] * fused.masses_R[place] / 2**48)
        assert float(chance) == pytest.approx(float(expected[token]), abs=1e-9)


@pytest.mark.parametrize("culprit", [Fault.TARGET, Fault.DRAFT])
def test_distributions_that_are_no_numbers_are_named(culprit: Fault, kernels: pytest.MonkeyPatch) -> None:
    scheme = Hybrid(buckets=16)
    draft, distributions, uniforms_BU = small_trees("2x1", 3, scheme, seed=4)
    if culprit == Fault.TARGET:
        distributions.distribution_RNV[0, 0], distributions.distribution_RNV[1, 1:] = torch.nan, torch.nan
    else:
        draft.distributions[0][0], draft.distributions[1][1] = torch.nan, torch.nan
    found = BlockWalk(0.0).run(scheme, draft, distributions, uniforms_BU).fault_B
    expected = by_torch(BlockWalk(0.0), scheme, draft, distributions, uniforms_BU).fault_B
    assert found.tolist() == expected.tolist() and found[0] == culprit and found[2] == Fault.NONE


def test_schemes_that_the_kernels_do_not_know_are_left_to_torch() -> None:
    from polydraft.certify import mutants

    wrong = [kind() for kind in mutants.STRUCTURAL + mutants.SUBTLE if issubclass(kind, (Hybrid, RaceBucketed))]
    assert wrong and {threshold_of(scheme) for scheme in wrong if type(scheme).contest is not Hybrid.contest} <= {None}
    assert threshold_of(SCHEMES.get("race")()) is None and threshold_of(SCHEMES.get("race-bucketed")()) == torch.inf
    assert threshold_of(SCHEMES.get("hybrid:0.7")()) == 0.7
