"""Drafting from n-grams in the engine: ends of text, kept memories, privacy, branches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from covering import covering, some_slow
from polydraft.draft import GRAM_DRAFTERS, GramTreeOptions, Parts, RiderOptions, make_drafter
from polydraft.draft.gram_source import GramSource
from polydraft.draft.trie_builder import TrieBuilder
from polydraft.engine import Decoder, StopReason
from polydraft.errors import UsageError
from polydraft.lab.theory import Costs
from polydraft.loading import load
from polydraft.models import TabularModel
from polydraft.ngrams import GramOptions
from polydraft.sampling import NO_TOKEN, RowParams, SamplingParams
from polydraft.trees import parse_tree

from .setups import GRAM_PROMPT, RAGGED_PROMPTS, TARGET, VOCABULARY, gram_options, make_decoder

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[*prompt, *GRAM_PROMPT] for prompt in RAGGED_PROMPTS]
SEEDS = [7, 8, 9]
FED_BY_TEXT = [name for name in GRAM_DRAFTERS if name != "self-draft"]


@pytest.mark.parametrize("drafter", some_slow(["lookup", "self-draft+model"], ["self-draft+model"]))
def test_an_end_token_ends_the_text_wherever_it_falls(drafter: str) -> None:
    whole = make_decoder(drafter=drafter, scheme="auto").generate(PROMPTS, max_new_tokens=24, seed=SEEDS)
    inside = 0
    for end in range(0, VOCABULARY, 3):
        decoder = make_decoder(drafter=drafter, scheme="auto", eos_token_ids=[end])
        for full, short in zip(whole, decoder.generate(PROMPTS, max_new_tokens=24, seed=SEEDS), strict=True):
            ended = end in full.token_ids
            length = full.token_ids.index(end) + 1 if ended else 24
            assert (short.token_ids, short.sources) == (full.token_ids[:length], full.sources[:length])
            assert short.stop_reason == (StopReason.EOS if ended else StopReason.LENGTH)
            inside += ended and full.sources[length - 1] != "target"
    assert inside > 1, "too few ends fell inside a block to prove anything"


@pytest.mark.parametrize(("drafter", "room"), covering(["lookup", "self-draft", "lookup+head"], [1, 2, 5]))
def test_the_context_limit_is_reached_exactly(drafter: str, room: int) -> None:
    table = TARGET.logits_XV.reshape([VOCABULARY] * 4)
    limited = TabularModel(table, max_positions=max(map(len, PROMPTS)) + room)
    whole = make_decoder(drafter=drafter, scheme="auto").generate(PROMPTS, max_new_tokens=30, seed=SEEDS)
    results = make_decoder(drafter=drafter, scheme="auto", target=limited).generate(PROMPTS, max_new_tokens=30, seed=SEEDS)
    for prompt, full, short in zip(PROMPTS, whole, results, strict=True):
        assert short.token_ids == full.token_ids[: limited.max_positions - len(prompt)]


@pytest.mark.parametrize("drafter", FED_BY_TEXT)
def test_a_kept_memory_gives_the_text_of_a_fresh_one(drafter: str) -> None:
    decoder, texts = make_decoder(drafter=drafter, eos_token_ids=[13]), PROMPTS
    for turn in range(4):
        fresh = make_decoder(drafter=drafter, eos_token_ids=[13]).generate(texts, max_new_tokens=9, seed=[turn] * 3)
        stream = decoder.stream(texts, max_new_tokens=9, seed=[turn] * 3, keep=True)
        list(stream)
        assert [row.token_ids for row in stream.results()] == [row.token_ids for row in fresh]
        # The next turn adds tokens, and every other time takes some back first.
        texts = [text + row.token_ids[: -1 - turn % 2] + [5, turn] for text, row in zip(texts, fresh, strict=True)]


def test_branches_of_a_conversation_are_forgotten_with_it() -> None:
    decoder = make_decoder(drafter="self-draft")
    decoder.generate(PROMPTS, max_new_tokens=30, seed=1, keep=True)
    others = [[30, 29, 28], [1, 2, 3, 1, 2], [9, 9, 8]]
    kept = decoder.generate(others, max_new_tokens=30, seed=2, keep=True)
    fresh = make_decoder(drafter="self-draft").generate(others, max_new_tokens=30, seed=2)
    assert [(row.token_ids, row.sources) for row in kept] == [(row.token_ids, row.sources) for row in fresh]


def proposals(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Note the tokens that each row of each round was offered."""
    seen: list[list[list[int]]] = []
    original = TrieBuilder.build

    def noting(builder: TrieBuilder, *arguments: Any) -> Any:
        tree = original(builder, *arguments)
        seen.append([trie.tokens[1:] for trie in builder._tries])
        return tree

    monkeypatch.setattr(TrieBuilder, "build", noting)
    return seen


