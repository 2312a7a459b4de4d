"""Dynamic trees, decision models and rests change speed, never the law."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from polydraft.certify.reference import greedy_text
from polydraft.decision import Decision
from polydraft.drafters import Dynamic, HeadTree, ModelTree
from polydraft.drafters.drawn_children import schedule
from polydraft.drafters.policy import Plan, RowPolicy
from polydraft.engine import Decoder
from polydraft.sampling import SamplingParams
from polydraft.theory import Costs, cost_curve
from polydraft.trees import DynamicShape, parse_tree

from .configurations import Configuration
from .setups import DRAFT, HEAD, PENALTIES, RAGGED_PROMPTS, TARGET

pytestmark = pytest.mark.usefixtures("short_blocks")

CHEAP = Costs(draft_level=0.02, tree_pass=lambda nodes: 1 + 0.002 * nodes)
LOSING = Costs(draft_level=0.9, tree_pass=lambda nodes: 1 + 0.3 * (nodes - 1))
GREEDY = SamplingParams(temperature=0)
SHAPE = DynamicShape(nodes=16, depth=4)


@dataclass
class Moody(Decision):
    """Goes on for reasons of its own: the draft's law, and so the tokens so far."""

    def goes_on(self, features_BGF: Tensor, logits_BGV: Tensor) -> Tensor:
        return torch.softmax(logits_BGV.float(), -1).amax(-1).amax(-1) > 0.45


def dynamic(model, costs=CHEAP, shape=SHAPE, decision=None, **options) -> Decoder:
    return Decoder(TARGET, Dynamic(model, shape, costs, None, decision), **options)


DECODERS = {
    "drawn, block": lambda: dynamic(DRAFT),
    "drawn, head": lambda: dynamic(HEAD),
    "resting": lambda: dynamic(DRAFT, LOSING),
    "resting head": lambda: dynamic(HEAD, LOSING),
    "fixed": lambda: dynamic(DRAFT, shape=DynamicShape(nodes=16, depth=3, adaptive=False)),
    "dynamic, decision": lambda: dynamic(DRAFT, decision=Moody()),
    "static, decision": lambda: Decoder(TARGET, ModelTree(DRAFT, parse_tree("3x2x1"), decision=Moody())),
    "static head, decision": lambda: Decoder(TARGET, HeadTree(HEAD, parse_tree("3x2x1"), decision=Moody())),
    "static, decision, rrs": lambda: Decoder(TARGET, ModelTree(DRAFT, parse_tree("fork:3x3"), "rrs-wor", decision=Moody())),
}

SLOW = {"drawn, head", "fixed", "static head, decision", "static, decision, rrs"}
"""Whatever of these breaks breaks the parametrised tests of all drafters too, or a quicker decoder here."""
every_decoder = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in DECODERS]
)


@every_decoder
def test_texts_follow_the_target_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration(label=f"dynamic: {name}", samples=2_000)
    monkeypatch.setattr(Configuration, "decoder", lambda self: DECODERS[name]())
    # Short, so that texts of four tokens see rests, trials and what lies between.
    monkeypatch.setattr("polydraft.drafters.policy.SHORTEST_REST", 1)
    monkeypatch.setattr("polydraft.drafters.policy._TRIAL", 1)
    results = configuration.generate()
    # Fifteen tests of three kinds on each of nine decoders: false alarm below 1e-4 together.
    assert min(configuration.p_values(results)) > 1e-4 / (15 * len(DECODERS))
    stats = results[0].stats
    assert stats.drafted_tokens > 0.03 * stats.new_tokens
    assert ("resting" in name) == (stats.offers_by_depth[0] < 0.9 * stats.passes)


@every_decoder
def test_greedy_texts_are_the_argmax_and_rows_are_their_own(name: str) -> None:
    decoder = DECODERS[name]()
    together = decoder.generate(RAGGED_PROMPTS, sampling=GREEDY, max_new_tokens=30)
    for prompt, result in zip(RAGGED_PROMPTS, together, strict=True):
        assert result.token_ids == greedy_text(TARGET, prompt, 30, GREEDY)
    seeds = [1, 2, 3]
    together = decoder.generate(RAGGED_PROMPTS, sampling=PENALTIES, max_new_tokens=25, seed=seeds)
    for prompt, seed, result in zip(RAGGED_PROMPTS, seeds, together, strict=True):
        assert decoder.generate(prompt, sampling=PENALTIES, max_new_tokens=25, seed=[seed]).token_ids == result.token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["chosen", "drawn"])
