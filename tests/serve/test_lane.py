"""A lane: whose turn it is, how long prompts hold others up, and how memory is handed on."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.serve.test_scheduler import OPTIONS, alone, decoder, sequence

from exactness.setups import TARGET
from families import FAMILIES
from polydraft.draft import Plain, TreeDrafter
from polydraft.engine import Decoder
from polydraft.engine.stats import ReadingPace
from polydraft.errors import UsageError
from polydraft.models import Context
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.serve.lane import Lane, LaneOptions, with_speculation
from polydraft.serve.request import Request, SlotQueue
from polydraft.trees import parse_tree
from stand_in import StandIn


def test_trees_of_requests_are_checked() -> None:
    assert with_speculation(decoder(), "2x1").drafter.topology is not None
    with pytest.raises(UsageError, match="at most 128"):
        with_speculation(decoder(), "100x2")
    with pytest.raises(UsageError, match="no draft"):
        with_speculation(Decoder(TARGET), "2x1")
    with pytest.raises(UsageError, match="unknown tree"):
        with_speculation(decoder(), "oak")


def test_requests_take_turns_for_slots() -> None:
    """A request of many texts leaves the next free slot to one that has none, and gets on itself."""
    lane = Lane(decoder(), OPTIONS)
    many = [Request([sequence([1, 2 + n], 10 * m + n, limit=10 + 3 * n) for n in range(4)]) for m in range(2)]
    late = [Request([sequence([5], n, limit=1)]) for n in range(2)]
    for one in many:
        lane.waiting.add(one)
    lane.step()
    for one in late:
        lane.waiting.add(one)
    while lane.busy:
        lane.step()
    begun = sorted((when, number) for number, one in enumerate((*many, *late)) for when in one.admitted.values())
    order = [number for _, number in begun]
    assert order[:3] == [0, 1, 0], order
    # Whoever came before and holds no slot any more may be in between, with one text.
    assert max(order.index(2), order.index(3)) <= 6 < len(order) - 2, order
    both = [number for number in order if number < 2]
    assert all(abs(both[:n].count(0) - both[:n].count(1)) <= 2 for n in range(8)), order
    for number, one in enumerate((*many, *late)):
        for index, text in enumerate(one.sequences):
            assert text.new_tokens == alone(text, 10 * number + index if number < 2 else number - 2)


def test_whoever_holds_the_fewest_slots_is_next() -> None:
    waiting = SlotQueue()
    texts = [sequence([1], n) for n in range(4)]
    first, second, third = Request(texts), Request(texts[:2]), Request(texts[:1])
    for one in (first, second, third):
        waiting.add(one)
    assert len(waiting) == 7
    held = Counter({first: 2, second: 1})
    order = []
    while waiting:
        who, index = waiting.next(held)
        held[who] += 1
        order.append(("first", "second", "third")[[first, second, third].index(who)] + str(index))
    assert order == ["third0", "second0", "first0", "second1", "first1", "first2", "first3"]


def test_clients_take_turns_however_many_requests_they_send() -> None:
    waiting = SlotQueue()
    burst = [Request([sequence([1], n)], client="one") for n in range(50)]
    late = [Request([sequence([1], n)], client="other") for n in range(3)]
    for one in (*burst, *late):
        waiting.add(one)
    held = Counter(dict.fromkeys(burst[:2], 1))
    order = []
    for _ in range(8):
        who, _ = waiting.next(held)
        held[who] += 1
        order.append(who.client)
    assert order == ["other", "other", "one", "other", "one", "one", "one", "one"]


class ReadingClock:
    """Stands still but for the tokens of prompts: each takes so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: float) -> None:
        self.now, self.each, self.read = 0.0, each, 0
        prefill = Context.prefill

        def timed(context: Context, texts: Any, *arguments: Any) -> None:
            self.read += sum(map(len, texts))
            self.now += self.each * sum(map(len, texts))
            prefill(context, texts, *arguments)

        monkeypatch.setattr(Context, "prefill", timed)
        for module in ("stats", "loop"):
            monkeypatch.setattr(f"polydraft.engine.{module}.time", SimpleNamespace(perf_counter=lambda: self.now))

    def steps(self, lane: Lane, count: int, awaited: bool = False) -> list[int]:
        """Return how many tokens each step reads."""
        found = []
        for _ in range(count):
            self.read = 0
            lane.step(awaited)
            found.append(self.read)
        return found