@pytest.mark.parametrize("drafter", [name for name in FED_BY_TEXT if name != "corpus"])  # a corpus is meant for all
def test_texts_are_never_offered_to_other_rows_or_requests(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    # Two models' worth of tokens in one: each half never leads to the other, so a token of the other half has leaked.
    table_VV = TabularModel.random(VOCABULARY, 1, seed=3).logits_XV.clone()
    half = VOCABULARY // 2
    table_VV[:half, half:] = table_VV[half:, :half] = -1e9
    seen = proposals(monkeypatch)
    decoder = Decoder(TabularModel(table_VV), make_drafter(_parts(drafter), drafter))
    decoder.generate([[1, 2, 1, 2], [17, 18, 17, 18]], max_new_tokens=40, seed=1, keep=True)
    first = len(seen)
    decoder.generate([[17, 18, 17], [1, 2, 1, 2]], max_new_tokens=40, seed=1, keep=True)
    for row in seen[:first]:
        assert max(row[0], default=0) < half <= min(row[1], default=half)
    for row in seen[first:]:
        assert max(row[1], default=0) < half <= min(row[0], default=half)
    assert first > 10 and any(tokens for row in seen for tokens in row)


def _parts(drafter: str, **options: Any) -> Parts:
    grams = GramTreeOptions(**options) if options else gram_options()
    return Parts(topology=parse_tree("none"), grams=grams)


@pytest.mark.parametrize("seeds", ["vocabulary", "prompt"])
def test_branches_are_what_the_paper_says(monkeypatch: pytest.MonkeyPatch, seeds: str) -> None:
    notes: list[tuple[list[list[int]], Sequence[Sequence[int]]]] = []
    original = GramSource.receive

    def noting(source: GramSource, reports: Sequence[Sequence[int]]) -> None:
        notes.append(([list(row.read) for row in source.rows], reports))
        original(source, reports)

    monkeypatch.setattr(GramSource, "receive", noting)
    riders = RiderOptions(branches=4, length=3, seeds=seeds)
    parts = _parts("self-draft", riders=riders, caches=GramOptions(corpus="none"))
    decoder = Decoder(TARGET, make_drafter(parts, "self-draft"))
    decoder.generate(PROMPTS, max_new_tokens=25, seed=5)
    branches: list[list[list[int]]] = []
    for number, (texts, reports) in enumerate(notes):
        length = min(number + 1, 3)
        for row, (text, report) in enumerate(zip(texts, reports, strict=True)):
            lines = [report[start : start + length] for start in range(0, len(report) - 1, 3)]
            tokens, drafts = lines[::2], lines[1::2]
            assert len(tokens) == len(drafts) == 4 and report[-1] == length
            for branch, drafted in zip(tokens, drafts, strict=True):
                # A branch token sees the text and its own branch, nothing of the trie and of other branches.
                assert drafted == [int(TARGET.logits_after([*text, *branch[: stop + 1]]).argmax()) for stop in range(length)]
            if number == 0:
                assert seeds == "vocabulary" or all(branch[0] in PROMPTS[row] for branch in tokens)
                branches.append([])
            else:
                assert tokens == branches[row]
            grown = [[*branch, drafted[-1]] for branch, drafted in zip(tokens, drafts, strict=True)]
            branches[row] = [branch[-3:] for branch in grown]
    assert len(notes) > 4


def test_branches_feed_the_context_cache() -> None:
    decoder = make_decoder(drafter="self-draft")
    session = decoder.drafter.start(RowParams((GREEDY,)), TARGET)
    session.begin([[30, 21]], 50, [0], RowParams((GREEDY,)))
    source = session._certain.source
    assert isinstance(source, GramSource)
    assert source.rows[0].memories[0].matches(4, 4) == []
    # Three branches of four tokens, and the drafts after each; then of three.
    source.receive([[21, 5, 6, 7, 5, 6, 7, 8, *[1] * 16, 4]])
    source.receive([[*[21, 5, 6, NO_TOKEN, 5, 6, 7, 9] * 3, 3]])
    assert [5, 6, 7] in [list(match.tokens[:3]) for match in source.rows[0].memories[0].matches(4, 4)]


def test_first_tokens_come_from_the_rows_own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts: list[list[int]] = []
    original = GramSource.receive

    def noting(source: GramSource, reports: Sequence[Sequence[int]]) -> None:
        if reports[0][-1] == 1:
            firsts.extend(list(report[:-1:4]) for report in reports)
        original(source, reports)

    monkeypatch.setattr(GramSource, "receive", noting)
    parts = _parts(
        "self-draft", riders=RiderOptions(branches=4, length=2, seeds="vocabulary"), caches=GramOptions(corpus="none")
    )
    decoder = Decoder(TARGET, make_drafter(parts, "self-draft"))
    decoder.generate(PROMPTS, max_new_tokens=1, seed=SEEDS)
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        decoder.generate(prompt, max_new_tokens=1, seed=seed)
    assert firsts[:3] == firsts[3:]
    assert firsts[0] != firsts[1]


@pytest.mark.parametrize("drafter", ["lookup", "self-draft"])
def test_rounds_without_candidates_are_plain_passes(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    sizes = []
    original = TrieBuilder.attached

    def noting(builder: TrieBuilder, *arguments: Any) -> Any:
        tree = original(builder, *arguments)
        sizes.append(tree.tokens_BN.shape[1])
        return tree

    monkeypatch.setattr(TrieBuilder, "attached", noting)
    parts = _parts(drafter, riders=RiderOptions(branches=2, length=3), caches=GramOptions(corpus="none"))
    Decoder(TARGET, make_drafter(parts, drafter)).generate([1, 2, 3], max_new_tokens=1, seed=1)
    assert sizes == [1 if drafter == "lookup" else 1 + 2 * 3]


@pytest.mark.parametrize(("options", "message"), [
    ({"nodes": 0}, "nodes=0"),
    ({"depth": 0}, "depth=0"),
    ({"nodes": 2000}, "too many for one pass"),
    ({"context": False, "corpus": False}, "no cache left"),
])  # fmt: skip
def test_wrong_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_drafter(_parts("self-draft", **options), "self-draft")


def test_branches_that_overflow_the_context_are_refused() -> None:
    with pytest.raises(UsageError, match=r"branches=-1"):
        RiderOptions(branches=-1)
    with pytest.raises(UsageError, match=r"branch_length=0"):
        RiderOptions(length=0)
    with pytest.raises(UsageError, match="too many for one pass"):
        RiderOptions(branches=64, length=16)
    small = TabularModel(TARGET.logits_XV.reshape([VOCABULARY] * 4), max_positions=8)
    parts = _parts("self-draft", riders=RiderOptions(branches=2, length=8), caches=GramOptions(corpus="none"))
    with pytest.raises(UsageError, match="does not fit the model's context of 8"):
        Decoder(small, make_drafter(parts, "self-draft")).generate([1, 2], max_new_tokens=2)


def test_sizes_follow_the_device() -> None:
    options = GramTreeOptions()
    on_cpu, elsewhere = options.on(torch.device("cpu")), options.on(torch.device("meta"))
    assert on_cpu.nodes + on_cpu.riders.most == 20
    assert (elsewhere.riders.branches, elsewhere.riders.length) == (6, 6)
    assert GramTreeOptions(nodes=3).on(torch.device("cpu")).depth == 3


@pytest.mark.parametrize("drafter", some_slow(["lookup", "self-draft"], ["self-draft"]))
def test_a_stop_string_inside_a_block_ends_the_text_there(roomy: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where drafting costs nothing it never rests; what it costs here depends on the machine.
    free = Costs(draft_level=0.0, tree_pass=lambda nodes: 1.0)
    monkeypatch.setattr("polydraft.draft.grams.measured_costs", lambda *arguments, **options: free)
    # A penalty that rewards makes a model of random weights repeat its prompt. Self-Draft has no candidates before
    # some passes have filled its cache, so some stops must fall late: four characters, not all of which occur early.
    options: Any = {"sampling": SamplingParams(temperature=0, repetition_penalty=0.05), "max_new_tokens": 30}
    plain, drafted = load(roomy, "none", dtype="float32"), load(roomy, drafter=drafter, dtype="float32")
    whole = plain.generate("ab cd ab cd ab cd", **options)
    text, inside = "ab cd ab cd ab cd", 0
    for place in range(2, 26, 3):
        stop = whole.text[place : place + 4]
        expected = plain.generate(text, stop=stop, **options)
        result = drafted.generate(text, stop=stop, keep=True, **options)
        assert (result.text, result.token_ids, result.stop_reason) == (expected.text, expected.token_ids, expected.stop_reason)
        inside += result.stop_reason == StopReason.STOP and result.sources[-1] != "target"
    assert drafted.generate(text, keep=True, **options).token_ids == whole.token_ids
    assert inside > 0
