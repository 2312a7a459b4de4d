"""Layer 3: whole texts of the engine follow the target's exact law, whatever drafts, verifies or samples."""

import math

import pytest

from polydraft.drafters import GRAM_DRAFTERS
from polydraft.sampling import SamplingParams
from polydraft.schemes import SCHEMES

from .checks import FIXTURE_DRAFT_V, FIXTURE_TARGET_V, enumerated_acceptance, largest_count
from .configurations import CONFIGURATIONS, FIXTURE_CONFIGURATIONS, SCHEMES_AND_WALKS, THRESHOLD, Configuration
from .setups import EVERY_DRAFTER, PENALTIES, RAGGED_PROMPTS, make_decoder, tree_for

pytestmark = pytest.mark.usefixtures("short_blocks")


SLOW = {"drafter head, truncated", "drafter dynamic, truncated", "drafter none, truncated", "drafter none"}
"""Whatever of these breaks breaks the same drafter untruncated, or another one truncated."""
QUICK = {"rrs-wor node", "rrs-wor traversal", "hybrid block", "hybrid node", "naive node", "top node"}
SLOW |= {f"{scheme} {walk}" for scheme, walk in SCHEMES_AND_WALKS} - QUICK
"""A scheme's own errors are largest, and looked for, in the fixture's texts below, where all pairs are; here one pair for each
way through the engine is enough."""


@pytest.mark.parametrize("configuration", [
    pytest.param(one, id=one.label, marks=pytest.mark.slow if one.label in SLOW else ()) for one in CONFIGURATIONS
])  # fmt: skip
def test_texts_follow_the_target_law(configuration: Configuration) -> None:
    results = configuration.generate()
    assert min(configuration.p_values(results)) > THRESHOLD
    stats = results[0].stats
    if configuration.drafter == "model":
        # Where nothing or everything is accepted, the test would prove nothing.
        assert 0.3 < stats.acceptance_rate < 0.95
        assert stats.tokens_per_pass > 1.2
    if not GRAM_DRAFTERS.keys().isdisjoint(configuration.drafter.split("+")):
        assert 0.15 < stats.acceptance_rate < 0.95
        assert stats.tokens_per_pass > 1.2
        assert {source for source in stats.tokens_by_source} - {"model", "head"}


@pytest.mark.parametrize("configuration", FIXTURE_CONFIGURATIONS, ids=lambda configuration: configuration.label)
def test_texts_follow_the_target_law_where_errors_would_be_largest(configuration: Configuration) -> None:
    results = configuration.generate()
    assert min(configuration.p_values(results)) > THRESHOLD
    # All nodes have the same laws, so acceptance is known too: code that is exact for a wrong reason shows here.
    scheme, stats = SCHEMES.get(configuration.scheme)(), results[0].stats
    rate = enumerated_acceptance(scheme, FIXTURE_TARGET_V, FIXTURE_DRAFT_V, largest_count(scheme, 2))
    chance_D = [rate**accepted * (1 - rate if accepted < 3 else 1) for accepted in range(4)]
    mean = sum(accepted * chance for accepted, chance in enumerate(chance_D))
    variance = sum(accepted**2 * chance for accepted, chance in enumerate(chance_D)) - mean**2
    deviation = (stats.block_tokens - stats.passes * (1 + mean)) / math.sqrt(stats.passes * variance)
    # 4.5 standard deviations: false alarm below 1e-5. A walk that looks further than one node may accept more.
    assert deviation > -4.5
    if configuration.walk == "node":
        assert deviation < 4.5


PENALISED = {("hybrid", "block"), ("rrs-wor", "node"), ("rrs-wor", "traversal"), ("naive", "node")}
"""Penalties come before the scheme: one pair for each way that a walk asks for laws is enough without `slow`."""


@pytest.mark.parametrize(("scheme", "walk", "sampling", "seeds_tried"), [
    pytest.param(scheme, walk, sampling, tried, id=f"{scheme}-{walk}, {label}", marks=pytest.mark.slow if slow else ())
    for scheme, walk in SCHEMES_AND_WALKS
    for label, sampling, tried, slow in [
        ("plain", SamplingParams(), 9, False),
        ("penalties", PENALTIES, 6, (scheme, walk) not in PENALISED),
        ("plain, long", SamplingParams(), 30, True),
        ("penalties, long", PENALTIES, 30, True),
    ]
])  # fmt: skip
def test_a_row_does_not_depend_on_its_neighbours(scheme: str, walk: str, sampling: SamplingParams, seeds_tried: int) -> None:
    # With this identity what holds for one row holds for ragged batches. Some rows end early, and idle along.
    decoder = make_decoder(scheme=scheme, walk=walk, tree=tree_for(scheme), eos_token_ids=[13, 29])
    for first_seed in range(0, seeds_tried, 3):
        seeds = [first_seed, first_seed + 1, first_seed + 2]
        together = decoder.generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=12, seed=seeds)
        alone = [
            decoder.generate(prompt, sampling=sampling, max_new_tokens=12, seed=[seed])
            for prompt, seed in zip(RAGGED_PROMPTS, seeds, strict=True)
        ]
        assert [row.token_ids for row in together] == [row.token_ids for row in alone]
        assert [row.sources for row in together] == [row.sources for row in alone]
        assert [row.stop_reason for row in together] == [row.stop_reason for row in alone]


@pytest.mark.parametrize("drafter", EVERY_DRAFTER)
def test_a_row_does_not_depend_on_its_neighbours_with_any_drafter(drafter: str) -> None:
    decoder = make_decoder(drafter=drafter, scheme="auto")
    together = decoder.generate(RAGGED_PROMPTS, max_new_tokens=20, seed=[1, 2, 3])
    for row, (prompt, seed) in enumerate(zip(RAGGED_PROMPTS, [1, 2, 3], strict=True)):
        assert decoder.generate(prompt, max_new_tokens=20, seed=[seed]).token_ids == together[row].token_ids


def test_a_one_token_neighbour_changes_nothing() -> None:
    decoder = make_decoder()
    together = decoder.generate([[21], RAGGED_PROMPTS[1]], max_new_tokens=12, seed=[1, 2])
    alone = decoder.generate(RAGGED_PROMPTS[1], max_new_tokens=12, seed=[2])
    assert together[1].token_ids == alone.token_ids
