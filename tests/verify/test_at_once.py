"""What devices run that the host may not look at, run on a CPU: the same verdicts, and nothing waits for the device."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covering import covering
from exactness.checks import largest_count
from polydraft import operations
from polydraft.devices import values_hidden
from polydraft.draft import DistributionSource
from polydraft.draft.static_builder import StaticBuilder
from polydraft.sampling import PartialVocabulary, RowParams, SamplingParams, Warper
from polydraft.trees import DraftTree, parse_tree
from polydraft.verify import SCHEMES, WALKS, Scheme, TargetDistributions, Verdict

from .drawn_trees import moved

PAIRS = [(scheme, walk) for scheme in SCHEMES for walk in WALKS if WALKS.get(walk).fits(SCHEMES.get(scheme))]
SIZE, ROWS = 700, 40
CPU = torch.device("cpu")


def inputs_of(
    name: str, walk: str, params: SamplingParams | None = None, known: bool = True, rows: int = ROWS, device: str = "cpu"
) -> tuple[Scheme, DraftTree, TargetDistributions, torch.Tensor]:
    """Grow trees from made-up distributions on the CPU and return what a walk takes, on any device."""
    params = params or SamplingParams()
    scheme = SCHEMES.get("top" if params.temperature == 0 else name)()
    width = largest_count(scheme, 3)
    topology = parse_tree("x".join(map(str, (width, min(width, 2), 1))))
    vocabulary = PartialVocabulary(torch.arange(1, SIZE, 3), SIZE) if known else None
    generator = torch.Generator().manual_seed(5)
    texts = [[1, 2, 3]] * rows
    growth = StaticBuilder(
        DistributionSource(torch.device("cpu"), vocabulary),
        topology,
        RowParams.of(params, len(texts)),
        SIZE,
        scheme=scheme.name,
    )
    growth.begin(texts, range(len(texts)), RowParams.of(params, len(texts)))
    logits_BNV = 2 * torch.randn(rows, topology.num_nodes, SIZE, generator=generator)
    if known:
        logits_BNV[..., vocabulary.tokens_D] += 1.5
    noisy_BNV = logits_BNV + 0.7 * torch.randn(rows, topology.num_nodes, SIZE, generator=generator)
    draft_BND = noisy_BNV[..., vocabulary.tokens_D] if known else noisy_BNV
    verifier = WALKS.get(walk)()
    count = topology.num_nodes - 1
    uniforms_BU = torch.rand(rows, count + verifier.uniforms(scheme, topology.depth), generator=generator, dtype=torch.float64)
    tokens_BN = growth.plant(torch.zeros(rows, dtype=torch.long))
    for level in growth.plan.levels:
        growth.draw(level, draft_BND[:, torch.arange(level.first, level.stop)[level.drawing]], tokens_BN, uniforms_BU)
    place = torch.device(device)
    warper = Warper(params, SIZE, texts, place)
    distributions = TargetDistributions(logits_BNV.to(place), lambda logits: logits, warper, whole=True)
    return growth.scheme, moved(growth.tree(tokens_BN), device), distributions, uniforms_BU[:, count:].to(place)


def round_of(
    name: str, walk: str, params: SamplingParams, known: bool = True, rows: int = ROWS, device: str = "cpu"
) -> Callable[[], Verdict]:
    """Return what verifies made-up trees."""
    return partial(WALKS.get(walk)().run, *inputs_of(name, walk, params, known, rows, device))


class _NothingLookedAt(TorchDispatchMode):
    """Refuse operations that wait for a device: those whose outcome the host sees, or whose size depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}, name
        return func(*args, **(kwargs or {}))


def without_looking(verify: Callable[[], Verdict]) -> Verdict:
    with values_hidden():
        return verify()


def check_same(one: Verdict, other: Verdict) -> None:
    one, other = (Verdict(*(value.cpu() for value in vars(verdict).values())) for verdict in (one, other))
    assert torch.equal(one.accepted_B, other.accepted_B)
    assert torch.equal(one.path_BD, other.path_BD)
    assert torch.equal(one.offered_B, other.offered_B)
    assert torch.equal(one.fault_B, other.fault_B) and not one.fault_B.any()
    valid_BD = torch.arange(one.tokens_BD.shape[1]) <= one.accepted_B[:, None]
    assert torch.equal(one.tokens_BD * valid_BD, other.tokens_BD * valid_BD)


@pytest.mark.parametrize(("name", "walk", "known"), covering(PAIRS, [True, False]))
def test_verdicts_do_not_depend_on_looking(name: str, walk: str, known: bool) -> None:
    verify = round_of(name, walk, SamplingParams(), known)
    seen = verify()
    check_same(without_looking(verify), seen)
    assert len({*seen.accepted_B.tolist()}) > 1  # there is something to get wrong


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(temperature=0.8, top_k=30, repetition_penalty=1.3),
    ],
    ids=["greedy", "greedy with penalties", "penalties"],
)
def test_paths_to_all_nodes_are_those_of_single_ones(params: SamplingParams) -> None:
    verify = round_of("hybrid", "node" if params.temperature == 0 else "block", params)
    check_same(without_looking(verify), verify())


def test_one_row_is_verified_as_many_are() -> None:
    verify = round_of("hybrid", "block", SamplingParams(), rows=1)
    check_same(without_looking(verify), verify())


@pytest.mark.parametrize(("name", "walk", "temperature"), [("top", "node", 0.0), *((*pair, 1.0) for pair in PAIRS)])
def test_a_round_can_be_captured(name: str, walk: str, temperature: float) -> None:
    verify = round_of(name, walk, SamplingParams(temperature=temperature), rows=3)
    with operations.using(), values_hidden(), _NothingLookedAt():
        verify()


@pytest.mark.parametrize("name", list(SCHEMES))
def test_drawing_can_be_captured(name: str) -> None:
    scheme, generator = SCHEMES.get(name)(), torch.Generator().manual_seed(3)
    distribution_RV = torch.softmax(2 * torch.randn(6, SIZE, generator=generator), dim=-1)
    uniforms_RK = torch.rand(6, largest_count(scheme, 4), generator=generator, dtype=torch.float64)
    expected = scheme.draw(distribution_RV, uniforms_RK)
    with operations.using(), values_hidden():
        with _NothingLookedAt():
            found = scheme.draw(distribution_RV, uniforms_RK)
        assert torch.equal(found, expected)


def test_a_look_is_noticed() -> None:
    with _NothingLookedAt(), pytest.raises(AssertionError):
        bool(torch.ones(3).any())


def test_paths_and_distributions_of_all_nodes() -> None:
    topology = parse_tree("[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]")
    tokens_BN = torch.arange(7)[None] * 10
    distributions = tuple(torch.rand(1, count, 4) for count in (1, 2, 1))
    draft = DraftTree.from_topology(topology, tokens_BN, distributions, torch.tensor([0, 0, 1, 0, 0, 0, 0]))
    assert draft.paths()[0].tolist() == [
        [-1, -1, -1],
        [10, -1, -1],
        [20, -1, -1],
        [10, 30, -1],
        [10, 40, -1],
        [20, 50, -1],
        [10, 30, 60],
    ]
    for node, level in ((0, 0), (1, 1), (2, 1), (3, 2)):
        assert torch.equal(draft.all_distributions()[:, node], draft.short_distribution(level, torch.tensor([node])))
    assert draft.all_children()[0, :3].tolist() == [[10, 20], [30, 40], [50, -1]]
