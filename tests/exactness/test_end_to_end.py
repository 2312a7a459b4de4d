"""Layer 3: whole texts of the engine follow the target's exact distribution, whatever drafts, verifies or samples."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from covering import chosen, some_slow
from polydraft.draft import GRAM_DRAFTERS
from polydraft.sampling import SamplingParams
from polydraft.verify import SCHEMES, WALKS

from .checks import FIXTURE_DRAFT_V, FIXTURE_TARGET_V, enumerated_acceptance, largest_count
from .configurations import (
    CONFIGURATIONS,
    FIXTURE_CONFIGURATIONS,
    SCHEMES_AND_WALKS,
    THRESHOLD,
    TREE_DRAFTERS,
    Configuration,
    CopyConfiguration,
    ShippedConfiguration,
)
from .setups import ADMITTED, COMBINATIONS, EVERY_DRAFTER, PENALTIES, RAGGED_PROMPTS, make_decoder, tree_for

pytestmark = pytest.mark.usefixtures("short_blocks")


QUICK_PAIRS = chosen(SCHEMES_AND_WALKS)
"""Every scheme with one of its walks, and these by turns: what is registered, and how trees are verified, meet in `slow`."""
SLOW = {f"{scheme} {walk}" for scheme, walk in SCHEMES_AND_WALKS} - {"rrs-wor node"}
"""Errors of a scheme or a walk are largest, and looked for, in the fixture's texts below; here is what all drafters use."""
SLOW |= {"top-k", "top-p", "min-p, temperature", "all truncations", "logit bias"}
"""Each of them has a distribution of its own in `test_mixed_rows`, by default."""
SLOW |= {"flat draft", "sharp draft"}
"""A greedy draft shows what others do: that the distribution which was drawn from is the one that is verified."""
SLOW |= {"sparse", "one-token prompt"}
"""Tries of n-grams and dynamic trees are sparse; texts of one token have their greedy tests."""
SLOW |= {one.label for one in CONFIGURATIONS if isinstance(one, ShippedConfiguration)} - {"shipped layer", "shipped assistant"}
ONCE = set(chosen(list(product(TREE_DRAFTERS, ("", ", truncated")))))
SLOW |= {f"drafter {name}{how}" for name, how in product(TREE_DRAFTERS, ("", ", truncated")) if (name, how) not in ONCE}
SLOW |= {"drafter model, truncated", "drafter self-draft+model, truncated"}
"""Drafters are by turns truncated and not, but for what most configurations draft by."""
SLOW |= {one.label for one in CONFIGURATIONS if isinstance(one, CopyConfiguration)} - {"copy"}
"""Of a copy it matters what it leaves behind, however it is asked."""
UNIONS = ["lookup+model", "prediction", "prediction+suffix+dynamic-head", "suffix+head@peagle"]
SLOW |= {f"drafter {name}" for name in COMBINATIONS if name not in UNIONS}
"""Whatever stands beside n-grams or a prediction does so once; the other unions join parts that are tested here too."""


def quick_or_slow(configurations: list[Configuration], slow: set[str]) -> list[Any]:
    return [pytest.param(one, id=one.label, marks=pytest.mark.slow if one.label in slow else ()) for one in configurations]


SLOW_FIXTURE = {f"fixture {scheme} {walk}" for scheme, walk in set(SCHEMES_AND_WALKS).difference(QUICK_PAIRS)}


def test_nothing_that_is_registered_is_left_to_the_slow_tests() -> None:
    fixture = [one for one in FIXTURE_CONFIGURATIONS if one.label not in SLOW_FIXTURE]
    assert {one.scheme for one in fixture} == set(SCHEMES) and {one.walk for one in fixture} == set(WALKS)
    quick = {one.drafter for one in CONFIGURATIONS if one.label not in SLOW}
    assert quick >= {*EVERY_DRAFTER} - {*COMBINATIONS}
    parts = [{part for name in names for part in name.split("+")} for names in (COMBINATIONS, quick)]
    assert parts[0] <= parts[1], "each part of a union is drawn from, by itself or in another one"
    assert any(isinstance(one, CopyConfiguration) for one in CONFIGURATIONS if one.label not in SLOW)


@pytest.mark.parametrize("configuration", quick_or_slow(CONFIGURATIONS, SLOW))
def test_texts_follow_the_target_distribution(configuration: Configuration) -> None:
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


@pytest.mark.parametrize("configuration", quick_or_slow(FIXTURE_CONFIGURATIONS, SLOW_FIXTURE))
def test_texts_follow_the_target_distribution_where_errors_would_be_largest(configuration: Configuration) -> None:
    results = configuration.generate()
    assert min(configuration.p_values(results)) > THRESHOLD
    # All nodes have the same distributions, so acceptance is known too: code that is exact for a wrong reason shows here.
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


@pytest.mark.slow
@pytest.mark.parametrize("configuration", [*CONFIGURATIONS, *FIXTURE_CONFIGURATIONS], ids=lambda one: one.label)
def test_many_more_texts_follow_the_target_distribution(configuration: Configuration) -> None:
    more = replace(configuration, label=f"{configuration.label}, more", samples=2 * configuration.samples)
    assert min(more.p_values(more.generate())) > THRESHOLD


PENALISED = {(scheme, walk) for walk, scheme in {walk: scheme for scheme, walk in reversed(QUICK_PAIRS)}.items()}
"""One pair for each way that a walk asks for distributions: rows of every scheme by itself are tried in `test_enumeration`."""


@pytest.mark.parametrize(("scheme", "walk", "sampling", "seeds_tried"), [
    pytest.param(scheme, walk, sampling, tried, id=f"{scheme}-{walk}, {label}", marks=pytest.mark.slow if slow else ())
    for scheme, walk in SCHEMES_AND_WALKS
    for label, sampling, tried, slow in [
        ("plain", SamplingParams(), 9, True),
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


# Rows of the others come and go by default, in `test_admission`, those of a union with a draft among them.
@pytest.mark.parametrize("drafter", some_slow(EVERY_DRAFTER, [*ADMITTED, *COMBINATIONS[:2], COMBINATIONS[3]]))
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
