"""Ends of text inside a block, limits, streams and cancellation: what comes out is always the beginning of one text."""

import contextlib
import threading
from typing import Any

import pytest
import torch

from covering import some_slow
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, StopReason
from polydraft.errors import FailureError, UsageError
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree
from polydraft.verify import SCHEMES

from .setups import PROMPT, RAGGED_PROMPTS, TARGET, VOCABULARY, make_decoder, tree_for

SEEDS = [7, 8, 9]


def test_same_seed_same_text_and_other_seed_other_text() -> None:
    decoder = make_decoder()
    first, again, other = (
        [row.token_ids for row in decoder.generate(RAGGED_PROMPTS, max_new_tokens=20, seed=seed)] for seed in (4, 4, 5)
    )
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_rows_of_one_seed_differ() -> None:
    results = make_decoder().generate([PROMPT] * 20, max_new_tokens=12, seed=0)
    assert len({tuple(result.token_ids) for result in results}) == 20


def test_a_reported_seed_reproduces_the_text() -> None:
    decoder = make_decoder()
    results = decoder.generate(RAGGED_PROMPTS, max_new_tokens=15)
    again = decoder.generate(RAGGED_PROMPTS, max_new_tokens=15, seed=results[0].settings["seeds"][0])
    assert [row.token_ids for row in again] == [row.token_ids for row in results]


def test_a_reported_seed_reproduces_its_row_alone() -> None:
    decoder = make_decoder()
    results = decoder.generate(RAGGED_PROMPTS, max_new_tokens=15, seed=3)
    seeds = results[0].settings["seeds"]
    for prompt, seed, row in zip(RAGGED_PROMPTS, seeds, results, strict=True):
        assert decoder.generate(prompt, max_new_tokens=15, seed=seed).token_ids == row.token_ids


@pytest.mark.parametrize("tree", some_slow(["3x2x1", "chain:4"], ["chain:4"]))
def test_an_end_token_ends_the_text_wherever_it_falls(tree: str) -> None:
    whole = make_decoder(tree=tree).generate(RAGGED_PROMPTS, max_new_tokens=24, seed=SEEDS)
    inside = 0
    for end in range(0, VOCABULARY, 2):
        cut = make_decoder(tree=tree, eos_token_ids=[end]).generate(RAGGED_PROMPTS, max_new_tokens=24, seed=SEEDS)
        for full, short in zip(whole, cut, strict=True):
            ended = end in full.token_ids
            length = full.token_ids.index(end) + 1 if ended else 24
            assert short.token_ids == full.token_ids[:length]
            assert short.sources == full.sources[:length]
            assert short.stop_reason == (StopReason.EOS if ended else StopReason.LENGTH)
            inside += ended and full.sources[length - 1] != "target"
    assert inside > 3, "too few ends fell inside a block to prove anything"


@pytest.mark.parametrize("limit", some_slow(range(1, 12), range(6, 11)))  # a block has four tokens at most
def test_max_new_tokens_is_exact(limit: int) -> None:
    decoder = make_decoder()
    whole = decoder.generate(RAGGED_PROMPTS, max_new_tokens=12, seed=SEEDS)
    results = decoder.generate(RAGGED_PROMPTS, max_new_tokens=limit, seed=SEEDS)
    assert [row.token_ids for row in results] == [row.token_ids[:limit] for row in whole]
    assert {row.stop_reason for row in results} == {StopReason.LENGTH}
    assert results[0].stats.new_tokens == 3 * limit


@pytest.mark.parametrize("positions", some_slow(range(9, 16), range(13, 16)))
def test_the_context_limit_is_reached_exactly(positions: int) -> None:
    whole = make_decoder().generate(RAGGED_PROMPTS, max_new_tokens=20, seed=SEEDS)
    table = TARGET.logits_XV.reshape([VOCABULARY] * 4)
    limited = make_decoder(target=TabularModel(table, max_positions=positions))
    results = limited.generate(RAGGED_PROMPTS, max_new_tokens=20, seed=SEEDS)
    for prompt, full, short in zip(RAGGED_PROMPTS, whole, results, strict=True):
        assert short.token_ids == full.token_ids[: positions - len(prompt)]
        assert short.stop_reason == StopReason.CONTEXT


def test_a_one_token_prompt_works_alone_and_in_a_batch() -> None:
    decoder = make_decoder()
    assert len(decoder.generate([21], max_new_tokens=1, seed=0).token_ids) == 1
    assert [len(row.token_ids) for row in decoder.generate([[21], PROMPT, [0]], max_new_tokens=9, seed=0)] == [9, 9, 9]


def test_sources_tell_drafted_tokens_from_the_targets() -> None:
    decoder = make_decoder()
    results = decoder.generate([PROMPT] * 30, max_new_tokens=15, seed=2)
    sources = [source for result in results for source in result.sources]
    assert set(sources) == {"target", decoder.drafter.name}
    assert all(len(result.sources) == len(result.token_ids) for result in results)
    assert sources.count(decoder.drafter.name) == results[0].stats.drafted_tokens
    assert set(make_decoder(drafter="none").generate(PROMPT, max_new_tokens=15, seed=2).sources) == {"target"}


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0)], ids=["sampled", "greedy"])
def test_stream_gives_what_generate_gives(sampling: SamplingParams) -> None:
    decoder = make_decoder(eos_token_ids=[13, 29])
    results = decoder.generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=20, seed=SEEDS)
    stream = decoder.stream(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=20, seed=SEEDS)
    events = list(stream)
    for row, result in enumerate(results):
        mine = [event for event in events if event.row == row]
        assert [event.token_id for event in mine] == result.token_ids
        assert [event.source for event in mine] == result.sources
        assert [event.stop_reason for event in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].stop_reason == result.stop_reason
    assert [row.token_ids for row in stream.results()] == [row.token_ids for row in results]


