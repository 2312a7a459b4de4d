"""Rounds launched before the last one's outcome is known: the same texts, ends and figures, shown without a GPU."""

import dataclasses
import threading
from contextlib import suppress
from typing import Any

import pytest

import polydraft.models.language_model as language_model
from covering import covering, some_slow
from polydraft.draft.predicted import with_prediction
from polydraft.engine import Decoder, Generation, StopReason
from polydraft.engine.graphs import Launched
from polydraft.engine.workspace import Workspace
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams
from stand_in import StandIn, round_graphs

from .setups import CHEAP, COMBINATIONS, EVERY_DRAFTER, PENALTIES, PROMPT, RAGGED_PROMPTS, TARGET, VOCABULARY, make_decoder

RUNS_AHEAD = ["none", "model", "head", "head@peagle", "head@dflash"]
SEEDS = [7, 8, 9]
TREE = "2x1"

pytestmark = pytest.mark.usefixtures("replaying")
ahead_drafters = pytest.mark.parametrize("drafter", some_slow(RUNS_AHEAD, ["head@peagle"]))  # here as `head` is
with_some_temperature = pytest.mark.parametrize(("drafter", "temperature"), covering(RUNS_AHEAD, [0.0, 1.0]))


class Letters:
    """A tokenizer of a character a token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Let all workspaces have such a graphs; return those made."""
    made: list[StandIn] = []
    original = Workspace.__init__

    def with_graphs(workspace: Workspace, *arguments: Any) -> None:
        original(workspace, *arguments)
        workspace.launcher.graphs = round_graphs(workspace)
        made.append(workspace.launcher.graphs)

    monkeypatch.setattr(Workspace, "__init__", with_graphs)
    return made


def decoders(drafter: str, **options: Any) -> tuple[Decoder, Decoder]:
    """Return two decoders that differ only in that the first one's rounds run ahead."""
    pair = make_decoder(drafter=drafter, tree=TREE, **options), make_decoder(drafter=drafter, tree=TREE, **options)
    for decoder, ahead in zip(pair, (True, False), strict=True):
        decoder.ahead, decoder.tokenizer = ahead, Letters()
    return pair


def assert_same(results: list[Generation], expected: list[Generation]) -> None:
    for one, other in zip(results, expected, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.sources, one.stop_reason) == (other.sources, other.stop_reason)
    figures, others = (
        {name: value for name, value in dataclasses.asdict(some[0].stats).items() if "seconds" not in name}
        for some in (results, expected)
    )
    assert others.pop("rounds_ahead") == 0
    figures.pop("rounds_ahead")
    assert figures == others


def assert_in_step(decoder: Decoder) -> None:
    """What the host believes of the memories of ended texts is true on the device."""
    for _, workspace in [*decoder._spare, *([decoder._kept] if decoder._kept else [])]:
        for context in workspace.contexts:
            assert context.lengths_B.tolist() == context.lengths


@pytest.mark.parametrize(("drafter", "temperature", "limit", "rows"), covering(RUNS_AHEAD, [0.0, 1.0], [5, 20], [1, 3]))
def test_limits(replaying: list[StandIn], drafter: str, temperature: float, limit: int, rows: int) -> None:
    sampling, prompts = SamplingParams(temperature=temperature), [PROMPT] if rows == 1 else RAGGED_PROMPTS
    pair = decoders(drafter)
    for _ in range(2):
        results, expected = (
            one.generate(prompts, sampling=sampling, max_new_tokens=limit, seed=SEEDS[: len(prompts)]) for one in pair
        )
        assert_same(results, expected)
    assert len(replaying) == 2
    assert len(replaying[0].kinds) == len(replaying[1].kinds), "a round has run in vain before a limit"
    if limit == 20:
        assert results[0].stats.rounds_ahead > results[0].stats.rounds / 2
    assert_in_step(pair[0])


