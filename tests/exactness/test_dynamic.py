"""Dynamic trees, decision models and rests change speed, never the distribution."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from covering import some_slow
from polydraft.certify.reference import greedy_text
from polydraft.draft import TreeDrafter, dynamic_builder, policy
from polydraft.draft.candidates import fixed_shares, gains, room_of_levels
from polydraft.draft.costs import rising
from polydraft.draft.policy import RowPolicy
from polydraft.draft.stopping_builder import Decision
from polydraft.engine import Decoder
from polydraft.lab.theory import Costs, cost_curve
from polydraft.sampling import NO_TOKEN, SamplingParams
from polydraft.trees import DynamicShape, parse_tree
from polydraft.verify import SCHEMES, hybrid
from polydraft.verify.weights import largest

from .configurations import Configuration
from .setups import DRAFT, HEAD, PENALTIES, RAGGED_PROMPTS, TARGET

pytestmark = pytest.mark.usefixtures("short_blocks")

CHEAP = Costs(draft_level=0.02, tree_pass=lambda nodes: 1 + 0.002 * nodes)
LOSING = Costs(draft_level=0.9, tree_pass=lambda nodes: 1 + 0.3 * (nodes - 1))
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
    "drawn, block": lambda: dynamic(DRAFT),
    "drawn, head": lambda: dynamic(HEAD),
    "resting": lambda: dynamic(DRAFT, LOSING),
    "resting head": lambda: dynamic(HEAD, LOSING),
    "fixed": lambda: dynamic(DRAFT, shape=DynamicShape(nodes=16, depth=3, adaptive=False)),
    "dynamic, decision": lambda: dynamic(DRAFT, decision=Moody()),
    "static, resting": lambda: static(DRAFT, "auto"),
    "static head, resting": lambda: static(HEAD, "auto"),
    "static, resting, rrs": lambda: static(DRAFT, "rrs-wor"),
    "static, decision": lambda: Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("3x2x1"), decision=Moody())),
    "static head, decision": lambda: Decoder(TARGET, TreeDrafter(HEAD, parse_tree("3x2x1"), decision=Moody())),
    "static, decision, rrs": lambda: Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("fork:3x3"), "rrs-wor", decision=Moody())),
}

SLOW = {
    "drawn, block", "drawn, head", "resting head", "fixed", "static head, decision", "static, decision, rrs",
    "static head, resting", "static, resting, rrs",
}  # fmt: skip
"""Whatever of these breaks breaks the parametrised tests of all drafters too, or a quicker decoder here."""
every_decoder = pytest.mark.parametrize("name", some_slow(DECODERS, SLOW))


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
    stats = decoder.generate([RAGGED_PROMPTS[1]] * 3, max_new_tokens=120, seed=1)[0].stats
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


@pytest.mark.parametrize("nodes", [2, 5, 9, 21, 64, 128])
def test_levels_fit_their_budget(nodes: int) -> None:
    for depth in range(1, min(nodes, 9)):
        for widest in (1, 4, 32):
            shape = DynamicShape(nodes=nodes, depth=depth)
            levels = room_of_levels(shape, widest)
            shares = fixed_shares(shape, levels)
            assert len(levels) == depth and levels[0].nodes == 1 and all(level.children <= widest for level in levels)
            assert all(1 <= share <= level.total for share, level in zip(shares, levels, strict=True))
            assert 1 + sum(shares) <= nodes
            for above, level in pairwise(levels):
                assert level.nodes <= above.total


AMX = {1: 34.8, 4: 31.9, 8: 32.0, 16: 36.7, 24: 57.1, 32: 64.3, 48: 71.4, 64: 76.9}
"""Milliseconds of target passes of so many tokens, as measured on two AMX cores, noise included."""
AMX_LEVEL = 3.6 + 3.1
TYPICAL_DISTRIBUTION = (0.33, 0.11, 0.06, 0.04, 0.03, 0.025, 0.02, 0.018, 0.015, 0.013, 0.012, 0.01, 0.009, 0.008, 0.008, 0.007)
"""The largest probabilities of the shipped head's distributions at temperature 1, on average."""
SURE_DISTRIBUTION = (0.95, 0.01, 0.005, *[0.001] * 13)


