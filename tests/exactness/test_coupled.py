"""Coupled texts: a seed gives the text of plain decoding, whatever drafts; and plain texts follow the target's distribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from covering import all_slow, covering
from fixed_trees import FixedTrees
from polydraft.certify.reference import greedy_text
from polydraft.draft import DRAFTERS, Drafter, TreeDrafter
from polydraft.engine import Decoder, Generation
from polydraft.sampling import SamplingParams, Warper
from polydraft.trees import DynamicShape, Topology
from stand_in import StandIn

from .checks import FALSE_ALARM
from .configurations import Configuration
from .setups import CHEAP, COMBINATIONS, DRAFT, PARALLEL, PENALTIES, RAGGED_PROMPTS, TARGET, TREES, make_decoder

GREEDY = SamplingParams(temperature=0)
TRUNCATED = SamplingParams(temperature=0.7, top_p=0.9, top_k=20)
SAMPLINGS: dict[str, Any] = {
    "plain": SamplingParams(),
    "truncated": TRUNCATED,
    "penalties": PENALTIES,
    "mixed": [GREEDY, SamplingParams(), TRUNCATED],
}
SEEDS = [5, 6, 7]
NEW_TOKENS = 30
SHAPE = DynamicShape(nodes=24, depth=4)
OF_TREES: dict[str, Callable[[Any], Drafter]] = {
    "static": lambda model: TreeDrafter(model, Topology.fork(1, 4)),
    "dynamic": lambda model: TreeDrafter(model, SHAPE, costs=CHEAP),
    "fixed": lambda model: FixedTrees(model, SHAPE),
}


def coupled(**options: Any) -> Decoder:
    return make_decoder(scheme="auto", walk="auto", **options).replace(coupled=True)


def texts(decoder: Decoder, sampling: Any, rows: Sequence[int] = range(3)) -> list[list[int]]:
    own = [sampling[row] if isinstance(sampling, list) else sampling for row in rows]
    prompts, seeds = [RAGGED_PROMPTS[row] for row in rows], [SEEDS[row] for row in rows]
    return [one.token_ids for one in decoder.generate(prompts, sampling=own, seed=seeds, max_new_tokens=NEW_TOKENS)]


# As for greedy texts: of unions one is enough by default.
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [*covering([*DRAFTERS, *PARALLEL, COMBINATIONS[0]], SAMPLINGS), *all_slow(COMBINATIONS[1:], SAMPLINGS)],
)
def test_every_drafter_gives_the_text_of_plain_decoding(drafter: str, sampling: str) -> None:
    params = SAMPLINGS[sampling]
    expected = texts(coupled(drafter="none"), params)
    assert texts(coupled(drafter=drafter), params) == expected
    assert [texts(coupled(drafter=drafter), params, [row])[0] for row in range(3)] == expected
    if sampling == "mixed":
        assert expected[0] == greedy_text(TARGET, RAGGED_PROMPTS[0], NEW_TOKENS, GREEDY)


@pytest.mark.parametrize("tree", TREES)
def test_every_tree_gives_the_text_of_plain_decoding(tree: str) -> None:
    decoder = coupled(tree=tree)
    assert texts(decoder, SamplingParams()) == texts(coupled(drafter="none"), SamplingParams())
    stats = decoder.generate(RAGGED_PROMPTS * 5, max_new_tokens=40, seed=1)[0].stats
    assert 0.2 < stats.acceptance_rate < 0.95


@pytest.mark.parametrize("sampling", ["plain", "truncated", "penalties"])
def test_a_draft_equal_to_the_target_is_always_accepted(sampling: str) -> None:
    # Draft and target have the same noise only if both count positions alike: otherwise acceptance falls, never exactness.
    for make in OF_TREES.values():
        decoder = Decoder(TARGET, make(TARGET), coupled=True)
        stats = decoder.generate(RAGGED_PROMPTS * 5, sampling=SAMPLINGS[sampling], max_new_tokens=40, seed=1)[0].stats
        least = 0.9 if sampling == "truncated" else 1.0  # drafts are not truncated
        assert stats.acceptance_rate >= least and stats.tokens_per_pass > 2.5


@pytest.mark.parametrize("kind", OF_TREES)
def test_greedy_texts_are_drafted_without_noise(kind: str) -> None:
    # Noise would cost them acceptance, never exactness.
    decoders = [Decoder(TARGET, OF_TREES[kind](DRAFT), coupled=coupled) for coupled in (True, False)]
    runs = [decoder.generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=40) for decoder in decoders]
    assert [one.stats.accepts_by_depth for one in runs[0]] == [one.stats.accepts_by_depth for one in runs[1]]


def test_settings_name_the_scheme() -> None:
    assert coupled().generate(RAGGED_PROMPTS[0], max_new_tokens=4).settings["scheme"] == "coupled"
    assert coupled().generate(RAGGED_PROMPTS[0], sampling=GREEDY, max_new_tokens=4).settings["scheme"] == "top"


@dataclass(frozen=True, kw_only=True)
class Coupled(Configuration):
    """Texts decided by noise; drafts do not matter, as the tests above show."""

    drafter: str = "none"

    def decoder(self) -> Decoder:
        """Build it."""
        return coupled(drafter=self.drafter)


CONFIGURATIONS = [
    Coupled(label="coupled"),
    Coupled(label="coupled, truncated", sampling=TRUNCATED),
    Coupled(label="coupled, penalties", sampling=PENALTIES),
    Coupled(label="coupled, drafted", drafter="model"),
]
THRESHOLD = FALSE_ALARM / (13 * len(CONFIGURATIONS))


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda one: one.label)
def test_texts_follow_the_target_distribution(configuration: Coupled) -> None:
    assert min(configuration.p_values(configuration.generate())) > THRESHOLD


def _same_noise_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Warper, "move", lambda self, counts_B: None)


def _changed(monkeypatch: pytest.MonkeyPatch, keys: Any = lambda keys_B: keys_B, factor: float = 1.0) -> None:
    original = Warper._noise

    def noise(self: Warper, depths: Any) -> Any:
        keys_B, positions_BK, scales_B, tokens_D = original(self, depths)
        return keys(keys_B), positions_BK, factor * scales_B, tokens_D

    monkeypatch.setattr(Warper, "_noise", noise)


def _same_noise_in_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, keys=lambda keys_B: 0 * keys_B)


def _noise_of_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, factor=0.9)


def _new_noise_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter(range(10**9))
    _changed(monkeypatch, keys=lambda keys_B: keys_B + next(passes))


FAULTS = [_same_noise_everywhere, _same_noise_in_each_row, _noise_of_another_distribution]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
def test_planted_errors_are_caught(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    configuration = CONFIGURATIONS[0]
    assert min(configuration.p_values(configuration.generate())) < THRESHOLD


def test_noise_of_its_own_for_each_pass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _new_noise_in_each_pass(monkeypatch)
    assert texts(coupled(), SamplingParams()) != texts(coupled(drafter="none"), SamplingParams())


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("sampling", ["plain", "mixed"])
def test_captured_rounds_that_run_ahead_give_the_same_texts(hide_values: Any, caches: list[StandIn], sampling: str) -> None:
    hide_values()
    params = SAMPLINGS[sampling]
    for drafter in (FixedTrees(DRAFT, SHAPE), make_decoder(scheme="auto", walk="auto").drafter):
        decoder = Decoder(TARGET, drafter, coupled=True)
        results: list[Generation] = decoder.generate(RAGGED_PROMPTS, sampling=params, max_new_tokens=40, seed=SEEDS)
        expected = Decoder(TARGET, coupled=True, graphs=False).generate(
            RAGGED_PROMPTS, sampling=params, max_new_tokens=40, seed=SEEDS
        )
        assert [one.token_ids for one in results] == [one.token_ids for one in expected]
        assert results[0].stats.rounds_ahead > results[0].stats.rounds / 3
