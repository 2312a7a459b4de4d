"""What is predicted against what is simulated, on models whose distributions are known and rounds whose costs were planted."""

import pytest
import torch

from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.models import TabularModel
from polydraft.trees import Topology
from polydraft.tune.acceptance import PROBES, Acceptance, shapes, spelled
from polydraft.tune.hardware import PredictedRounds, parse_gpu, size_named
from polydraft.tune.model import MeasuredRounds, costs_at
from polydraft.tune.rounds import Rounds, Run, Use, pass_seconds

TREES = [(1,), (1, 1, 1), (2, 1), (3, 2, 1), (4, 2, 1), (4, 2, 2, 1, 1), (6, 2)]


@pytest.fixture(scope="module")
def pair() -> tuple[TabularModel, TabularModel]:
    # Of order 3: greedy texts of lower orders run in short circles, in which rounds always begin at the same places.
    target = TabularModel.random(16, 3, seed=3, sharpness=2.5)
    return target, target.mixed_with(TabularModel.random(16, 3, seed=4, sharpness=2.5), 0.7)


def ran(pair: tuple[TabularModel, TabularModel], widths: tuple[int, ...], use: Use) -> Rounds:
    target, draft = pair
    run = Run(Decoder(target, TreeDrafter(draft, Topology.from_widths(widths))), use, 32)
    run.generate([[token % 16, token // 16] for token in range(32)])
    return run.rounds(robust=True)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_trees_that_were_never_run(pair: tuple[TabularModel, TabularModel], temperature: float) -> None:
    use = Use(temperature=temperature, max_new_tokens=96, seed=1)
    probes = {width: ran(pair, widths, use) for width, widths in PROBES.items()}
    acceptance = Acceptance.counted({width: (one.accepts, one.offers) for width, one in probes.items()})
    other = Use(temperature=temperature, max_new_tokens=96, seed=2)  # not the texts that the probes saw
    for widths in TREES:
        simulated = ran(pair, widths, other)
        assert acceptance.tokens(widths) == pytest.approx(simulated.tokens, rel=0.08), spelled(widths)
        assert simulated.nodes == Topology.from_widths(widths).num_nodes and simulated.levels == len(widths)


def test_few_visits_borrow_from_the_level_above() -> None:
    found = Acceptance.counted({1: ((80, 0), (100, 1))})
    assert found.at(1, 1) == 0.8 and 0.5 < found.at(1, 2) < 0.8


def test_widths_and_depths_that_were_not_measured() -> None:
    known = Acceptance({1: (0.6, 0.5, 0.4), 4: (0.9,)})
    assert known.at(1, 9) == 0.4
    assert known.at(2, 1) == pytest.approx(0.75) and known.at(9, 1) == 0.9
    assert known.at(4, 3) == pytest.approx(1 - 0.1 * 0.6 / 0.4)
    assert known.tokens((4, 1)) == pytest.approx(1 + 0.9 + 0.9 * 0.5)


def test_shapes_are_bounded_and_do_not_widen() -> None:
    found = list(shapes(20))
    assert len(found) == len(set(found)) > 20
    for widths in found:
        assert Topology.from_widths(widths).num_nodes <= 20 and list(widths) == sorted(widths, reverse=True)
    assert (4, 2, 1) not in found and (4, 2) in found and spelled((1, 1)) == "chain:2" and spelled((4, 2)) == "4x2"


def planted(batch: int, nodes: float, levels: float) -> float:
    """A machine: a pass by its tokens, and what comes beside it."""
    seconds = 0.02 + 0.0004 * batch * nodes
    return seconds + (0.001 + 0.0005 * batch + levels * 0.002 + nodes * 0.0001 * batch if nodes > 1 else 0.0005)


def rounds_of(batch: int, widths: tuple[int, ...]) -> Rounds:
    nodes = Topology.from_widths(widths).num_nodes
    seconds = planted(batch, nodes, len(widths))
    return Rounds(batch=batch, tokens=1.0, nodes=nodes, levels=len(widths), seconds=seconds, accepts=(), offers=())


def test_costs_are_recovered_from_rounds() -> None:
    seen = [rounds_of(batch, widths) for batch in (1, 8, 32) for widths in [(), (4,), (1,) * 4, (2, 2, 2), (4, 2, 2, 1, 1)]]
    model = MeasuredRounds.fitted({size: 0.02 + 0.0004 * size for size in (1, 8, 64, 512)}, seen)
    for batch in (1, 2, 8, 16, 32, 64):
        assert model.plain(batch) == pytest.approx(planted(batch, 1, 0), rel=0.02)
        for widths in TREES:
            nodes = Topology.from_widths(widths).num_nodes
            assert model.drafted(batch, nodes, len(widths)) == pytest.approx(planted(batch, nodes, len(widths)), rel=0.06)
    costs = costs_at(model, 8)
    assert costs.of_round(3, 22) == pytest.approx(planted(8, 22, 3) / planted(8, 1, 0), rel=0.05)


def test_passes_that_were_timed_in_a_slow_minute() -> None:
    """Three times too slow, and yet rounds are what rounds were."""
    seen = [rounds_of(batch, widths) for batch in (1, 8) for widths in [(), (4,), (1,) * 4, (2, 2, 2), (4, 2, 2, 1, 1)]]
    model = MeasuredRounds.fitted({size: 3 * (0.02 + 0.0004 * size) for size in (1, 8, 64, 512)}, seen)
    for batch in (1, 8):
        assert model.plain(batch) == pytest.approx(planted(batch, 1, 0), rel=0.02)
        assert model.drafted(batch, 22, 3) == pytest.approx(planted(batch, 22, 3), rel=0.06)


def test_costs_are_never_negative() -> None:
    strange = [
        Rounds(batch=1, tokens=1, nodes=n, levels=v, seconds=s, accepts=(), offers=())
        for n, v, s in ((1, 0, 1), (6, 1, 0.5), (6, 4, 0.4))
    ]
    model = MeasuredRounds.fitted({1: 1.0, 8: 2.0}, strange)
    assert model.drafted(1, 6, 4) >= model.drafted(1, 6, 1) > 0


def test_passes_are_timed_within_the_context() -> None:
    limited = TabularModel(torch.zeros(8, 8), max_positions=20)
    found = pass_seconds(limited, [1, 4, 16, 64])
    assert set(found) == {1, 4, 16} and list(found.values()) == sorted(found.values())


def test_an_h200_as_it_was_measured() -> None:
    """Passes of the 7B shape at a context of 512, and a round of 4x2x2x1x1 with the shipped head (docs/log)."""
    target = size_named("7b", 49152)
    model = PredictedRounds(gpu=parse_gpu("H200"), target=target, draft=None)
    for tokens, milliseconds in ((1, 3.97), (8, 4.16), (16, 4.19), (32, 4.48), (64, 4.77)):
        assert 1000 * model.pass_seconds(target, 1, tokens) == pytest.approx(milliseconds, rel=0.03)


def test_several_gpus_share_reading_and_wait_for_each_other() -> None:
    target = size_named("70b", 128256)
    one = PredictedRounds(gpu=parse_gpu("h100"), target=target, draft=None)
    eight = PredictedRounds(gpu=parse_gpu("h100x8"), target=target, draft=None)
    assert 4 < one.plain(1) / eight.plain(1) < 8
    assert 4 < one.drafted(1, 64, 0) / eight.drafted(1, 64, 0) < 8


@pytest.mark.parametrize("text", ["h1000", "0:5", "h100x0", "", "fast", "5:"])
def test_unknown_hardware_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="allowed"):
        parse_gpu(text)


def test_figures_stand_for_a_gpu_of_ones_own() -> None:
    own = parse_gpu("3350:989x2")
    assert (own.gigabytes_per_second, own.teraflops, own.count) == (3350, 989, 2)


def test_large_passes_are_of_several_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rounds are: a row of hundreds of tokens may run by other kernels."""
    model, rows = TabularModel(torch.zeros(8, 8)), []
    start = model.start
    monkeypatch.setattr(model, "start", lambda batch, capacity: rows.append(batch) or start(batch, capacity))
    assert set(pass_seconds(model, [1, 64, 128, 512])) == {1, 64, 128, 512} and rows == [1, 1, 2, 8]


def test_chains_may_be_cheaper_than_trees_of_as_many_tokens() -> None:
    def seconds(nodes: float, levels: float) -> float:
        return 1 + 0.01 * nodes + 0.1 * levels + (0.4 if nodes > levels + 1 else 0.0) if nodes > 1 else 1.01

    sizes = [(1, 0), (2, 1), (5, 4), (5, 1), (9, 4), (15, 3), (7, 2)]
    seen = [Rounds(batch=1, tokens=1, nodes=n, levels=v, seconds=seconds(n, v), accepts=(), offers=()) for n, v in sizes]
    model = MeasuredRounds.fitted({1: 1.01, 16: 1.16}, seen)
    for nodes, levels in ((4, 3), (6, 5), (5, 2), (12, 3)):
        assert model.drafted(1, nodes, levels) == pytest.approx(seconds(nodes, levels), rel=0.02)