def root_children(distribution: tuple[float, ...], nodes: int = 64) -> int:
    costs = amx_costs()
    policy = RowPolicy(costs, 1, nodes)
    rest = torch.full((4096,), (1 - sum(distribution)) / 4096)
    value_1K, _ = largest(torch.cat([torch.tensor(distribution), rest])[None], 16)
    gain_11K = gains(value_1K, torch.ones(1, 1))
    return int(policy.allot(gain_11K, torch.zeros(1, dtype=torch.long), share=16, least=1)[0][0, 0])


def amx_costs() -> Costs:
    smooth = rising(AMX)
    return Costs(draft_level=AMX_LEVEL / smooth[1], tree_pass=cost_curve(smooth))


def test_where_passes_cost_alike_the_root_gets_many_children_and_few_where_the_draft_is_sure() -> None:
    # Up to 16 tokens a pass of this machine costs nearly the same: the tree that was drawn there had 3 children at the root.
    assert 4 <= root_children(TYPICAL_DISTRIBUTION) <= 16
    assert root_children(TYPICAL_DISTRIBUTION, nodes=24) >= 4
    assert root_children(SURE_DISTRIBUTION) <= 3 < root_children(TYPICAL_DISTRIBUTION)


def test_allotted_children_fit_the_room_and_take_the_best() -> None:
    policy = RowPolicy(CHEAP, 2, 9)
    gain_BWK = torch.tensor([[[0.5, 0.2, 0.1], [0.3, 0.05, 0.0]], [[0.4, 0.3, 0.2], [0.0, 0.0, 0.0]]]).double()
    counts_BW, net_B = policy.allot(gain_BWK, torch.tensor([5, 0]), share=0, least=0)
    # Room for three in the first row; no child without gain in the second.
    assert counts_BW.tolist() == [[2, 1], [3, 0]]
    assert net_B[0] < 1.0 and net_B[1] < 0.9 and (net_B > 0.5).all()
    counts_BW, net_B = policy.allot(gain_BWK, torch.tensor([8, 8]), share=0, least=0)
    assert counts_BW.sum() == 0 and (net_B == 0).all()


def test_a_level_looks_for_the_likeliest_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, looked = [], []

    def counted(weights_RV: Tensor, count: int) -> object:
        looked.append(count)
        return largest(weights_RV, count)

    drawn = dynamic_builder.drawn_children
    monkeypatch.setattr(dynamic_builder, "drawn_children", lambda *inputs: (levels.append(1), drawn(*inputs))[1])
    monkeypatch.setattr(
        dynamic_builder, "largest", lambda weights_RV, count: (looked.append(count), largest(weights_RV, count))[1]
    )
    monkeypatch.setattr(hybrid, "largest", counted)
    dynamic(DRAFT).generate(RAGGED_PROMPTS, sampling=SamplingParams(), max_new_tokens=10, seed=1)
    assert len(looked) == len(levels) > 0


@pytest.mark.parametrize("name", sorted(name for name in SCHEMES if SCHEMES.get(name).max_children != 1))
def test_counts_of_ones_own_are_drawn_as_if_all_rows_had_them(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    distributions_RV = torch.softmax(2 * torch.randn(12, 40, generator=generator), -1)
    uniforms_RK = torch.rand(12, 4, generator=generator, dtype=torch.float64)
    scheme, count_R1 = SCHEMES.get(name)(), torch.arange(12)[:, None] % 5
    if scheme.max_children is not None and scheme.max_children < 4:
        uniforms_RK, count_R1 = uniforms_RK[:, : scheme.max_children], count_R1.clamp(max=scheme.max_children)
    children_RK = scheme.draw_some(distributions_RV, uniforms_RK, count_R1)
    ranked = largest(distributions_RV, uniforms_RK.shape[1])
    assert scheme.draw_some(distributions_RV, uniforms_RK, count_R1, tuple(map(torch.as_tensor, ranked))).equal(children_RK)
    for row, count in enumerate(count_R1[:, 0].tolist()):
        alone_1J = (
            scheme.draw(distributions_RV[row : row + 1], uniforms_RK[row : row + 1, :count]) if count else torch.empty(1, 0)
        )
        assert children_RK[row, :count].tolist() == alone_1J[0].tolist()
        assert (children_RK[row, count:] == NO_TOKEN).all()


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
