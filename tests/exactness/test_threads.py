"""Several threads on one decoder: every text is the one it would be alone, or the call is refused."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from covering import all_slow, covering
from polydraft.beam import BeamDecoder
from polydraft.beam._workspace import BeamWorkspace
from polydraft.draft import DraftSession
from polydraft.engine import Decoder, Generation
from polydraft.engine.graphs import Launcher
from polydraft.engine.workspace import Workspace
from polydraft.errors import FailureError, UsageError
from polydraft.models import TabularModel
from polydraft.sampling import SamplingParams

from .setups import DRAFT, HEAD, PROMPT, make_decoder

GREEDY = SamplingParams(temperature=0)
THREADS, CALLS = 3, 4


@pytest.fixture
def slow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look-up lets other threads go on for a while, so that whatever can meet does meet."""
    look_up = TabularModel.look_up

    def slow(self: TabularModel, *arguments: Any) -> Any:
        time.sleep(0.0005)
        return look_up(self, *arguments)

    monkeypatch.setattr(TabularModel, "look_up", slow)


def prompt_of(thread: int, call: int) -> list[int]:
    return [*PROMPT, *[(7 * thread + 3 * call + place) % 32 for place in range(thread + 1)]]


def in_threads(work: Callable[[int, int], None]) -> list[BaseException]:
    """Run `work(thread, call)` in several threads at once; return what it raised."""
    errors: list[BaseException] = []
    begun = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        begun.wait()
        for call in range(CALLS):
            try:
                work(thread, call)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a call waits for ever"
    return errors


def expected(drafter: str, thread: int, call: int, sampling: SamplingParams) -> list[int]:
    fresh = make_decoder(drafter=drafter, scheme="auto")
    return fresh.generate(prompt_of(thread, call), sampling=sampling, max_new_tokens=10, seed=[call]).token_ids


@pytest.mark.usefixtures("slow_passes")
@pytest.mark.parametrize(("drafter", "keep"), [
    ("head", True),  # it keeps most: a memory of its own, and features of the target's
    *all_slow(["model", "lookup+model", "dynamic"], [True]),
    *all_slow(["head"], [False]),
])  # fmt: skip
def test_calls_from_several_threads_get_their_own_texts(drafter: str, keep: bool) -> None:
    decoder = make_decoder(drafter=drafter, scheme="auto")
    results: dict[tuple[int, int], Generation] = {}

    def work(thread: int, call: int) -> None:
        sampling = GREEDY if call % 2 else SamplingParams()
        results[thread, call] = decoder.generate(
            prompt_of(thread, call), sampling=sampling, max_new_tokens=10, seed=[call], keep=keep
        )

    assert in_threads(work) == []
    for (thread, call), result in results.items():
        assert result.token_ids == expected(drafter, thread, call, GREEDY if call % 2 else SamplingParams())
    # Nor does the memory stay wrong for later calls.
    later = decoder.generate(prompt_of(0, 0), sampling=GREEDY, max_new_tokens=10, seed=[0], keep=keep)
    assert later.token_ids == expected(drafter, 0, 0, GREEDY)


@pytest.mark.usefixtures("slow_passes")
def test_streams_that_share_a_kept_memory_are_right_or_refused() -> None:
    decoder = make_decoder(scheme="auto")
    whole: list[tuple[int, int, list[int]]] = []
    refused: list[str] = []

    def work(thread: int, call: int) -> None:
        stream = decoder.stream(prompt_of(thread, call), sampling=GREEDY, max_new_tokens=10, keep=True)
        try:
            tokens = [event.token_id for event in stream]
        except UsageError as error:
            refused.append(str(error))
            tokens = stream.results()[0].token_ids
        whole.append((thread, call, tokens))

    assert in_threads(work) == []
    for thread, call, tokens in whole:
        assert tokens == expected("model", thread, call, GREEDY)[: len(tokens)]
    assert refused and all("taken over" in message for message in refused)
    assert len(whole) == THREADS * CALLS
    later = decoder.generate(PROMPT, sampling=GREEDY, max_new_tokens=20, keep=True)
    assert later.token_ids == make_decoder(scheme="auto").generate(PROMPT, sampling=GREEDY, max_new_tokens=20).token_ids


def test_spare_memories_go_to_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where workspaces are kept for their captures: each is lent to one call, and comes back."""
    monkeypatch.setattr(Workspace, "captures", True)
    decoder = make_decoder(scheme="auto")
    decoder.generate(PROMPT, max_new_tokens=2)
    assert len(decoder._spare) == 1
    resolve = DraftSession.resolve_walk

    def slow(self: DraftSession, *arguments: Any) -> Any:
        time.sleep(0.002)  # a call has its memory, but no run that claims it
        return resolve(self, *arguments)

    monkeypatch.setattr(DraftSession, "resolve_walk", slow)
    texts: dict[tuple[int, int], list[int]] = {}

    def work(thread: int, call: int) -> None:
        texts[thread, call] = decoder.generate(prompt_of(thread, call), max_new_tokens=10, seed=[call]).token_ids

    assert in_threads(work) == []
    for (thread, call), tokens in texts.items():
        assert tokens == expected("model", thread, call, SamplingParams())


@pytest.mark.parametrize(("place", "draft"), covering(["launch", "settle"], [DRAFT, HEAD]))
def test_a_round_that_broke_off_does_not_go_on(place: str, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder: Decoder = make_decoder(drafter="head" if draft is HEAD else "model", scheme="auto")
    stream = decoder.stream(PROMPT, max_new_tokens=30, seed=1, keep=True)
    begun = [next(stream).token_id]
    owner = Launcher if place == "launch" else Workspace
    original = getattr(owner, place)

    def interrupted(self: Any, *arguments: Any, **named: Any) -> Any:
        original(self, *arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            begun.extend(event.token_id for event in stream)
    with pytest.raises(FailureError, match=r"interrupted.*start the request again"):
        next(stream)
    stream.close()
    fresh = make_decoder(drafter="head" if draft is HEAD else "model", scheme="auto")
    whole = fresh.generate(PROMPT, max_new_tokens=30, seed=1).token_ids
    assert stream.results()[0].token_ids[: len(begun)] == whole[: len(begun)]
    assert decoder.generate(PROMPT, max_new_tokens=30, seed=1, keep=True).token_ids == whole


def test_spare_memories_of_beams_go_to_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeamWorkspace, "captures", True)
    beams = BeamDecoder(make_decoder(scheme="auto"))
    options: dict[str, Any] = {"beams": 3, "max_new_tokens": 6}
    alone = [beams.search(prompt_of(thread, 0), **options).best.token_ids for thread in range(THREADS)]
    assert beams._spare
    idle = BeamWorkspace.idle.fget

    def slow(self: BeamWorkspace) -> bool:
        found = idle(self)
        time.sleep(0.002)  # found to be free, and not yet taken
        return found

    monkeypatch.setattr(BeamWorkspace, "idle", property(slow))
    texts: list[tuple[int, list[int]]] = []
    errors = in_threads(lambda thread, _: texts.append((thread, beams.search(prompt_of(thread, 0), **options).best.token_ids)))
    assert errors == []
    assert all(tokens == alone[thread] for thread, tokens in texts) and len(texts) == THREADS * CALLS
