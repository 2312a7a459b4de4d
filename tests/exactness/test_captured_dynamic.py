"""Dynamic trees of a few sizes, captured: the same texts as without, by a row's own choice, and nothing taken from the host."""

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import interpreted
from covering import all_slow, covering, some_slow
from polydraft.certify.reference import greedy_text
from polydraft.draft import Combination, TreeDrafter
from polydraft.draft.candidates import even_levels
from polydraft.draft.dynamic_builder import DynamicBuilder
from polydraft.draft.gram_options import GramTreeOptions
from polydraft.draft.grams import gram_tree
from polydraft.draft.sizes import Size, SizeChoice, sizes_of
from polydraft.engine import Decoder, Generation, Stats
from polydraft.engine.round import run_round
from polydraft.lab.theory import Costs
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape
from stand_in import StandIn

from .configurations import Configuration
from .setups import DRAFT, HEAD, PENALTIES, RAGGED_PROMPTS, TARGET

INTERPRETED = interpreted.turn_on()
pytestmark = pytest.mark.usefixtures("short_blocks", "as_on_a_gpu")

CHEAP = Costs(draft_level=0.02, tree_pass=lambda nodes: 1 + 0.002 * nodes)
MIDDLING = Costs(draft_level=0.14, tree_pass=lambda nodes: 1 + 0.004 * nodes)
LOSING = Costs(draft_level=0.9, tree_pass=lambda nodes: 1 + 0.3 * (nodes - 1))
COSTS = {"cheap": CHEAP, "middling": MIDDLING, "losing": LOSING}
MODELS = {"model": DRAFT, "head": HEAD}
GREEDY = SamplingParams(temperature=0)
SAMPLINGS: dict[str, Any] = {
    "greedy": GREEDY,
    "drawn": SamplingParams(),
    "penalties": PENALTIES,
    "mixed": [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_k=9)],
}
SHAPE = DynamicShape(nodes=24, depth=4)
SEEDS = [5, 6, 7]
QUICK_ROWS = {("head", "greedy"), ("model", "mixed")}
"""Rows of all kinds together show what one kind does; sizes change most where all are greedy."""

# By default the distribution is tested where rows come to rest and draft again, so that sizes change most.
every_cost = pytest.mark.parametrize("costs", some_slow(COSTS, ["cheap", "middling"]))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, hide_values: Callable[[], None]) -> None:
    """Nobody looks at values, rounds may be captured, and rests are short enough to come and go."""
    hide_values()
    monkeypatch.setattr("polydraft.draft.dynamic_builder._CAPTURED", ("cpu",))
    monkeypatch.setattr("polydraft.draft.policy._FIRST_REST", 5)
    monkeypatch.setattr("polydraft.draft.policy.SHORTEST_REST", 3)


def dynamic(model: str = "model", costs: str = "middling", shape: DynamicShape = SHAPE, **options: Any) -> Decoder:
    return Decoder(TARGET, TreeDrafter(MODELS[model], shape, costs=COSTS[costs]), **options)


def texts(results: Sequence[Generation]) -> list[list[int]]:
    return [result.token_ids for result in results]


def sizes_in(graphs: StandIn) -> set[object]:
    """Return the sizes that rounds had, which stand in their kinds."""
    return {kind[-3][4] for kind in graphs.kinds}


# By default the head, which takes longest, has one case.
@pytest.mark.parametrize(
    ("model", "sampling", "costs"),
    [
        *covering(["model"], ["drawn", "penalties", "mixed"], COSTS),
        *covering(["head"], ["greedy"], ["middling"]),
        *all_slow(["head"], ["drawn", "penalties", "mixed"], COSTS),
        *all_slow(["model"], ["greedy"], COSTS),
        *all_slow(["head"], ["greedy"], ["cheap", "losing"]),
    ],
)
def test_captured_rounds_give_the_same_texts(caches: list[StandIn], model: str, sampling: str, costs: str) -> None:
    captured, eager = dynamic(model, costs), dynamic(model, costs, graphs=False)
    for prompts, seed in ((RAGGED_PROMPTS, 3), (RAGGED_PROMPTS[::-1], 4)):
        options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": 25, "seed": seed}
        results, expected = (decoder.generate(prompts, **options) for decoder in (captured, eager))
        assert texts(results) == texts(expected)
        figures, others = results[0].stats, expected[0].stats
        assert (figures.rounds, figures.offers_by_depth) == (others.rounds, others.offers_by_depth)
        assert figures.accepts_by_depth == others.accepts_by_depth
    (graphs,) = caches
    assert figures.replayed_rounds > figures.rounds / 2 and others.replayed_rounds == 0
    assert len(set(graphs.kinds)) <= len(sizes_of(SHAPE)), "a capture per size must do"