def test_long_prompts_stall_others_no_longer_than_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ReadingClock(monkeypatch, each=0.01)
    size = LaneOptions(slots=3, slot_tokens=512, chunk_tokens=256, stall_seconds=0.5)
    lane = Lane(Decoder(TARGET), size)
    texts = [sequence(list(range(30)), 0, limit=40), sequence([7] * 300 + [3, 1], 1, limit=5)]
    for one in texts:
        one.max_positions = 512
    lane.waiting.add(Request(texts[:1]))
    assert clock.steps(lane, 2) == [29, 0]  # the last token is not read but drafted behind
    lane.waiting.add(Request(texts[1:]))
    before = len(texts[0].new_tokens)
    found = clock.steps(lane, 7)
    assert max(found) <= 52 and min(found[:5]) >= 48 and sum(found) == 301, found
    assert len(texts[0].new_tokens) == before + 7  # which goes on meanwhile
    clock.each = 0.1  # the machine gets busy
    while lane.busy:
        lane.step()
    for number, one in enumerate(texts):
        plain = Decoder(TARGET).generate(list(one.prompt), max_new_tokens=one.max_new_tokens, seed=[number])
        assert one.new_tokens == plain.token_ids
    # Where nobody waits, time to the first token counts alone; texts of another lane are somebody.
    slow = sequence([5] * 400, 2, limit=3)
    slow.max_positions = 512
    lane.waiting.add(Request([slow]))
    assert clock.steps(lane, 2) == [255, 144]
    other = sequence([6] * 100, 3, limit=3)
    lane.waiting.add(Request([other]))
    while lane.busy:
        assert clock.steps(lane, 1, awaited=True)[0] <= 52


def test_short_prompts_pass_long_ones_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ReadingClock(monkeypatch, each=0.01)
    lane = Lane(Decoder(TARGET), LaneOptions(slots=3, slot_tokens=512, chunk_tokens=64))
    long, short, middling = sequence([7] * 400, 0, limit=3), sequence([5] * 20, 1, limit=3), sequence([6] * 40, 2, limit=3)
    for one in (long, short, middling):
        one.max_positions = 512
    lane.waiting.add(Request([long]))
    assert clock.steps(lane, 1) == [63]
    for one in (middling, short):
        lane.waiting.add(Request([one]))
    assert clock.steps(lane, 1) == [63] and len(short.new_tokens) == 1 and not middling.new_tokens
    while not long.new_tokens:
        assert clock.steps(lane, 1)[0] <= 64 and not middling.new_tokens  # which is not short enough
    while lane.busy:
        lane.step()
    for number, one in enumerate((long, short, middling)):
        assert one.new_tokens == Decoder(TARGET).generate(list(one.prompt), max_new_tokens=3, seed=[number]).token_ids


def test_the_pace_of_reading_follows_what_was_measured() -> None:
    pace = ReadingPace(256, 0.1)
    assert pace.room(True) == pace.room(False) == 256
    pace.read(20)
    pace.timed(0.04, 0.04)
    assert pace.room(True) == 50 and pace.room(False) == 256
    pace.read(50)
    pace.timed(0.04 + 0.05, 0.05)  # long reads take less per token: counts at once
    assert pace.room(True) == 100
    pace.read(100)
    pace.timed(0.09 + 0.3, 0.3)  # slower: by half
    assert pace.room(True) == 50
    pace.timed(0.5, 0.01)  # nothing was read
    assert pace.room(True) == 50
    for _ in range(20):
        pace.timed(0.5, 0.4)  # rounds are slow: reading may take as long
    assert 195 <= pace.room(True) <= 200
    for _ in range(20):
        pace.timed(0.5, 0.0)
    pace.read(1)
    pace.timed(9, 8.5)  # something was compiled
    assert pace.room(True) == 16
    assert ReadingPace(None, None).room(True) > 10**9


def test_rounds_are_captured_anew_in_storage_that_is_handed_on(caches: list[StandIn]) -> None:
    target = HFModel(FAMILIES.get("llama").build())
    size, memory, taken = replace(OPTIONS, slot_tokens=64, places=(32, 32)), list[Context](), list[int]()
    prompts = [list(range(1, 2 + 5 * n)) for n in range(4)]
    params = SamplingParams(temperature=0)
    expected = [Decoder(target, graphs=False).generate(one, sampling=params, max_new_tokens=16) for one in prompts]
    for drafter in (TreeDrafter(target, parse_tree("3x1")), Plain(), TreeDrafter(target, parse_tree("2x2"))):
        lane = Lane(Decoder(target, drafter, graphs=True), size, memory)
        if not memory:
            lane.reserve()
        texts = [sequence(prompt, 0, 16, params) for prompt in prompts]
        lane.waiting.add(Request(texts))
        while lane.busy:
            lane.step()
        assert [text.new_tokens for text in texts] == [one.token_ids for one in expected], drafter.name
        assert caches[-1].replays > 3
        taken.append(lane.cache_bytes)
        memory = lane.release()
    assert taken == taken[:1] * 3 and taken[0] > 0