@pytest.mark.parametrize(
    ("drafter", "temperature", "row", "place"), covering(RUNS_AHEAD, [0.0, 1.0], [(0, 3), (1, 6), (2, 11)])
)
def test_ends(replaying: list[StandIn], drafter: str, temperature: float, row: int, place: int) -> None:
    """A token, then a string, that comes first at some place of one row ends it there, and the others where they have it."""
    options = {"sampling": SamplingParams(temperature=temperature), "max_new_tokens": 16, "seed": SEEDS}
    whole = make_decoder(drafter=drafter, tree=TREE).generate(RAGGED_PROMPTS, **options)[row].token_ids
    place = max(at for at in range(place + 1) if whole[at] not in whole[:at])
    for reason in (StopReason.EOS, StopReason.STOP):
        pair = decoders(drafter, eos_token_ids=[whole[place]] if reason is StopReason.EOS else [])
        stop = Letters().decode([whole[place]], True) if reason is StopReason.STOP else ()
        results, expected = (one.generate(RAGGED_PROMPTS, stop=stop, **options) for one in pair)
        assert_same(results, expected)
        assert_in_step(pair[0])
        assert results[row].stop_reason is reason and len(results[row].token_ids) == place + 1
        assert results[0].stats.rounds_ahead > 0


@pytest.mark.parametrize("drafter", some_slow(["model", "head"], ["head"]))
def test_the_host_knows_how_much_the_memories_hold(drafter: str) -> None:
    """Above all of a row that ended on the second token of a round, and idles: it had more to read than others."""
    whole = make_decoder(drafter=drafter, tree=TREE).generate(RAGGED_PROMPTS, max_new_tokens=30, seed=SEEDS)
    ends = {
        row.token_ids[place]
        for row in whole
        for place in range(1, 25)
        if row.sources[place - 1] != "target" and row.token_ids[place] not in row.token_ids[:place]
    }
    assert ends, "no draft was accepted: nothing is proven"
    for end in sorted(ends)[:3]:
        for decoder in decoders(drafter, eos_token_ids=[end]):
            run = decoder.stream(RAGGED_PROMPTS, max_new_tokens=30, seed=SEEDS).engine
            while not run.done:
                run.step()
                for context in run.workspace.contexts if not run._launched else ():
                    assert context.lengths_B.tolist() == context.lengths