@pytest.mark.parametrize(
    ("model", "sampling", "costs"),
    [*covering(["model"], ["greedy", "drawn"], COSTS), *all_slow(["head"], ["greedy", "drawn"], COSTS)],
)
def test_rounds_that_run_ahead_give_the_same_texts(caches: list[StandIn], model: str, sampling: str, costs: str) -> None:
    pair = [dynamic(model, costs, ahead=ahead) for ahead in (True, False)]
    for limit in (9, 40):
        options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": limit, "seed": SEEDS}
        results, expected = (decoder.generate(RAGGED_PROMPTS, **options) for decoder in pair)
        assert texts(results) == texts(expected)
        figures, others = results[0].stats, expected[0].stats
        assert (figures.rounds, figures.offers_by_depth) == (others.rounds, others.offers_by_depth)
    assert figures.rounds_ahead > figures.rounds / 3 and others.rounds_ahead == 0


@pytest.mark.parametrize(
    ("model", "sampling"), some_slow(list(product(MODELS, SAMPLINGS)), set(product(MODELS, SAMPLINGS)) - QUICK_ROWS)
)
def test_rows_are_their_own_whatever_size_the_batch_has(caches: list[StandIn], model: str, sampling: str) -> None:
    decoder, params = dynamic(model), SAMPLINGS[sampling]
    together = decoder.generate(RAGGED_PROMPTS, sampling=params, max_new_tokens=25, seed=SEEDS)
    for row, (prompt, seed) in enumerate(zip(RAGGED_PROMPTS, SEEDS, strict=True)):
        own = params[row] if isinstance(params, list) else params
        assert decoder.generate(prompt, sampling=own, max_new_tokens=25, seed=[seed]).token_ids == together[row].token_ids
        if own is GREEDY:
            assert together[row].token_ids == greedy_text(TARGET, prompt, 25, GREEDY)
    if sampling == "greedy":
        assert len(set().union(*map(sizes_in, caches))) > 1, "all rounds had one size: nothing is shown"


@pytest.mark.parametrize("model", [pytest.param("model"), pytest.param("head", marks=pytest.mark.slow)])
@every_cost
def test_captured_texts_follow_the_target_distribution(
    monkeypatch: pytest.MonkeyPatch, caches: list[StandIn], model: str, costs: str
) -> None:
    for name in ("SHORTEST_REST", "_FIRST_REST", "_TRIAL", "_SHORT_TRIAL"):
        monkeypatch.setattr(f"polydraft.draft.policy.{name}", 1)
    configuration = Configuration(label=f"captured dynamic: {model}, {costs}", samples=1_500)
    monkeypatch.setattr(Configuration, "decoder", lambda self: dynamic(model, costs))
    results = configuration.generate()
    # Fifteen tests on each of six decoders: false alarm below 1e-4 together.
    assert min(configuration.p_values(results)) > 1e-4 / (15 * 6)
    assert results[0].stats.drafted_tokens > 0.03 * results[0].stats.new_tokens


@pytest.mark.parametrize(
    ("model", "temperature"), some_slow(list(product(MODELS, [0.0, 1.0])), [("model", 0.0), ("model", 1.0), ("head", 1.0)])
)
def test_captured_beside_n_grams(caches: list[StandIn], model: str, temperature: float) -> None:
    def united(**options: Any) -> Decoder:
        tree = TreeDrafter(MODELS[model], SHAPE, costs=MIDDLING)
        return Decoder(TARGET, Combination(tree, gram_tree(["lookup"], GramTreeOptions())), **options)

    options: dict[str, Any] = {"sampling": SamplingParams(temperature=temperature), "max_new_tokens": 40, "seed": SEEDS}
    prompts = [[5, 6, 7, 8, 9, 10, 11] * 2, *RAGGED_PROMPTS[1:]]
    results, expected = (united(graphs=graphs).generate(prompts, **options) for graphs in (True, False))
    assert texts(results) == texts(expected)
    assert results[0].stats.replayed_rounds > 0 == expected[0].stats.replayed_rounds


