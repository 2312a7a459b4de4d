"""N-grams beside a dynamic tree that learns and rests: exact, and every row by its own history alone."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import some_slow
from polydraft.certify.reference import greedy_text
from polydraft.draft import Combination, TreeDrafter
from polydraft.draft.candidates import total
from polydraft.draft.grams import gram_tree
from polydraft.draft.head_source import HeadSource
from polydraft.draft.policy import RowPolicy
from polydraft.engine import Decoder
from polydraft.lab.theory import Costs
from polydraft.models import FeatureHead
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape

from .configurations import Configuration
from .setups import DRAFT, GRAM_PROMPT, HEAD, PENALTIES, RAGGED_PROMPTS, TARGET, gram_options

pytestmark = pytest.mark.usefixtures("as_if_alone")

CHEAP = Costs(draft_level=0.02, tree_pass=lambda nodes: 1 + 0.002 * nodes)
BALANCED = Costs(draft_level=0.1, tree_pass=lambda nodes: 1 + 0.05 * (nodes - 1))
"""Where the size of the best tree hangs on what was learnt."""
LOSING = Costs(draft_level=1e-6, tree_pass=lambda nodes: 1 + 1e-6 * nodes, overhead=8.0)
"""However many rows share a round."""
GREEDY = SamplingParams(temperature=0)
PROMPTS = [[*prompt, *GRAM_PROMPT[:length]] for length in (3, 7, len(GRAM_PROMPT)) for prompt in RAGGED_PROMPTS][:8]

CASES = {
    "lookup + model": ("lookup", DRAFT, CHEAP),
    "lookup + model, balanced": ("lookup", DRAFT, BALANCED),
    "lookup + model, resting": ("lookup", DRAFT, LOSING),
    "self-draft + model, balanced": ("self-draft", DRAFT, BALANCED),
    "suffix + head, balanced": ("suffix", HEAD, BALANCED),
    "suffix + head, resting": ("suffix", HEAD, LOSING),
}


PAUSING = {
    "lookup": BALANCED,
    "suffix": Costs(draft_level=0.0, tree_pass=lambda nodes: 1 + 0.4 * (nodes - 1)),
    "self-draft": BALANCED,
}
"""N-grams alone, as many as pay."""


def combined(case: str, draft: Any = None) -> Decoder:
    if case in PAUSING:
        grams = gram_tree([case], gram_options(), pauses=True)
        grams.costs = PAUSING[case]
        return Decoder(TARGET, grams)
    name, usual, costs = CASES[case]
    tree = TreeDrafter(draft or usual, DynamicShape(nodes=16, depth=4), costs=costs)
    return Decoder(TARGET, Combination(tree, gram_tree([name], gram_options())))


@pytest.fixture
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short texts see rests, trials and what lies between."""
    for name_of_length in ("SHORTEST_REST", "_FIRST_REST", "_TRIAL", "_SHORT_TRIAL"):
        monkeypatch.setattr(f"polydraft.draft.policy.{name_of_length}", 1)
    monkeypatch.setattr("polydraft.draft.policy.LONGEST_REST", 3)


# Without rests, `test_end_to_end` tests the distribution of n-grams beside a dynamic tree.
@pytest.mark.parametrize("case", some_slow({**CASES, **PAUSING}, {*CASES, *PAUSING} - {"suffix + head, resting", "suffix"}))
def test_texts_follow_the_target_distribution(case: str, short_rests: None, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration(label=f"adaptive {case}", prompt=GRAM_PROMPT, samples=800)
    monkeypatch.setattr(Configuration, "decoder", lambda self: combined(case))
    results = configuration.generate()
    # Thirteen tests of each case: false alarm below 1e-4 together.
    assert min(configuration.p_values(results)) > 1e-4 / (13 * len({**CASES, **PAUSING}))
    stats = results[0].stats
    if case in PAUSING:
        assert stats.drafted_tokens > 0.02 * stats.new_tokens and stats.offers_by_depth[0] < 0.9 * stats.passes
    else:
        assert len(stats.tokens_by_source) >= 2, "both are heard"


# By default where sizes hang on what was learnt: that is what rows could take from each other.
@pytest.mark.parametrize("case", some_slow({**CASES, **PAUSING}, {*CASES, *PAUSING} - {"self-draft"}))
def test_rows_are_their_own(case: str) -> None:
    decoder = combined(case)
    for sampling, prompts in ((SamplingParams(), PROMPTS), (PENALTIES, PROMPTS[:3])):
        seeds = list(range(len(prompts)))
        together = decoder.generate(prompts, sampling=sampling, max_new_tokens=30, seed=seeds)
        for prompt, seed, result in zip(prompts, seeds, together, strict=True):
            alone = decoder.generate(prompt, sampling=sampling, max_new_tokens=30, seed=[seed])
            assert alone.token_ids == result.token_ids
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, sampling=GREEDY, max_new_tokens=30), strict=True):
        assert result.token_ids == greedy_text(TARGET, prompt, 30, GREEDY)


