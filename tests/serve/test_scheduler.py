"""The scheduler's thread: everybody gets the text that the library gives, or an explicit error, and nothing is left behind."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covering import keeping
from exactness.setups import DRAFT, TARGET, make_decoder
from polydraft.draft import Plain, TreeDrafter
from polydraft.engine import Decoder, StopReason, TokenSequence
from polydraft.engine.stats import Pace
from polydraft.errors import FailureError, UsageError
from polydraft.models import FAMILIES, Context
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams
from polydraft.sampling.categorical import row_generator
from polydraft.serve.lane import Lane, LaneOptions, Waiting
from polydraft.serve.scheduler import Scheduler, drafting
from polydraft.serve.ticket import BusyError, Ticket, UnavailableError
from polydraft.trees import parse_tree
from stand_in import StandIn

OPTIONS = LaneOptions(slots=3, slot_tokens=128, chunk_tokens=16)


def decoder() -> Decoder:
    return make_decoder(drafter="model", scheme="auto", walk="auto")


def sequence(prompt: list[int], seed: int, limit: int = 12, params: SamplingParams | None = None) -> TokenSequence:
    return TokenSequence(
        prompt=prompt, params=params or SamplingParams(), generator=row_generator(seed), max_new_tokens=limit, max_positions=128
    )


def ticket(*sequences: TokenSequence, speculative: str = "auto") -> Ticket:
    return Ticket(sequences, speculative, asyncio.get_running_loop())


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


@asynccontextmanager
async def working(max_queue: int = 100, made: Decoder | None = None) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(made or decoder(), OPTIONS, max_queue=max_queue)
    scheduler.start()
    try:
        yield scheduler
    finally:
        await asyncio.to_thread(scheduler.drain, 5.0)
        assert not scheduler._open and not scheduler._thread.is_alive()


async def finished(one: Ticket) -> list[Exception | None]:
    """Wait for all texts of a request; return how each failed, if it did."""
    errors: dict[int, Exception | None] = {}
    while len(errors) < len(one.sequences):
        progress = await one.next()
        if progress.emitted.stop_reason is not None:
            errors[progress.index] = progress.error
    return [errors[index] for index in range(len(one.sequences))]


def alone(one: TokenSequence, seed: int) -> list[int]:
    result = decoder().generate(list(one.prompt), sampling=one.params, max_new_tokens=one.max_new_tokens, seed=[seed])
    return result.token_ids


def test_every_request_gets_the_librarys_text() -> None:
    async def main() -> None:
        chance = random.Random(1)
        async with working() as scheduler:
            tickets = []
            for number in range(20):
                params = SamplingParams(temperature=chance.choice([0, 0.7, 1.0]), top_k=chance.choice([0, 5]))
                prompt = [chance.randrange(32) for _ in range(chance.randrange(1, 40))]
                speculative = chance.choice(["auto", "auto", "2x1"])
                tickets.append(ticket(sequence(prompt, number, chance.randrange(1, 20), params), speculative=speculative))
                scheduler.submit(tickets[-1])
                await asyncio.sleep(chance.choice([0, 0, 0.01]))
            for number, one in enumerate(tickets):
                assert await finished(one) == [None]
                if one.speculative == "auto":
                    assert one.sequences[0].new_tokens == alone(one.sequences[0], number)

    run(main())


def test_without_speculation_rounds_have_one_token() -> None:
    async def main() -> None:
        async with working() as scheduler:
            one = ticket(sequence([1, 2, 3], 5), speculative="off")
            scheduler.submit(one)
            assert await finished(one) == [None]
            counted = one.sequences[0].speculation
            assert counted.rounds == 12 and counted.drafted_tokens == 0
            plain = decoder().replace(drafter=None).generate([1, 2, 3], max_new_tokens=12, seed=[5])
            assert one.sequences[0].new_tokens == plain.token_ids

    run(main())


def test_a_full_queue_says_so_and_a_request_that_leaves_makes_room() -> None:
    async def main() -> None:
        async with working(max_queue=1) as scheduler:
            tickets = [ticket(sequence([1, 2], n, limit=100)) for n in range(4)]
            for one in tickets:
                scheduler.submit(one)
            with pytest.raises(BusyError, match="4 texts"):
                scheduler.submit(ticket(sequence([1], 9)))
            for one in tickets[:2]:
                scheduler.cancel(one)
            late = ticket(sequence([7, 7], 9))
            while True:
                try:
                    scheduler.submit(late)
                    break
                except BusyError:
                    await asyncio.sleep(0.001)
            assert await finished(late) == [None] and late.sequences[0].new_tokens == alone(late.sequences[0], 9)
            assert tickets[0].sequences[0].stop_reason is StopReason.CANCELLED
            assert 1 <= scheduler.retry_after() <= 60
            for one in tickets[2:]:
                scheduler.cancel(one)

    run(main())


def test_a_round_that_breaks_costs_those_at_work_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for error, kind in ((MemoryError(), UnavailableError), (ValueError("odd"), FailureError)):
            async with working() as scheduler:
                first, step = ticket(sequence([1, 2], 0, limit=100)), threading.Event()
                lane = scheduler._lanes["auto"]
                original = lane.step

                def broken(awaited: bool, original: Any = original, error: Exception = error, step: Any = step) -> Any:
                    if step.is_set():
                        step.clear()
                        raise error
                    return original(awaited)

                lane.step = broken  # type: ignore[method-assign]
                scheduler.submit(first)
                await first.next()
                step.set()
                (found,) = await finished(first)
                assert type(found) is kind
                second = ticket(sequence([4, 5], 3))
                scheduler.submit(second)
                assert await finished(second) == [None]
                assert second.sequences[0].new_tokens == alone(second.sequences[0], 3)

    run(main())
    assert "a round failed: MemoryError" in caplog.text


def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    async def main() -> None:
        scheduler = Scheduler(decoder(), OPTIONS, max_queue=10)
        scheduler.start()
        tickets = [ticket(sequence([1, 2], n)) for n in range(6)]
        for one in tickets:
            scheduler.submit(one)
        drained = asyncio.create_task(asyncio.to_thread(scheduler.drain, 10.0))
        while scheduler.ready:
            await asyncio.sleep(0.001)
        with pytest.raises(UnavailableError, match="shutting down"):
            scheduler.submit(ticket(sequence([1], 9)))
        await drained
        for number, one in enumerate(tickets):
            assert await finished(one) == [None]
            assert one.sequences[0].new_tokens == alone(one.sequences[0], number)

    run(main())


def test_who_is_not_done_when_time_is_up_is_told() -> None:
    async def main() -> None:
        scheduler = Scheduler(decoder(), OPTIONS, max_queue=10)
        scheduler.start()
        tickets = [ticket(sequence([1, 2], n, limit=100)) for n in range(5)]
        for one in tickets:
            scheduler.submit(one)
        await asyncio.to_thread(scheduler.drain, 0.0)
        for one in tickets:
            (error,) = await finished(one)
            assert isinstance(error, UnavailableError) and "stopped before" in str(error)

    run(main())


def test_a_text_that_fails_is_reported_with_its_reason() -> None:
    def bad(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no")

    async def main() -> None:
        async with working() as scheduler:
            one = ticket(sequence([1, 2], 0, params=SamplingParams(processors=(bad,))), sequence([1, 2], 1))
            scheduler.submit(one)
            failed, fine = await finished(one)
            assert "ArithmeticError: no" in str(failed) and fine is None

    run(main())


def test_trees_of_requests_are_checked() -> None:
    assert drafting(decoder(), "2x1").drafter.topology is not None
    with pytest.raises(UsageError, match="at most 128"):
        drafting(decoder(), "100x2")
    with pytest.raises(UsageError, match="no draft"):
        drafting(Decoder(TARGET), "2x1")
    with pytest.raises(UsageError, match="unknown tree"):
        drafting(decoder(), "oak")


def test_ways_of_drafting_take_turns_first_come_first_served() -> None:
    async def main() -> None:
        async with working() as scheduler:
            ways = ["2x1", "3x1", "2x1", "off"]
            tickets = [ticket(sequence([1, 2], n, limit=30), speculative=way) for n, way in enumerate(ways)]
            for one in tickets:
                scheduler.submit(one)
            gone = ticket(sequence([1, 2], 9), speculative="4x1")
            scheduler.submit(gone)
            last = ticket(sequence([1, 2], 4, limit=30), speculative="1x1")
            scheduler.submit(last)
            beside = ticket(sequence([1, 2], 5, limit=5))
            scheduler.submit(beside)
            scheduler.cancel(gone)
            assert await finished(beside) == [None]  # waits for nobody's tree
            for one in (*tickets, last):
                assert await finished(one) == [None]
            # A second request for a tree does not overtake another way that waits.
            begun = [one.admitted[0] for one in (*tickets, last)]
            assert begun == sorted(begun) and not gone.admitted
            assert beside.admitted[0] < begun[1]
            assert gone.sequences[0].stop_reason is StopReason.CANCELLED
            assert list(scheduler._lanes) == ["auto", "1x1"]
            plain = decoder().replace(drafter=None).generate([1, 2], max_new_tokens=30, seed=[3])
            assert tickets[3].sequences[0].new_tokens == plain.token_ids

    run(main())


def test_requests_take_turns_for_slots() -> None:
    """A request of many texts leaves the next free slot to one that has none, and gets on itself."""
    lane = Lane(decoder(), OPTIONS)
    many = [Ticket([sequence([1, 2 + n], 10 * m + n, limit=10 + 3 * n) for n in range(4)]) for m in range(2)]
    late = [Ticket([sequence([5], n, limit=1)]) for n in range(2)]
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
    waiting = Waiting()
    texts = [sequence([1], n) for n in range(4)]
    first, second, third = Ticket(texts), Ticket(texts[:2]), Ticket(texts[:1])
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
    lane.waiting.add(Ticket(texts[:1]))
    assert clock.steps(lane, 2) == [29, 0]  # the last token is not read but drafted behind
    lane.waiting.add(Ticket(texts[1:]))
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
    lane.waiting.add(Ticket([slow]))
    assert clock.steps(lane, 2) == [255, 144]
    other = sequence([6] * 100, 3, limit=3)
    lane.waiting.add(Ticket([other]))
    while lane.busy:
        assert clock.steps(lane, 1, awaited=True)[0] <= 52


def test_short_prompts_pass_long_ones_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ReadingClock(monkeypatch, each=0.01)
    lane = Lane(Decoder(TARGET), LaneOptions(slots=3, slot_tokens=512, chunk_tokens=64))
    long, short, middling = sequence([7] * 400, 0, limit=3), sequence([5] * 20, 1, limit=3), sequence([6] * 40, 2, limit=3)
    for one in (long, short, middling):
        one.max_positions = 512
    lane.waiting.add(Ticket([long]))
    assert clock.steps(lane, 1) == [63]
    for one in (middling, short):
        lane.waiting.add(Ticket([one]))
    assert clock.steps(lane, 1) == [63] and len(short.new_tokens) == 1 and not middling.new_tokens
    while not long.new_tokens:
        assert clock.steps(lane, 1)[0] <= 64 and not middling.new_tokens  # which is not short enough
    while lane.busy:
        lane.step()
    for number, one in enumerate((long, short, middling)):
        assert one.new_tokens == Decoder(TARGET).generate(list(one.prompt), max_new_tokens=3, seed=[number]).token_ids


def test_the_pace_of_reading_follows_what_was_measured() -> None:
    pace = Pace(256, 0.1)
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
    assert Pace(None, None).room(True) > 10**9


def test_a_warm_scheduler_gives_the_same_texts_and_says_when_it_is_ready() -> None:
    async def main() -> None:
        samplings = [SamplingParams(), SamplingParams(temperature=0)]
        for made in (decoder(), Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("3x2x1"), by_load=True))):
            scheduler = Scheduler(made, OPTIONS, max_queue=10, warm_up=samplings)
            assert not scheduler.ready
            scheduler.start()
            one = ticket(sequence([1, 2, 3], 5))  # waits until it is warm
            scheduler.submit(one)
            assert await finished(one) == [None] and scheduler.ready
            # Trees by load have another tree for a seed in company, which a server's texts are in.
            expected = made.generate([[1, 2, 3]] * 2, max_new_tokens=12, seed=[5, 6])[0]
            assert one.sequences[0].new_tokens == expected.token_ids
            await asyncio.to_thread(scheduler.drain, 5.0)

    run(main())


@pytest.mark.parametrize("temperatures", keeping([[1.0], [0.0], [1.0, 0.0]], [1.0, 0.0]))
def test_a_warm_scheduler_meets_nothing_new(temperatures: list[float], caches: list[StandIn]) -> None:
    """Capture takes as long as a hundred rounds, so no text may wait for it: whoever comes, goes, or stands beside whom."""

    async def main() -> None:
        samplings = [SamplingParams(temperature=temperature) for temperature in temperatures]
        made = Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("3x2x1"), by_load=True), graphs=True)
        # Prompts are read at once, so that the warm-up itself never has a slot that waits.
        size = LaneOptions(slots=3, slot_tokens=128, chunk_tokens=1024)
        scheduler = Scheduler(made, size, max_queue=20, warm_up=samplings)
        scheduler.start()
        while not scheduler.ready:
            await asyncio.sleep(0.01)
        (graphs,) = caches
        known, before = set(graphs.kinds), len(graphs.kinds)
        for cast in (*([params] for params in samplings), samplings):
            texts = [sequence([1, 2, 3 + row], row, limit=5 + 4 * row, params=cast[row % len(cast)]) for row in range(8)]
            tickets = [ticket(text) for text in texts]
            for one in tickets:
                scheduler.submit(one)
                await asyncio.sleep(0.002)
            for one in tickets:
                assert await finished(one) == [None]
        await asyncio.to_thread(scheduler.drain, 5.0)
        assert len(graphs.kinds) > before + 10
        assert set(graphs.kinds) == known

    run(main())


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
        lane.waiting.add(Ticket(texts))
        while lane.busy:
            lane.step()
        assert [text.new_tokens for text in texts] == [one.token_ids for one in expected], drafter.name
        assert caches[-1].replays > 3
        taken.append(lane.cache_bytes)
        memory = lane.release()
    assert taken == taken[:1] * 3 and taken[0] > 0


def test_who_leaves_does_not_wait_for_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.engine.warm_up.ROUNDS", 10**9)
    monkeypatch.setattr("polydraft.engine.warm_up.NEW_TOKENS", 10**5)  # memory for all of them is reserved at once
    monkeypatch.setattr("polydraft.serve.lane.USUAL_LENGTH", 10**5)
    scheduler = Scheduler(decoder(), replace(OPTIONS, slot_tokens=10**5), max_queue=10, warm_up=[SamplingParams()])
    scheduler.start()
    scheduler.drain(0.0)
    assert not scheduler._thread.is_alive()