def test_a_draft_equal_to_the_target_is_always_accepted(caches: list[StandIn]) -> None:
    # Errors in the draft's own memory, or of what it reads while rows rest, cost acceptance: only this sees them.
    for costs in COSTS.values():
        decoder = Decoder(TARGET, TreeDrafter(TARGET, SHAPE, costs=costs))
        stats = decoder.generate(RAGGED_PROMPTS * 3, sampling=GREEDY, max_new_tokens=80)[0].stats
        assert stats.accepts_by_depth == stats.offers_by_depth
        assert costs is not LOSING or stats.passes > stats.offers_by_depth[0] > 0, "no rest, or nothing else"


@pytest.mark.parametrize("sampling", some_slow(["greedy", "drawn"], ["drawn"]))
def test_a_warm_decoder_has_captured_all_sizes(caches: list[StandIn], sampling: str) -> None:
    decoder = dynamic()
    decoder.warm_up(sampling=SAMPLINGS[sampling], longest=40)
    (graphs,) = caches
    assert sizes_in(graphs) == {(place,) for place in range(len(sizes_of(SHAPE)))} and len(graphs) == len(sizes_of(SHAPE))
    result = decoder.generate(RAGGED_PROMPTS[0], sampling=SAMPLINGS[sampling], max_new_tokens=30, seed=1)
    assert result.stats.replayed_rounds == result.stats.rounds
    assert (
        result.token_ids
        == dynamic(graphs=False).generate(RAGGED_PROMPTS[0], sampling=SAMPLINGS[sampling], max_new_tokens=30, seed=1).token_ids
    )


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU")
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize(("model", "costs"), [("model", "losing"), pytest.param("head", "middling", marks=pytest.mark.slow)])
def test_kernels_give_the_same_texts(monkeypatch: pytest.MonkeyPatch, caches: list[StandIn], model: str, costs: str) -> None:
    """And the same trees, of all sizes that rounds choose to have."""
    from polydraft.draft import fused_growth

    grown, tree = list[int](), fused_growth.Growing.tree

    def noted(growing: fused_growth.Growing, *args: Any) -> Any:
        grown.append(growing._levels)
        return tree(growing, *args)

    monkeypatch.setattr(fused_growth.Growing, "tree", noted)
    options: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 25 if model == "head" else 10, "seed": 3}
    expected = dynamic(model, costs).generate(RAGGED_PROMPTS, **options)
    assert not grown
    monkeypatch.setattr("polydraft.backends.triton._INTERPRETED", True)
    results = dynamic(model, costs).generate(RAGGED_PROMPTS, **options)
    assert len(set(grown)) > 1 or (model == "model" and grown), "all rounds had one size: nothing is shown"
    assert texts(results) == texts(expected)
    figures, others = results[0].stats, expected[0].stats
    assert (figures.rounds, figures.offers_by_depth) == (others.rounds, others.offers_by_depth)
    assert figures.accepts_by_depth == others.accepts_by_depth and figures.replayed_rounds > 0


class Sealed(TorchDispatchMode):
    """Refuses what a capture cannot contain: looks at values, tensors from the host, results of unknown size."""

    refused = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique", "is_nonzero", "equal.")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        assert not name.startswith(self.refused), f"{name} in a captured round"
        if name.startswith(("index.", "index_put")):
            assert all(one is None or one.dtype != torch.bool for one in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("model", "sampling"), [
    *covering(MODELS, ["penalties", "mixed"]),
    *all_slow(MODELS, ["greedy", "drawn"]),
])  # fmt: skip
def test_drafting_takes_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch, model: str, sampling: str) -> None:
    # Verification has ways of its own on a CPU; on a GPU it is that of static trees.
    stream = dynamic(model).stream(RAGGED_PROMPTS, sampling=SAMPLINGS[sampling], max_new_tokens=40, seed=0)
    next(stream)  # tables are made once
    run = stream._engine
    session, builder = run._session, run._session._drawn
    assert isinstance(builder, DynamicBuilder) and builder._choice is not None
    uniforms_BU = run.slots.noise.uniforms(run._workspace.num_uniforms(run._walk))
    originals = {"propose": session.propose, "commit": session.commit}

    def sealed(name: str) -> Callable[..., Any]:
        def work(*inputs: Any) -> Any:
            with Sealed():
                return originals[name](*inputs)

        return work

    with torch.inference_mode():
        for place in range(len(builder._choice.sizes)):
            for _ in range(2):
                builder._choice.receive([[place]] * len(RAGGED_PROMPTS))
            assert session.capturable.kind == (place,) and session.capturable.never is None
            run_round(run._workspace.state, run._walk, uniforms_BU, Stats())  # captures come after a first time, too
            with monkeypatch.context() as patch:
                for name in originals:
                    patch.setattr(session, name, sealed(name))
                run_round(run._workspace.state, run._walk, uniforms_BU, Stats())