@pytest.mark.parametrize("seen", [0, 1, 5, 11])
def test_cancelling_leaves_the_beginning_of_the_text(seen: int) -> None:
    decoder = make_decoder()
    whole = decoder.generate(RAGGED_PROMPTS, max_new_tokens=40, seed=SEEDS)
    cancel = threading.Event()
    stream = decoder.stream(RAGGED_PROMPTS, max_new_tokens=40, seed=SEEDS, cancel=cancel)
    events = [next(stream) for _ in range(seen)]
    cancel.set()
    events += list(stream)
    for row, (full, short) in enumerate(zip(whole, stream.results(), strict=True)):
        assert short.stop_reason == StopReason.CANCELLED
        assert short.token_ids == full.token_ids[: len(short.token_ids)]
        assert short.token_ids == [event.token_id for event in events if event.row == row]
        assert len(short.token_ids) < 40


@pytest.mark.parametrize("prompts", [[PROMPT], RAGGED_PROMPTS], ids=["single", "ragged"])
def test_a_kept_memory_gives_the_text_of_a_fresh_one(prompts: list[list[int]]) -> None:
    decoder = make_decoder(eos_token_ids=[13])
    texts = prompts
    for turn in range(4):
        fresh = make_decoder(eos_token_ids=[13]).generate(texts, max_new_tokens=9, seed=[turn] * len(texts))
        stream = decoder.stream(texts, max_new_tokens=9, seed=[turn] * len(texts), keep=True)
        list(stream)
        assert [row.token_ids for row in stream.results()] == [row.token_ids for row in fresh]
        # The next turn adds tokens, and every other time takes some back first.
        texts = [text + row.token_ids[: -1 - turn % 2] + [5, turn] for text, row in zip(texts, fresh, strict=True)]


def test_a_kept_memory_takes_texts_that_share_nothing_with_it() -> None:
    # One row keeps nearly all of its text while the other starts again with a long one.
    decoder = make_decoder()
    long_text = [token % VOCABULARY for token in range(0, 120, 3)]
    first = [long_text, [31, 31, 31]]
    list(decoder.stream(first, max_new_tokens=4, seed=[1, 2], keep=True))
    second = [[*long_text, 7], [30, *long_text]]
    stream = decoder.stream(second, max_new_tokens=4, seed=[1, 2], keep=True)
    list(stream)
    fresh = make_decoder().generate(second, max_new_tokens=4, seed=[1, 2])
    assert [row.token_ids for row in stream.results()] == [row.token_ids for row in fresh]


def test_a_stream_whose_kept_memory_was_taken_over_says_so() -> None:
    decoder = make_decoder()
    first = decoder.stream(PROMPT, max_new_tokens=30, seed=1, keep=True)
    begun = next(first)
    second = decoder.stream([5, 4, 3], max_new_tokens=9, seed=2, keep=True)
    with pytest.raises(UsageError, match="taken over"):
        list(first)
    first.close()
    list(second)
    assert first.results()[0].token_ids[0] == begun.token_id
    assert second.results()[0].token_ids == make_decoder().generate([5, 4, 3], max_new_tokens=9, seed=2).token_ids


def test_token_ids_may_come_as_an_array() -> None:
    decoder = make_decoder()
    expected = decoder.generate(PROMPT, max_new_tokens=5, seed=1).token_ids
    assert decoder.generate(torch.tensor(PROMPT), max_new_tokens=5, seed=1).token_ids == expected
    assert decoder.generate(torch.tensor(PROMPT).numpy(), max_new_tokens=5, seed=1).token_ids == expected


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": 0.5}, "sampling=SamplingParams(temperature=...)"),
    ({"max_tokens": 5}, "did you mean 'max_new_tokens'"),
    ({"seed": 1.5}, "seed=1.5"),
    ({"stop": [3]}, "stop=[3]"),
    ({"stop": 3}, "stop=3"),
])  # fmt: skip
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_decoder().generate(PROMPT, **options)
    assert message in str(caught.value)


def test_a_draft_that_is_not_a_number_never_gets_into_the_text() -> None:
    # Whether it is an error or only useless, the text must hold tokens.
    broken = TabularModel(torch.full([VOCABULARY] * 4, torch.nan))
    for scheme in SCHEMES:
        with contextlib.suppress(FailureError):
            results = make_decoder(scheme=scheme, tree=tree_for(scheme), draft=broken).generate(
                PROMPT, max_new_tokens=9, seed=1
            )
            assert min(results.token_ids) >= 0


def test_nodes_wider_than_the_default_scheme_takes_get_another() -> None:
    target = TabularModel.random(80, 1, seed=0)
    decoder = Decoder(target, TreeDrafter(target, parse_tree("70")))
    result = decoder.generate([1, 2], max_new_tokens=4, seed=0)
    assert result.settings["scheme"] == "rrs-wor"
    assert len(result.token_ids) == 4


@pytest.mark.parametrize("drafter", ["head", "dynamic-head", "lookup+head"])
def test_a_draft_that_knows_none_of_the_tokens_left_drafts_nothing(drafter: str) -> None:
    # The head knows three quarters of the tokens; without them, plain decoding goes on with the others.
    known = [token for token in range(VOCABULARY) if token % 4 != 1]
    sampling = SamplingParams(logit_bias=dict.fromkeys(known, float("-inf")))
    result = make_decoder(drafter=drafter, scheme="auto", walk="auto").generate(
        PROMPT, sampling=sampling, max_new_tokens=8, seed=1
    )
    assert len(result.token_ids) == 8 and not set(result.token_ids) & set(known)