@with_some_temperature
def test_a_round_that_runs_in_vain_leaves_no_trace(replaying: list[StandIn], drafter: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    whole = make_decoder(drafter=drafter, tree=TREE).generate(PROMPT, sampling=sampling, max_new_tokens=16, seed=5).token_ids
    place = max(at for at in range(9) if whole[at] not in whole[:at])
    pair = decoders(drafter, eos_token_ids=[whole[place]])
    for _ in range(2):
        results, expected = ([one.generate(PROMPT, sampling=sampling, max_new_tokens=60, seed=5)] for one in pair)
        assert_same(results, expected)
        assert_in_step(pair[0])
        assert results[0].token_ids == whole[: place + 1]
    assert len(replaying[-2].kinds) > len(replaying[-1].kinds), "no round ran in vain: nothing is proven"


@pytest.mark.parametrize(("drafter", "temperature", "positions"), covering(RUNS_AHEAD, [0.0, 1.0], [12, 17]))
def test_the_context_limit(drafter: str, temperature: float, positions: int) -> None:
    target = TabularModel(TARGET.logits_XV.reshape([VOCABULARY] * 4), max_positions=positions)
    pair = decoders(drafter, target=target)
    sampling = SamplingParams(temperature=temperature)
    results, expected = (one.generate(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=40, seed=SEEDS) for one in pair)
    assert_same(results, expected)
    assert {result.stop_reason for result in results} == {StopReason.CONTEXT}


@pytest.mark.parametrize(("drafter", "temperature", "seen"), covering(RUNS_AHEAD, [0.0, 1.0], [1, 20]))
def test_cancellation(drafter: str, temperature: float, seen: int) -> None:
    pair, found = decoders(drafter), []
    for decoder in pair:
        cancel = threading.Event()
        sampling = SamplingParams(temperature=temperature)
        stream = decoder.stream(RAGGED_PROMPTS, sampling=sampling, max_new_tokens=40, seed=SEEDS, cancel=cancel)
        for _ in range(seen):
            next(stream)
        cancel.set()
        list(stream)
        found.append(stream.results())
    assert_same(*found)
    assert {result.stop_reason for result in found[0]} == {StopReason.CANCELLED}
    assert_in_step(pair[0])


@pytest.mark.parametrize(("drafter", "cut"), covering(RUNS_AHEAD, [0, 6]))
def test_a_row_that_is_ended_and_cut_from_outside(drafter: str, cut: int) -> None:
    """As `model.generate` does: a row's end is found when further rounds have been."""
    pair, found = decoders(drafter), []
    for decoder in pair:
        stream = decoder.stream(RAGGED_PROMPTS, max_new_tokens=24, seed=SEEDS)
        run = stream.engine
        for _ in range(6):
            run.step()
        run.end(run.slots[1], StopReason.STOP, cut)
        run.step()
        run.end(run.slots[1], StopReason.STOP, cut // 2)
        while not run.done:
            run.step()
        found.append(stream.results())
    assert found[0][0].stats.rounds_ahead > 0
    assert_same(*found)
    assert_in_step(pair[0])


@pytest.mark.parametrize(("drafter", "temperature", "prompts"), covering(RUNS_AHEAD, [0.0, 1.0], [RAGGED_PROMPTS, [PROMPT]]))
def test_a_kept_memory(drafter: str, temperature: float, prompts: list[list[int]]) -> None:
    pair, texts = decoders(drafter, eos_token_ids=[13, 21]), prompts
    sampling, ahead = SamplingParams(temperature=temperature), 0
    for turn in range(4):
        options = {"sampling": sampling, "max_new_tokens": 12, "seed": [turn + row for row in range(len(texts))], "keep": True}
        streams = [one.stream(texts, **options) for one in pair]
        for stream in streams:
            for _ in range(7 if turn % 2 else 1000):  # every other turn is left in the middle
                next(stream, None)
        results, expected = (stream.results() for stream in streams)
        ahead += results[0].stats.rounds_ahead
        assert [row.token_ids for row in results] == [row.token_ids for row in expected]
        kept = [len(row.token_ids) - turn % 2 for row in results]
        texts = [text + row.token_ids[:length] + [5, turn] for text, row, length in zip(texts, results, kept, strict=True)]
    assert ahead > 0
    fresh = make_decoder(drafter=drafter, tree=TREE, eos_token_ids=[13, 21]).generate(
        texts, sampling=sampling, max_new_tokens=9, seed=1
    )
    kept_on = pair[0].generate(texts, sampling=sampling, max_new_tokens=9, seed=1, keep=True)
    assert [row.token_ids for row in kept_on] == [row.token_ids for row in fresh]


@ahead_drafters
def test_a_stream_gives_every_round_by_itself(drafter: str) -> None:
    pair = decoders(drafter, eos_token_ids=[13])
    events, expected = (list(one.stream(RAGGED_PROMPTS, max_new_tokens=25, seed=SEEDS)) for one in pair)
    assert events == expected


@ahead_drafters
def test_an_interruption_while_waiting_loses_no_round(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, behind = decoders(drafter)
    (expected,) = behind.generate([PROMPT], max_new_tokens=30, seed=3)
    run = ahead.stream([PROMPT], max_new_tokens=30, seed=3).engine
    interrupted, wait = [], Launched.wait

    def wait_or_not(launched: Launched) -> Any:
        if len(interrupted) < 3 and len(run.slots[0].tokens) > len(PROMPT) + 6 * (len(interrupted) + 1):
            interrupted.append(launched)
            raise KeyboardInterrupt
        return wait(launched)

    monkeypatch.setattr(Launched, "wait", wait_or_not)
    while not run.done:
        with suppress(KeyboardInterrupt):
            run.step()
    assert len(interrupted) == 3 and run.slots[0].new_tokens == expected.token_ids
    assert run.stats.rounds == expected.stats.rounds and run.stats.rounds_ahead > 3


@pytest.mark.parametrize("drafter", some_slow(RUNS_AHEAD, ["head"]))
def test_rounds_ahead_are_the_captures_that_they_would_be(
    monkeypatch: pytest.MonkeyPatch, replaying: list[StandIn], drafter: str
) -> None:
    monkeypatch.setattr(language_model, "_SMALLEST_SPAN", 4)
    pair = decoders(drafter)
    for _ in range(2):
        results, expected = (one.generate([PROMPT], max_new_tokens=40, seed=3) for one in pair)
        assert_same(results, expected)
    kinds, expected_kinds = ([kind[:-1] for kind in one.kinds] for one in replaying)  # but where the memories are
    assert kinds == expected_kinds
    assert len(set(kinds)) > 1, "the spans must change to prove anything"
    assert results[0].stats.rounds_ahead > results[0].stats.rounds / 2


@pytest.mark.parametrize("drafter", some_slow([name for name in EVERY_DRAFTER if name not in RUNS_AHEAD], COMBINATIONS))
def test_drafters_that_learn_from_the_outcome_wait_for_it(drafter: str) -> None:
    results, expected = (one.generate(RAGGED_PROMPTS, max_new_tokens=12, seed=SEEDS) for one in decoders(drafter))
    assert_same(results, expected)
    assert results[0].stats.rounds_ahead == 0


@ahead_drafters
def test_penalties_wait_for_the_outcome(drafter: str) -> None:
    pair = decoders(drafter)
    results, expected = (one.generate(RAGGED_PROMPTS, sampling=PENALTIES, max_new_tokens=12, seed=SEEDS) for one in pair)
    assert_same(results, expected)
    assert results[0].stats.replayed_rounds > 0 and results[0].stats.rounds_ahead == 0


def test_rounds_that_are_not_replayed_do_not_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TARGET, "graph_obstacle", "none of them can be captured")
    result = decoders("model")[0].generate(PROMPT, max_new_tokens=20, seed=0)
    assert result.stats.rounds_ahead == 0


@pytest.mark.parametrize(("drafter", "temperature", "rows"), covering(["none", "model", "head"], [0.0, 1.0], [1, 3]))
def test_a_prediction_that_promises_nothing_is_not_waited_for(
    replaying: list[StandIn], monkeypatch: pytest.MonkeyPatch, drafter: str, temperature: float, rows: int
) -> None:
    """Rounds run ahead while it is wrong, wait for it where it fits, and texts and figures are the same if none may."""
    monkeypatch.setattr("polydraft.draft.grams.is_host", lambda device: False)  # no policy, as on a GPU
    options = {"max_new_tokens": 100, "seed": SEEDS[:rows]}
    prompts = RAGGED_PROMPTS[:rows]
    plain = make_decoder(drafter="none").generate(prompts, sampling=SamplingParams(temperature=temperature), **options)
    waited = {}
    for kind in ("wrong", "found again", "right"):
        wrong = [[(7 * place + place // 5) % VOCABULARY for place in range(100)] for _ in prompts]
        texts = [one.token_ids for one in plain]
        predictions = {"wrong": wrong, "right": texts, "found again": [text[:5] + text[60:] for text in texts]}[kind]
        sampling = [SamplingParams(temperature=temperature, prediction=one) for one in predictions]
        pair = decoders(drafter)
        for one in pair:
            one.drafter = with_prediction(one.drafter, CHEAP)
        for _ in range(2):
            results, expected = (one.generate(prompts, sampling=sampling, **options) for one in pair)
            assert_same(results, expected)
        assert temperature > 0 or [one.token_ids for one in results] == texts
        stats = results[0].stats
        waited[kind] = stats.rounds - stats.rounds_ahead
        if kind == "wrong":
            assert stats.rounds_ahead > stats.rounds / 2
        if kind == "right" and temperature == 0:
            assert stats.tokens_by_source["prediction"] > stats.new_tokens / 2
    assert_in_step(pair[0])