def test_what_was_learnt_outlasts_tokens_of_n_grams(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    begin = RowPolicy.begin
    monkeypatch.setattr(RowPolicy, "begin", lambda policy, *new: (begun.append(policy), begin(policy, *new))[1])
    stats = combined("lookup + model").generate(PROMPTS, sampling=GREEDY, max_new_tokens=40)[0].stats
    assert stats.tokens_by_source["lookup"] > 10
    assert len(begun) == 1, "for the texts, and never again"


@pytest.mark.parametrize("case", ["lookup + model", "lookup + model, resting"])
def test_a_draft_equal_to_the_target_is_always_accepted(case: str, short_rests: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Errors in the draft's memory after tokens of n-grams, or after a rest, cost acceptance: only this sees them.
    drafted, learn = [], RowPolicy.learn

    def noting(policy: RowPolicy, accepted: list[int], active: list[bool]) -> None:
        plans = policy._plans or []
        drafted.extend(count for plan, count, works in zip(plans, accepted, active, strict=False) if plan.levels and works)
        learn(policy, accepted, active)

    monkeypatch.setattr(RowPolicy, "learn", noting)
    decoder, passes, by_source = combined(case, draft=TARGET), 0, Counter[str]()
    for prompt in PROMPTS:  # alone: for the texts of a batch, drafting hardly pays
        stats = decoder.generate(prompt, sampling=GREEDY, max_new_tokens=60).stats
        passes, by_source = passes + stats.passes, by_source + Counter(stats.tokens_by_source)
    assert by_source["lookup"] > 10 and by_source["dynamic"] > 10
    assert len(drafted) > 20 and min(drafted) >= 1
    assert ("resting" in case) == (len(drafted) < 0.9 * passes)


def test_a_head_proposes_the_same_after_rests_with_tokens_of_n_grams(
    short_rests: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All that waited must be read, in order: errors there cost acceptance and nothing else.
    seen: dict[tuple[int, ...], list[int]] = {}
    texts: list[list[int]] = []
    fresh, head = HeadSource._fused_fresh, FeatureHead.head

    def noting_texts(source: HeadSource) -> Tensor:
        texts[:] = [list(text) for text in source._texts]
        return fresh(source)

    def noting_logits(self: FeatureHead, outputs: Tensor) -> Tensor:
        logits = head(self, outputs)
        for row, text in enumerate(texts):  # the first call after the fresh entries were read is that of the roots
            seen.setdefault(tuple(text), logits[row, 0].topk(3).indices.tolist())
        texts.clear()
        return logits

    monkeypatch.setattr(HeadSource, "_fused_fresh", noting_texts)
    monkeypatch.setattr(FeatureHead, "head", noting_logits)
    stats = combined("suffix + head, resting").generate(PROMPTS, sampling=GREEDY, max_new_tokens=60)[0].stats
    assert stats.tokens_by_source["suffix"] > 10
    rested = {text: ranked for text, ranked in seen.items() if list(text) not in PROMPTS}
    assert len(rested) > 10
    for text, ranked in rested.items():
        seen.clear()
        combined("suffix + head, balanced").generate(list(text), sampling=GREEDY, max_new_tokens=1)
        assert seen[text] == ranked


def test_sums_do_not_depend_on_order_and_padding() -> None:
    generator = torch.Generator().manual_seed(3)
    for length in (5, 8, 21, 130):
        values_RX = torch.rand(4, length, generator=generator, dtype=torch.float64)
        expected = total(values_RX).tolist()
        padded_RX = torch.cat([values_RX[:, :3], torch.zeros(4, 7, dtype=torch.float64), values_RX[:, 3:].flip(1)], dim=1)
        assert total(padded_RX).tolist() == expected
        assert total(values_RX[2:3].contiguous()).tolist() == expected[2:3]
        assert torch.allclose(torch.tensor(expected).double(), values_RX.sum(-1), atol=1e-7)
