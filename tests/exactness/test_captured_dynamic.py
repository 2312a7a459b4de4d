"""Dynamic trees of one size, captured: the same texts as without, and nothing taken from the host."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import interpreted
from covering import all_slow, covering, some_slow
from fixed_trees import FixedTrees
from polydraft.certify.reference import greedy_text
from polydraft.draft import Combination
from polydraft.draft.gram_options import GramTreeOptions
from polydraft.draft.grams import gram_tree
from polydraft.draft.shaped_builder import FixedBuilder
from polydraft.engine import Decoder, Generation, Stats
from polydraft.engine.round import run_round
from polydraft.sampling import RowParams, SamplingParams
from polydraft.trees import DynamicShape
from stand_in import StandIn

from .configurations import Configuration
from .setups import DRAFT, HEAD, PENALTIES, RAGGED_PROMPTS, TARGET

INTERPRETED = interpreted.turn_on()
pytestmark = pytest.mark.usefixtures("short_blocks", "as_on_a_gpu")

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


@pytest.fixture
def as_on_a_gpu(hide_values: Callable[[], None]) -> None:
    """Nobody looks at values."""
    hide_values()


def dynamic(model: str = "model", **options: Any) -> Decoder:
    return Decoder(TARGET, FixedTrees(MODELS[model], SHAPE), **options)


def texts(results: Sequence[Generation]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(("model", "sampling"), [*covering(["model"], SAMPLINGS), *all_slow(["head"], ["greedy"])])
def test_captured_rounds_give_the_same_texts(caches: list[StandIn], model: str, sampling: str) -> None:
    captured, eager = dynamic(model), dynamic(model, graphs=False)
    for prompts, seed in ((RAGGED_PROMPTS, 3), (RAGGED_PROMPTS[::-1], 4)):
        options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": 25, "seed": seed}
        results, expected = (decoder.generate(prompts, **options) for decoder in (captured, eager))
        assert texts(results) == texts(expected)
        figures, others = results[0].stats, expected[0].stats
        assert (figures.rounds, figures.offers_by_depth) == (others.rounds, others.offers_by_depth)
        assert figures.accepts_by_depth == others.accepts_by_depth
    (graphs,) = caches
    assert figures.replayed_rounds > figures.rounds / 2 and others.replayed_rounds == 0
    assert len(set(graphs.kinds)) == 1, "one capture must do"


@pytest.mark.parametrize(
    ("model", "sampling"), [*covering(["model"], ["greedy", "drawn"]), *all_slow(["head"], ["greedy", "drawn"])]
)
def test_rounds_that_run_ahead_give_the_same_texts(caches: list[StandIn], model: str, sampling: str) -> None:
    pair = [dynamic(model, ahead=ahead) for ahead in (True, False)]
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
def test_rows_are_their_own(caches: list[StandIn], model: str, sampling: str) -> None:
    decoder, params = dynamic(model), SAMPLINGS[sampling]
    together = decoder.generate(RAGGED_PROMPTS, sampling=params, max_new_tokens=25, seed=SEEDS)
    for row, (prompt, seed) in enumerate(zip(RAGGED_PROMPTS, SEEDS, strict=True)):
        own = params[row] if isinstance(params, list) else params
        assert decoder.generate(prompt, sampling=own, max_new_tokens=25, seed=[seed]).token_ids == together[row].token_ids
        if own is GREEDY:
            assert together[row].token_ids == greedy_text(TARGET, prompt, 25, GREEDY)


@pytest.mark.parametrize("model", [pytest.param("model"), pytest.param("head", marks=pytest.mark.slow)])
def test_captured_texts_follow_the_target_distribution(
    monkeypatch: pytest.MonkeyPatch, caches: list[StandIn], model: str
) -> None:
    configuration = Configuration(label=f"captured dynamic: {model}", samples=1_500)
    monkeypatch.setattr(Configuration, "decoder", lambda self: dynamic(model))
    results = configuration.generate()
    # Fifteen tests on each of two decoders: false alarm below 1e-4 together.
    assert min(configuration.p_values(results)) > 1e-4 / (15 * 2)
    assert results[0].stats.drafted_tokens > 0.03 * results[0].stats.new_tokens


@pytest.mark.parametrize(
    ("model", "temperature"), some_slow(list(product(MODELS, [0.0, 1.0])), [("model", 0.0), ("model", 1.0), ("head", 1.0)])
)
def test_captured_beside_n_grams(caches: list[StandIn], model: str, temperature: float) -> None:
    def united(**options: Any) -> Decoder:
        tree = FixedTrees(MODELS[model], SHAPE)
        return Decoder(TARGET, Combination(tree, gram_tree(["lookup"], GramTreeOptions())), **options)

    options: dict[str, Any] = {"sampling": SamplingParams(temperature=temperature), "max_new_tokens": 40, "seed": SEEDS}
    prompts = [[5, 6, 7, 8, 9, 10, 11] * 2, *RAGGED_PROMPTS[1:]]
    results, expected = (united(graphs=graphs).generate(prompts, **options) for graphs in (True, False))
    assert texts(results) == texts(expected)
    assert results[0].stats.replayed_rounds > 0 == expected[0].stats.replayed_rounds


def test_a_draft_equal_to_the_target_is_always_accepted(caches: list[StandIn]) -> None:
    # Errors in the draft's own memory cost acceptance: only this sees them.
    decoder = Decoder(TARGET, FixedTrees(TARGET, SHAPE))
    stats = decoder.generate(RAGGED_PROMPTS * 3, sampling=GREEDY, max_new_tokens=80)[0].stats
    assert stats.accepts_by_depth == stats.offers_by_depth


def test_a_warm_decoder_has_captured_its_rounds(caches: list[StandIn]) -> None:
    decoder = dynamic()
    decoder.warm_up(sampling=GREEDY, longest=40)
    result = decoder.generate(RAGGED_PROMPTS[0], sampling=GREEDY, max_new_tokens=30, seed=1)
    assert result.stats.replayed_rounds == result.stats.rounds
    expected = dynamic(graphs=False).generate(RAGGED_PROMPTS[0], sampling=GREEDY, max_new_tokens=30, seed=1)
    assert result.token_ids == expected.token_ids


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU")
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("model", ["model", "head"])
def test_kernels_give_the_same_texts(interpret: Callable[[bool], None], caches: list[StandIn], model: str) -> None:
    """And the same trees."""
    options: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 25 if model == "head" else 10, "seed": 3}
    expected = dynamic(model).generate(RAGGED_PROMPTS, **options)
    interpret(True)
    builder = FixedTrees(MODELS[model], SHAPE).builder(RowParams.of(GREEDY, 1), TARGET)
    assert isinstance(builder, FixedBuilder) and builder.form(torch.float32) is not None
    results = dynamic(model).generate(RAGGED_PROMPTS, **options)
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
    run = stream.engine
    session = run.session
    assert session.capturable.never is None
    uniforms_BU = run.slots.noise.uniforms(run.workspace.num_uniforms(run.walk))
    originals = {"propose": session.propose, "commit": session.commit}

    def sealed(name: str) -> Callable[..., Any]:
        def work(*inputs: Any) -> Any:
            with Sealed():
                return originals[name](*inputs)

        return work

    with torch.inference_mode():
        run_round(run.workspace.state, run.walk, uniforms_BU, Stats())  # captures come after a first time, too
        with monkeypatch.context() as patch:
            for name in originals:
                patch.setattr(session, name, sealed(name))
            run_round(run.workspace.state, run.walk, uniforms_BU, Stats())
