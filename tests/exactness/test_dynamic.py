"""Dynamic trees, decision models and rests change speed, never the distribution."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from covering import some_slow
from polydraft.certify.reference import greedy_text
from polydraft.draft import TreeDrafter, policy
from polydraft.draft.policy import RowPolicy
from polydraft.draft.stopping_builder import Decision
from polydraft.engine import Decoder
from polydraft.lab.theory import Costs, cost_curve
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape, parse_tree

from .configurations import Configuration
from .setups import DRAFT, HEAD, PENALTIES, RAGGED_PROMPTS, TARGET

pytestmark = pytest.mark.usefixtures("short_blocks")

# However many rows share a round.
CHEAP = Costs(draft_level=1e-6, tree_pass=lambda nodes: 1 + 1e-6 * nodes)
LOSING = Costs(draft_level=1e-6, tree_pass=lambda nodes: 1 + 1e-6 * nodes, overhead=2.0)
DOUBTFUL = Costs(draft_level=0.5, tree_pass=lambda nodes: 1 + 0.05 * (nodes - 1))
"""By these most drafts would just pay, and this tree does not: a default that could not pay would not be begun with."""
GREEDY = SamplingParams(temperature=0)
SHAPE = DynamicShape(nodes=16, depth=4)


@dataclass
class Moody(Decision):
    """Goes on for reasons of its own: the draft's distribution, and so the tokens so far."""

    def goes_on(self, features_BGF: Tensor, logits_BGV: Tensor) -> Tensor:
        return torch.softmax(logits_BGV.float(), -1).amax(-1).amax(-1) > 0.45


def dynamic(model, costs=CHEAP, shape=SHAPE, decision=None, **options) -> Decoder:
    return Decoder(TARGET, TreeDrafter(model, shape, costs=costs, decision=decision), **options)


def static(model, scheme: str) -> Decoder:
    return Decoder(TARGET, TreeDrafter(model, parse_tree("3x2x1"), scheme, costs=DOUBTFUL, pauses=True))


DECODERS = {
    "model": lambda: dynamic(DRAFT),
    "head": lambda: dynamic(HEAD),
    "resting": lambda: dynamic(DRAFT, LOSING),
    "resting head": lambda: dynamic(HEAD, LOSING),
    "fixed": lambda: dynamic(DRAFT, shape=DynamicShape(nodes=16, depth=3, adaptive=False)),
    "dynamic, decision": lambda: dynamic(DRAFT, decision=Moody()),
    "static, resting": lambda: static(DRAFT, "auto"),
    "static head, resting": lambda: static(HEAD, "auto"),
    "static, decision": lambda: Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("3x2x1"), decision=Moody())),
    "static head, decision": lambda: Decoder(TARGET, TreeDrafter(HEAD, parse_tree("3x2x1"), decision=Moody())),
    "static, decision, rrs": lambda: Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("fork:3x3"), "rrs-wor", decision=Moody())),
}

SLOW = {
    "model", "head", "resting head", "fixed", "static head, decision", "static, decision, rrs",
    "static head, resting",
}  # fmt: skip
"""Whatever of these breaks breaks the parametrised tests of all drafters too, or a quicker decoder here."""
every_decoder = pytest.mark.parametrize("name", some_slow(DECODERS, SLOW))


@pytest.mark.usefixtures("as_if_alone")
@every_decoder
def test_texts_follow_the_target_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration(label=f"dynamic: {name}", samples=2_000)
    monkeypatch.setattr(Configuration, "decoder", lambda self: DECODERS[name]())
    # Short, so that texts of four tokens see rests, trials and what lies between.
    for name_of_length in ("SHORTEST_REST", "_FIRST_REST", "_TRIAL", "_SHORT_TRIAL"):
        monkeypatch.setattr(f"polydraft.draft.policy.{name_of_length}", 1)
    results = configuration.generate()
    # Fifteen tests of three kinds on each of twelve decoders: false alarm below 1e-4 together.
    assert min(configuration.p_values(results)) > 1e-4 / (15 * len(DECODERS))
    stats = results[0].stats
    assert stats.drafted_tokens > 0.03 * stats.new_tokens
    assert ("resting" in name) == (stats.offers_by_depth[0] < 0.9 * stats.passes)