def test_sizes_cover_the_shape() -> None:
    assert sizes_of(DynamicShape(nodes=64, depth=8)) == (Size(0, 1), Size(2, 16), Size(4, 32), Size(6, 48), Size(8, 64))
    assert sizes_of(DynamicShape(nodes=9, depth=2, adaptive=False)) == (Size(2, 9),)
    for nodes in (2, 3, 5, 21, 128):
        for depth in range(1, min(nodes, 9)):
            sizes = sizes_of(DynamicShape(nodes=nodes, depth=depth))
            assert sizes[0] == Size(0, 1) and sizes[-1] == Size(depth, nodes)
            assert all(size.levels < size.nodes <= nodes for size in sizes)
            assert len({size.levels for size in sizes}) == len(sizes)


@pytest.mark.parametrize("nodes", [2, 5, 9, 21, 64, 128])
def test_even_levels_fit_their_budget(nodes: int) -> None:
    for depth in range(1, min(nodes, 9)):
        for widest in (1, 4, 32):
            levels = even_levels(DynamicShape(nodes=nodes, depth=depth), widest)
            assert len(levels) == depth and levels[0].nodes == 1
            assert all(level.nodes >= 1 and 1 <= level.children <= widest for level in levels)
            assert all(level.nodes <= above.total for above, level in pairwise(levels))
            assert 1 + sum(level.total for level in levels) <= nodes


def choice(batch_size: int = 1) -> SizeChoice:
    shape = DynamicShape(nodes=64, depth=8)
    return SizeChoice(sizes_of(shape), MIDDLING, batch_size, shape.depth, torch.device("cpu"))


def rounds(chosen: SizeChoice, found_BD: Tensor, count: int, rest: int = 0) -> None:
    ones_B = torch.ones(len(found_BD), dtype=torch.float64)
    for _ in range(count):
        chosen.learn(found_BD, chosen.levels_B, 2 * ones_B)
        chosen.receive(chosen.report(rest * ones_B.long(), ones_B > 0).tolist())


def test_sizes_follow_what_levels_bring() -> None:
    chosen = choice()
    assert chosen.sizes[chosen.current] == Size(8, 64)
    rounds(chosen, 0.3 ** torch.arange(1, 9, dtype=torch.float64)[None], 30)
    assert chosen.sizes[chosen.current] == Size(2, 16)
    rounds(chosen, torch.full((1, 8), 0.95, dtype=torch.float64), 40)
    assert chosen.sizes[chosen.current] == Size(8, 64), "deep levels are tried again once the others are sure"
    rounds(chosen, torch.full((1, 8), 0.95, dtype=torch.float64), 2, rest=2)
    assert chosen.sizes[chosen.current] == Size(0, 1)
    chosen.begin([0], torch.tensor([True]))
    assert chosen.sizes[chosen.current] == Size(8, 64)


def test_a_batch_has_the_size_of_its_most_hopeful_row_and_knows_it_in_time() -> None:
    chosen = choice(2)
    found_BD = torch.stack([0.3 ** torch.arange(1, 9), torch.full((8,), 0.9)]).double()
    for _ in range(30):
        needed, before = int(chosen._now_B.max()), chosen.current
        assert before >= needed, "a row wants more than the capture has"
        chosen.learn(found_BD, chosen.levels_B, torch.full((2,), 2.0, dtype=torch.float64))
        # A round that runs ahead is launched before this report arrives.
        assert chosen.current >= int(chosen._now_B.max())
        chosen.receive(chosen.report(torch.zeros(2).long(), torch.ones(2) > 0).tolist())
    assert chosen.levels_B.tolist() == [2, 8] and chosen.current == 4
