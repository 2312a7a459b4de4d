"""Static trees that follow the load: any choice is exact, captured or not, and coupled texts do not notice."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from covering import all_slow, covering
from polydraft.certify.reference import greedy_text
from polydraft.draft import TreeDrafter
from polydraft.draft.ladder import Ladder
from polydraft.draft.tree_choice import TreeChoice, trees_by_load
from polydraft.engine import Decoder, Engine, Generation, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.sampling.categorical import row_generator
from polydraft.trees import parse_tree
from stand_in import StandIn

from .configurations import Configuration
from .setups import DRAFT, HEAD, PENALTIES, RAGGED_PROMPTS, TARGET

pytestmark = pytest.mark.usefixtures("short_blocks")

TREE = parse_tree("4x2x1")
TREES = trees_by_load(TREE)
PLACES = len(TREES)
MODELS = {"model": DRAFT, "head": HEAD}
GREEDY = SamplingParams(temperature=0)
SAMPLINGS: dict[str, Any] = {
    "greedy": GREEDY,
    "drawn": SamplingParams(),
    "penalties": PENALTIES,
    "mixed": [GREEDY, SamplingParams(), SamplingParams(temperature=0.7, top_k=9)],
}
TRUNCATED = SamplingParams(top_p=0.85, temperature=0.8, repetition_penalty=1.3)
SEEDS = [5, 6, 7]

both_models = pytest.mark.parametrize("model", MODELS)


@pytest.fixture
def every_tree(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the choice go round all trees, each for some rounds."""
    monkeypatch.setattr(TreeChoice, "alone", property(lambda self: False, lambda self, value: None), raising=False)

    def take_turns(rounds: int) -> None:
        def settle(choice: TreeChoice, *_: Any) -> None:
            turns = vars(choice).setdefault("turns", itertools.count(1))
            choice.ladder.place = next(turns) // rounds % PLACES

        monkeypatch.setattr(TreeChoice, "settle", settle)
        monkeypatch.setattr(Ladder, "fit", lambda ladder, *_: None)

    take_turns(1)
    return take_turns


def by_load(model: str = "model", **options: Any) -> Decoder:
    return Decoder(TARGET, TreeDrafter(MODELS[model], TREE, by_load=True), **options)


def texts(results: list[Generation]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("model", "sampling"),
    [
        # The distribution of a head's trees is tested with all drafters; what changes here is the tree.
        *covering(["model"], [SamplingParams()]),
        *all_slow(["head"], [SamplingParams(), TRUNCATED]),
        *all_slow(["model"], [TRUNCATED]),
    ],
)
def test_texts_follow_the_target_distribution(
    every_tree: object, monkeypatch: pytest.MonkeyPatch, model: str, sampling: SamplingParams
) -> None:
    configuration = Configuration(label=f"by load: {model} {sampling.top_p}", sampling=sampling, samples=2_000)
    monkeypatch.setattr(Configuration, "decoder", lambda self: by_load(model))
    results = configuration.generate()
    # Fifteen tests on each of four decoders: false alarm below 1e-4 together.
    assert min(configuration.p_values(results)) > 1e-4 / (15 * 4)
    assert results[0].stats.drafted_tokens > 0