@pytest.mark.usefixtures("as_if_alone")
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


@pytest.mark.parametrize("costs", [CHEAP, LOSING], ids=["drafting", "with rests"])
def test_a_draft_equal_to_the_target_is_always_accepted(costs: Costs) -> None:
    # Errors in the draft's own memory, in places of nodes or in catching up after a rest, cost acceptance: only this sees them.
    decoder = dynamic(TARGET, costs)
    stats = decoder.generate(RAGGED_PROMPTS * 3, sampling=GREEDY, max_new_tokens=120)[0].stats
    assert stats.acceptance_rate == 1.0
    assert stats.passes > stats.offers_by_depth[0] if costs is LOSING else stats.tokens_per_pass > 3


def test_rows_rest_where_drafting_loses_and_try_again() -> None:
    decoder = dynamic(DRAFT, LOSING)
    stats = decoder.generate([RAGGED_PROMPTS[1]] * 3, max_new_tokens=240, seed=1)[0].stats
    share = stats.offers_by_depth[0] / stats.passes
    assert 0.01 < share < 0.1, "mostly plain, with trials"
    winning = dynamic(DRAFT, CHEAP).generate([RAGGED_PROMPTS[1]] * 3, max_new_tokens=60, seed=1)[0].stats
    assert winning.offers_by_depth[0] / winning.passes > 0.9


def test_a_policy_comes_back_once_drafting_pays() -> None:
    policy = RowPolicy(LOSING, 1, 16)

    def rounds(count: int, accepted: int) -> int:
        drafted = 0
        for _ in range(count):
            (drafts,) = map(int, policy.drafting)
            drafted += drafts
            policy.plan([drafts], [2 * drafts], [drafts])
            policy.learn([accepted * drafts], [True])
        return drafted

    assert rounds(300, accepted=0) < 100
    assert rounds(300, accepted=8) > 200, "nine tokens for the time of 2.5 passes"


def test_sizes_follow_the_cost_curve() -> None:
    probs_BM = (0.7 ** torch.arange(1, 16)[None]).double()
    cheap, steep = (
        RowPolicy(Costs(draft_level=0.1, tree_pass=cost_curve(curve)), 1, 16)
        for curve in ({1: 1.0, 16: 1.01}, {1: 1.0, 4: 1.05, 16: 9.0})
    )
    assert int(cheap.counts(probs_BM)[0]) >= 12
    assert int(steep.counts(probs_BM)[0]) <= 4
    assert cheap.wants_level(torch.tensor([0.9]), 1).all() and not cheap.wants_level(torch.tensor([0.05]), 1).any()


@pytest.mark.parametrize("model", [DRAFT, HEAD], ids=["model", "head"])
def test_a_text_of_one_token_may_begin_with_a_rest(monkeypatch: pytest.MonkeyPatch, model) -> None:
    """Nothing precedes its first token, and nobody has read it when drafting begins; what a draft reads later is the text."""
    monkeypatch.setattr(policy, "_FIRST_REST", 3)
    texts = []
    for costs in (LOSING, CHEAP):
        result = dynamic(model, costs).generate([5], sampling=GREEDY, max_new_tokens=40)
        assert sum(result.stats.offers_by_depth) > 0, "it never drafted: nothing is shown"
        texts.append(result.token_ids)
    assert texts[0] == texts[1] == greedy_text(TARGET, [5], 40, GREEDY)
    rested = dynamic(TARGET, LOSING).generate([5], sampling=GREEDY, max_new_tokens=40).stats if model is DRAFT else None
    if rested is not None:  # a draft that is the target is never wrong, unless it has read something else
        assert rested.accepts_by_depth == rested.offers_by_depth