@pytest.mark.parametrize("model", [DRAFT, HEAD], ids=["model", "head"])
def test_rounds_without_a_look_give_the_same_texts(model, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU: all levels are computed, all tables are as wide as they may be.
    def texts() -> list[list[int]]:
        decoder = dynamic(model, Costs(draft_level=0.15, tree_pass=lambda nodes: 1 + 0.02 * nodes))
        results = decoder.generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=25, seed=4)
        return [result.token_ids for result in results]

    looking = texts()
    monkeypatch.setattr("polydraft.schemes.arrays._HOSTS", ())
    assert texts() == looking


@pytest.mark.parametrize("costs", [CHEAP, LOSING], ids=["drafting", "with rests"])
def test_a_draft_equal_to_the_target_is_always_accepted(costs: Costs) -> None:
    # Errors in the draft's own memory, in places of nodes or in catching up after a rest, cost acceptance: only this sees them.
    decoder = dynamic(TARGET, costs)
    stats = decoder.generate(RAGGED_PROMPTS * 3, sampling=GREEDY, max_new_tokens=120)[0].stats
    assert stats.acceptance_rate == 1.0
    assert stats.passes > stats.offers_by_depth[0] if costs is LOSING else stats.tokens_per_pass > 3


def test_rows_rest_where_drafting_loses_and_try_again() -> None:
    decoder = dynamic(DRAFT, LOSING)
    stats = decoder.generate([RAGGED_PROMPTS[1]] * 3, max_new_tokens=120, seed=1)[0].stats
    share = stats.offers_by_depth[0] / stats.passes
    assert 0.05 < share < 0.6, "mostly plain, with trials"
    winning = dynamic(DRAFT, CHEAP).generate([RAGGED_PROMPTS[1]] * 3, max_new_tokens=60, seed=1)[0].stats
    assert winning.offers_by_depth[0] / winning.passes > 0.9


def test_a_policy_comes_back_once_drafting_pays() -> None:
    policy = RowPolicy(LOSING, 1, 16, torch.device("cpu"), adaptive=True)
    yes_1 = torch.ones(1, dtype=torch.bool)

    def rounds(count: int, accepted: int) -> int:
        drafted = 0
        for _ in range(count):
            levels_1 = policy.drafting_B.long()
            drafted += int(levels_1)
            plan = Plan(levels_1.float(), 2 * levels_1, levels_1)
            policy.learn(plan, accepted * levels_1, yes_1)
        return drafted

    assert rounds(300, accepted=0) < 100
    assert rounds(300, accepted=8) > 200, "nine tokens for the time of 2.5 passes"


def test_sizes_follow_the_cost_curve() -> None:
    probs_BM = 0.7 ** torch.arange(1, 16)[None]
    cheap, steep = (
        RowPolicy(Costs(draft_level=0.1, tree_pass=cost_curve(curve)), 1, 16, torch.device("cpu"), adaptive=True)
        for curve in ({1: 1.0, 16: 1.01}, {1: 1.0, 4: 1.05, 16: 9.0})
    )
    assert int(cheap.counts(probs_BM)) >= 12
    assert int(steep.counts(probs_BM)) <= 4
    assert bool(cheap.wants_level(torch.tensor([0.9]))) and not bool(cheap.wants_level(torch.tensor([0.05])))


@pytest.mark.parametrize("most", [2, 5, 9, 21, 64, 128])
def test_schedules_fit_their_budget(most: int) -> None:
    for depth in range(1, 9):
        for widest in (1, 4, 32):
            levels = schedule(CHEAP, most, depth, widest)
            assert 1 <= len(levels) <= depth and 1 + sum(level.total for level in levels) <= most
            assert levels[0].nodes == 1 and all(level.children <= widest for level in levels)
            for above, level in pairwise(levels):
                assert level.nodes <= above.total