@pytest.mark.parametrize(("model", "sampling"), [
    *covering(MODELS, ["greedy", "mixed"]),
    *all_slow(MODELS, ["drawn", "penalties"]),
])  # fmt: skip
def test_greedy_rows_have_the_greedy_text(every_tree: object, model: str, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    results = by_load(model).generate(RAGGED_PROMPTS, sampling=params, max_new_tokens=25, seed=SEEDS)
    for row, (prompt, result) in enumerate(zip(RAGGED_PROMPTS, results, strict=True)):
        if (params[row] if isinstance(params, list) else params) is GREEDY:
            assert result.token_ids == greedy_text(TARGET, prompt, 25, GREEDY)


# By default a draft model with both kinds of texts, and the head, which takes longest, once.
@pytest.mark.parametrize(("model", "sampling", "ahead"), [
    *covering(["model"], ["greedy", "drawn"], [True, False]),
    *covering(["head"], ["greedy"], [False]),
    *all_slow(["head"], ["greedy"], [True]),
    *all_slow(["head"], ["drawn"], [True, False]),
    *all_slow(MODELS, ["penalties", "mixed"], [True, False]),
])  # fmt: skip
def test_captured_rounds_give_the_same_texts(
    every_tree: Callable[[int], None], caches: list[StandIn], model: str, sampling: str, ahead: bool
) -> None:
    every_tree(5)
    captured, eager = by_load(model, ahead=ahead), by_load(model, graphs=False)
    options = {"sampling": SAMPLINGS[sampling], "max_new_tokens": 60, "seed": SEEDS}
    results, expected = (decoder.generate(RAGGED_PROMPTS, **options) for decoder in (captured, eager))
    (graphs,) = caches
    if not ahead:  # a round that runs ahead has the last one's tree, so that turns are longer
        assert texts(results) == texts(expected)
    for result, other, prompt in zip(results, expected, RAGGED_PROMPTS, strict=True):
        if sampling == "greedy":
            assert result.token_ids == other.token_ids == greedy_text(TARGET, prompt, 60, GREEDY)
    assert {kind[-3][4] for kind in graphs.kinds} == {(place,) for place in range(PLACES)}
    assert results[0].stats.replayed_rounds > results[0].stats.rounds / 2


@both_models
def test_a_draft_equal_to_the_target_is_always_accepted(every_tree: object, model: str) -> None:
    # Errors in the draft's own memory while trees come and go cost acceptance: only this sees them.
    decoder = Decoder(TARGET, TreeDrafter(TARGET, TREE, by_load=True))
    stats = decoder.generate(RAGGED_PROMPTS * 3, sampling=GREEDY, max_new_tokens=60)[0].stats
    assert stats.accepts_by_depth == stats.offers_by_depth and stats.passes > stats.offers_by_depth[0] > 0


def test_a_seed_gives_a_coupled_text_in_any_company(every_tree: object) -> None:
    plain, following = Decoder(TARGET, coupled=True), by_load(coupled=True)
    expected = texts(plain.generate(RAGGED_PROMPTS, max_new_tokens=40, seed=SEEDS))
    three = following.generate(RAGGED_PROMPTS, max_new_tokens=40, seed=SEEDS)
    two = following.generate(RAGGED_PROMPTS[1:], max_new_tokens=40, seed=SEEDS[1:])
    many = following.generate(RAGGED_PROMPTS[::-1] * 5, max_new_tokens=[40, 40, 40, *[9] * 12], seed=SEEDS[::-1] * 5)
    assert texts(three) == texts(many)[2::-1] == expected and texts(two) == expected[1:]
    assert 0 < three[0].stats.candidates < (TREE.num_nodes - 1) * three[0].stats.passes, "trees of several sizes"


def test_texts_have_smaller_trees_where_these_pay() -> None:
    decoder = by_load()
    workspace = Workspace(decoder.target, decoder.drafter, RowParams((IDLE,) * 4))
    engine = Engine(workspace)
    sequences = [
        TokenSequence(prompt=[1, 2, 3 + row], params=SamplingParams(), generator=row_generator(row), max_new_tokens=80)
        for row in range(4)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while not engine.done:
        engine.step()
    assert max(one.speculation.candidates / one.speculation.rounds for one in sequences) < TREE.num_nodes - 1


def test_a_warm_decoder_has_tried_every_tree_that_may_pay() -> None:
    decoder = by_load()
    decoder.warm_up(batch_size=4, longest=80)
    tried = [place for place in range(PLACES) if decoder.drafter._timings.seconds((4, "hybrid"), place) is not None]
    tokens = [4 * tree.num_nodes for tree in TREES]
    assert tried == [0, *(place for place in range(1, PLACES) if tokens[place] >= 16)] and len(tried) > 2
