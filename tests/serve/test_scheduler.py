"""The scheduler's thread: everybody gets the text that the library gives, or an explicit error, and nothing is left behind."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from covering import keeping
from exactness.setups import DRAFT, TARGET, make_decoder
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, StopReason, TokenSequence
from polydraft.sampling import SamplingParams
from polydraft.sampling.categorical import row_generator
from polydraft.serve.errors import RequestError
from polydraft.serve.lane import LaneOptions
from polydraft.serve.request import Request
from polydraft.serve.scheduler import Scheduler
from polydraft.trees import parse_tree
from stand_in import StandIn

OPTIONS = LaneOptions(slots=3, slot_tokens=128, chunk_tokens=16)


def decoder() -> Decoder:
    return make_decoder(drafter="model", scheme="auto", walk="auto")


def sequence(prompt: list[int], seed: int, limit: int = 12, params: SamplingParams | None = None) -> TokenSequence:
    return TokenSequence(
        prompt=prompt, params=params or SamplingParams(), generator=row_generator(seed), max_new_tokens=limit, max_positions=128
    )


def submitted(*sequences: TokenSequence, speculative: str = "auto") -> Request:
    return Request(sequences, speculative, asyncio.get_running_loop())


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
        assert not scheduler.unfinished and not scheduler.alive


async def finished(one: Request) -> list[Exception | None]:
    """Wait for all texts of a request; return how each failed, if it did."""
    errors: dict[int, Exception | None] = {}
    while len(errors) < len(one.sequences):
        progress = await one.events.get()
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
            requests = []
            for number in range(20):
                params = SamplingParams(temperature=chance.choice([0, 0.7, 1.0]), top_k=chance.choice([0, 5]))
                prompt = [chance.randrange(32) for _ in range(chance.randrange(1, 40))]
                speculative = chance.choice(["auto", "auto", "2x1"])
                requests.append(submitted(sequence(prompt, number, chance.randrange(1, 20), params), speculative=speculative))
                scheduler.submit(requests[-1])
                await asyncio.sleep(chance.choice([0, 0, 0.01]))
            for number, one in enumerate(requests):
                assert await finished(one) == [None]
                if one.speculative == "auto":
                    assert one.sequences[0].new_tokens == alone(one.sequences[0], number)

    run(main())


def test_without_speculation_rounds_have_one_token() -> None:
    async def main() -> None:
        async with working() as scheduler:
            one = submitted(sequence([1, 2, 3], 5), speculative="off")
            scheduler.submit(one)
            assert await finished(one) == [None]
            counted = one.sequences[0].speculation
            assert counted.rounds == 12 and counted.candidates == 0
            plain = decoder().replace(drafter=None).generate([1, 2, 3], max_new_tokens=12, seed=[5])
            assert one.sequences[0].new_tokens == plain.token_ids

    run(main())


def test_a_full_queue_says_so_and_a_request_that_leaves_makes_room() -> None:
    async def main() -> None:
        async with working(max_queue=1) as scheduler:
            requests = [submitted(sequence([1, 2], n, limit=100)) for n in range(4)]
            for one in requests:
                scheduler.submit(one)
            with pytest.raises(RequestError, match="4 texts"):
                scheduler.submit(submitted(sequence([1], 9)))
            for one in requests[:2]:
                scheduler.cancel(one)
            late = submitted(sequence([7, 7], 9))
            while True:
                try:
                    scheduler.submit(late)
                    break
                except RequestError:
                    await asyncio.sleep(0.001)
            assert await finished(late) == [None] and late.sequences[0].new_tokens == alone(late.sequences[0], 9)
            assert requests[0].sequences[0].stop_reason is StopReason.CANCELLED
            assert 1 <= scheduler.retry_after() <= 60
            for one in requests[2:]:
                scheduler.cancel(one)

    run(main())


def test_a_round_that_breaks_costs_those_at_work_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for error, code in ((MemoryError(), "out_of_memory"), (ValueError("odd"), "round_failed")):
            async with working() as scheduler:
                first, step = submitted(sequence([1, 2], 0, limit=100)), threading.Event()
                lane = scheduler.lanes["auto"]
                original = lane.step

                def broken(awaited: bool, original: Any = original, error: Exception = error, step: Any = step) -> Any:
                    if step.is_set():
                        step.clear()
                        raise error
                    return original(awaited)

                lane.step = broken  # type: ignore[method-assign]
                scheduler.submit(first)
                await first.events.get()
                step.set()
                (found,) = await finished(first)
                assert isinstance(found, RequestError) and found.code == code
                second = submitted(sequence([4, 5], 3))
                scheduler.submit(second)
                assert await finished(second) == [None]
                assert second.sequences[0].new_tokens == alone(second.sequences[0], 3)

    run(main())
    assert "a round failed: MemoryError" in caplog.text


def test_draining_finishes_what_runs_and_takes_no_more() -> None:
    async def main() -> None:
        scheduler = Scheduler(decoder(), OPTIONS, max_queue=10)
        scheduler.start()
        requests = [submitted(sequence([1, 2], n)) for n in range(6)]
        for one in requests:
            scheduler.submit(one)
        drained = asyncio.create_task(asyncio.to_thread(scheduler.drain, 10.0))
        while scheduler.ready:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="shutting down"):
            scheduler.submit(submitted(sequence([1], 9)))
        await drained
        for number, one in enumerate(requests):
            assert await finished(one) == [None]
            assert one.sequences[0].new_tokens == alone(one.sequences[0], number)

    run(main())


def test_who_is_not_done_when_time_is_up_is_told() -> None:
    async def main() -> None:
        scheduler = Scheduler(decoder(), OPTIONS, max_queue=10)
        scheduler.start()
        requests = [submitted(sequence([1, 2], n, limit=100)) for n in range(5)]
        for one in requests:
            scheduler.submit(one)
        await asyncio.to_thread(scheduler.drain, 0.0)
        for one in requests:
            (error,) = await finished(one)
            assert isinstance(error, RequestError) and error.code == "stopped"

    run(main())


def test_a_text_that_fails_is_reported_with_its_reason() -> None:
    def bad(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no")

    async def main() -> None:
        async with working() as scheduler:
            one = submitted(sequence([1, 2], 0, params=SamplingParams(processors=(bad,))), sequence([1, 2], 1))
            scheduler.submit(one)
            failed, fine = await finished(one)
            assert "ArithmeticError: no" in str(failed) and fine is None

    run(main())


def test_ways_of_drafting_take_turns_first_come_first_served() -> None:
    async def main() -> None:
        async with working() as scheduler:
            ways = ["2x1", "3x1", "2x1", "off"]
            requests = [submitted(sequence([1, 2], n, limit=30), speculative=way) for n, way in enumerate(ways)]
            for one in requests:
                scheduler.submit(one)
            gone = submitted(sequence([1, 2], 9), speculative="4x1")
            scheduler.submit(gone)
            last = submitted(sequence([1, 2], 4, limit=30), speculative="1x1")
            scheduler.submit(last)
            beside = submitted(sequence([1, 2], 5, limit=5))
            scheduler.submit(beside)
            scheduler.cancel(gone)
            assert await finished(beside) == [None]  # waits for nobody's tree
            for one in (*requests, last):
                assert await finished(one) == [None]
            # A second request for a tree does not overtake another way that waits.
            begun = [one.admitted[0] for one in (*requests, last)]
            assert begun == sorted(begun) and not gone.admitted
            assert beside.admitted[0] < begun[1]
            assert gone.sequences[0].stop_reason is StopReason.CANCELLED
            assert list(scheduler.lanes) == ["auto", "1x1"]
            plain = decoder().replace(drafter=None).generate([1, 2], max_new_tokens=30, seed=[3])
            assert requests[3].sequences[0].new_tokens == plain.token_ids

    run(main())


def test_a_warm_scheduler_gives_the_same_texts_and_says_when_it_is_ready() -> None:
    async def main() -> None:
        samplings = [SamplingParams(), SamplingParams(temperature=0)]
        for made in (decoder(), Decoder(TARGET, TreeDrafter(DRAFT, parse_tree("3x2x1"), by_load=True))):
            scheduler = Scheduler(made, OPTIONS, max_queue=10, warm_up=samplings)
            assert not scheduler.ready
            scheduler.start()
            one = submitted(sequence([1, 2, 3], 5))  # waits until it is warm
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
            requests = [submitted(text) for text in texts]
            for one in requests:
                scheduler.submit(one)
                await asyncio.sleep(0.002)
            for one in requests:
                assert await finished(one) == [None]
        await asyncio.to_thread(scheduler.drain, 5.0)
        assert len(graphs.kinds) > before + 10
        assert set(graphs.kinds) == known

    run(main())


def test_who_leaves_does_not_wait_for_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.engine.warm_up.ROUNDS", 10**9)
    monkeypatch.setattr("polydraft.engine.warm_up.NEW_TOKENS", 10**5)  # memory for all of them is reserved at once
    monkeypatch.setattr("polydraft.serve.lane.USUAL_LENGTH", 10**5)
    scheduler = Scheduler(decoder(), replace(OPTIONS, slot_tokens=10**5), max_queue=10, warm_up=[SamplingParams()])
    scheduler.start()
    scheduler.drain(0.0)
    assert not scheduler.alive
