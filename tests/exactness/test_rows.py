"""Rounds have about as many rows as there are texts at work, captured ones too: texts move, sleep and wake unnoticed."""

import random
from typing import Any

import pytest

from covering import all_slow, covering
from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Engine, StopReason, TokenSequence, workspace
from polydraft.engine.workspace import Workspace
from polydraft.models import TabularModel
from polydraft.models.hf import HFModel
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.trees import parse_tree
from stand_in import StandIn, round_graphs

from .setups import DRAFT, GRAM_PROMPT, HEAD, PENALTIES, TARGET
from .shipped import shipped_pair
from .test_admission import driven, open_engine, requests, sequence
from .test_dynamic import DECODERS as DYNAMIC_DECODERS
from .test_mixed_rows import DECODERS, PARAMS
from .test_slots import alone, finish, widths_of

pytestmark = pytest.mark.usefixtures("short_blocks")

GREEDY = SamplingParams(temperature=0)
DRAFTERS: dict[str, Any] = {
    "plain": None,
    "model": TreeDrafter(DRAFT, parse_tree("2x1")),
    "head": TreeDrafter(HEAD, parse_tree("2x2")),
}
SAMPLINGS = {"greedy": [GREEDY], "drawn": [SamplingParams()], "penalties": [PENALTIES], "all": PARAMS}
LIMITS = [9, 30, 4, 12, 46, 7, 5, 3]
"""Of which two are long, so that these are left, not in the first slots."""


@pytest.fixture(autouse=True)
def eager_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_WORTH_A_MOVE", "_WORTH_A_CAPTURE"):
        monkeypatch.setattr(workspace, name, 1)


def decoder_of(name: str, **options: Any) -> Decoder:
    if name == "assistant":
        target, head = shipped_pair(name)
        return Decoder(target, TreeDrafter(head, parse_tree("2x2")), **options)
    return Decoder(TARGET, DRAFTERS[name], **options)


def captured_engine(decoder: Decoder, count: int, *, reuse: bool = False, **options: Any) -> tuple[Engine, StandIn]:
    """Open an elastic engine whose rounds are captured; see `open_engine` for `reuse`."""
    if reuse:
        options["prefixes"] = Prefixes(2**30)
    memories = Workspace(decoder.target, decoder.drafter, RowParams((IDLE,) * count), ahead=decoder.ahead)
    graphs = memories.launcher.graphs = round_graphs(memories)
    engine = Engine(memories, elastic=True, **options)
    return engine, graphs


def rows_of(graphs: StandIn) -> list[int]:
    """Rows of all rounds that were run."""
    return [kind[-3][-1] for kind in graphs.kinds if kind[0] != "reading"]


def counted_reading(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take note of how many tokens the target reads at a time."""
    read, context = list[int](), engine.workspace.memory.context
    original = context.prefill

    def prefill(texts: Any, observer: Any = None) -> None:
        read.append(sum(map(len, texts)))
        original(texts, observer)

    monkeypatch.setattr(context, "prefill", prefill)
    return read


def resizes(engine: Engine) -> list[int]:
    """Take note of the numbers of rows that an engine chooses."""
    widths, memories = list[int](), engine.workspace
    original = memories.have_rows

    def have_rows(rows: int) -> None:
        widths.append(rows)
        original(rows)

    memories.have_rows = have_rows  # type: ignore[method-assign]
    return widths


@pytest.mark.parametrize(("name", "sampling", "ahead"), [
    *covering(["plain", "model", "head"], ["greedy", "drawn", "penalties"], [True, False]),
    *all_slow(["plain", "model", "head"], ["all"], [True, False]),
])  # fmt: skip
def test_a_batch_has_fewer_rows_as_its_texts_end(caches: list[StandIn], name: str, sampling: str, ahead: bool) -> None:
    decoder, wanted = decoder_of(name, ahead=ahead), SAMPLINGS[sampling]
    prompts = [[3, 1, 4 + row] for row in range(len(LIMITS))]
    params = [wanted[row % len(wanted)] for row in range(len(LIMITS))]
    asked: dict[str, Any] = {"sampling": params, "max_new_tokens": LIMITS, "seed": list(range(8))}
    eager = decoder.replace(graphs=False)
    expected = [
        eager.generate(prompts[row], sampling=params[row], max_new_tokens=limit, seed=[row]).token_ids
        for row, limit in enumerate(LIMITS)
    ]
    for _ in range(2):  # the second batch begins in memories that the first has left with few rows
        assert [result.token_ids for result in decoder.generate(prompts, **asked)] == expected
    (graphs,) = caches
    rows = rows_of(graphs)
    assert {2, 1} <= set(rows) <= {8, 2, 1} and rows[-1] == 1
    if sampling != "all":  # processors keep rounds from being captured
        assert rows[0] == 8 and graphs.replays > len(rows) / 2


@pytest.mark.parametrize(("name", "seed"), [
    *covering(["plain", "model", "head"], [1, 2]),
    *all_slow(["plain", "model", "head"], [3, 4, 5]),
])  # fmt: skip
def test_captured_texts_may_come_and_go(name: str, seed: int) -> None:
    decoder = decoder_of(name)
    asked = requests(14)
    random.Random(seed).shuffle(asked)
    engine, graphs = captured_engine(decoder, 9, reuse=True, chunk=5)
    sequences = [sequence(decoder, row, **one) for row, one in enumerate(asked)]
    widths = resizes(engine)
    driven(engine, sequences, seed)
    for found, one in zip(sequences, asked, strict=True):
        expected = decoder.generate(one["prompt"], sampling=one["params"], max_new_tokens=one["limit"], seed=[one["seed"]])
        assert found.new_tokens == expected.token_ids
    assert widths and graphs.replays


def test_drafters_that_cannot_move_keep_all_rows() -> None:
    decoder = DECODERS["lookup"]()
    engine, _ = captured_engine(decoder, 4)
    widths = resizes(engine)
    texts = [sequence(decoder, row, [1, 2, 3 + row], GREEDY, limit=limit, seed=row) for row, limit in enumerate([3, 4, 5, 50])]
    for one in texts:
        engine.add(one)
    finish(engine)
    assert widths == [] and engine.slots.sizes == [4]
    assert [one.new_tokens for one in texts] == [alone(decoder, one, 0) for one in texts]


@pytest.mark.parametrize("name", ["plain", "model", "head"])
def test_what_a_slot_holds_sleeps_and_wakes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(name)
    engine, graphs = captured_engine(decoder, 4, reuse=True)
    read = counted_reading(engine, monkeypatch)
    first = [sequence(decoder, row, [*GRAM_PROMPT, row], GREEDY, limit=6, seed=row) for row in range(4)]
    for one in first:
        engine.add(one)
    finish(engine)
    # Something else, alone: one row is enough for it, and the others sleep.
    other = sequence(decoder, 4, [7, 7, 9], GREEDY, limit=12, seed=4)
    engine.add(other)
    finish(engine)
    assert len(engine.slots) == 1
    del read[:]
    # A conversation goes on whose text sleeps: only what is new is read.
    again = sequence(decoder, 5, [*first[2].tokens, 5, 6], GREEDY, limit=20, seed=5)
    engine.add(again)
    finish(engine)
    assert sum(read) <= 4 and len(engine.slots) == 1
    # And others in slots that come back.
    more = [sequence(decoder, 6 + row, [*first[row].tokens, 5], GREEDY, limit=9, seed=6 + row) for row in (1, 3)]
    for one in more:
        engine.add(one)
    finish(engine)
    assert set(rows_of(graphs)) == {4, 1}
    for one in (*first, other, again, *more):
        assert one.new_tokens == alone(decoder, one, 0)


@pytest.mark.parametrize("name", ["model", "head"])
def test_a_perfect_draft_is_accepted_wherever_its_text_moves(name: str) -> None:
    # Errors in the draft's own memory cost acceptance only: nothing else sees them.
    decoder = Decoder(TARGET, TreeDrafter(TARGET, parse_tree("1x1"))) if name == "model" else decoder_of("head")
    limits = [5, 8, 40, 6, 44, 9]
    alone_first = decoder.generate([1, 2, 6], sampling=GREEDY, max_new_tokens=44)
    engine, _ = captured_engine(decoder, 6)
    texts = [sequence(decoder, row, [1, 2, 2 + row], GREEDY, limit=limit, seed=row) for row, limit in enumerate(limits)]
    for one in texts:
        engine.add(one)
    finish(engine)
    assert texts[4].speculation.rounds == alone_first.stats.passes
    assert texts[4].new_tokens == alone_first.token_ids


def test_moves_that_do_not_pay_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_WORTH_A_CAPTURE", 60)
    decoder = decoder_of("model")
    engine, graphs = captured_engine(decoder, 4)

    def run(limit: int) -> set[int]:
        del graphs.kinds[:]
        for row in range(4):
            engine.add(sequence(decoder, row, [1, 2, 3 + row], GREEDY, limit=limit if row == 3 else 3, seed=row))
        finish(engine)
        return set(rows_of(graphs))

    assert run(50) == {4}, "rounds of one row would be new"
    assert run(90) == {4, 1}
    assert run(50) == {4, 1}, "they are not any more"


def test_memories_of_a_hugging_face_model_move(short_blocks: object) -> None:
    target = HFModel(FAMILIES.get("llama").build(seed=1))
    decoder = Decoder(target, TreeDrafter(target, parse_tree("2x1")))
    engine, graphs = captured_engine(decoder, 5, reuse=True)
    texts: list[TokenSequence] = []
    for row, limit in enumerate([4, 6, 30, 5, 34]):
        texts.append(sequence(decoder, row, [5, 9, 11 + row, 3], GREEDY, limit=limit, seed=row))
        engine.add(texts[-1])
    finish(engine)
    assert set(rows_of(graphs)) == {5, 2, 1}
    for one in texts:
        assert one.new_tokens == alone(decoder, one, 0)


def test_tables_that_come_late_have_rows_for_all() -> None:
    """Penalties first asked for when few rows are at work: what is allocated then must serve when more are."""
    decoder = decoder_of("model")
    engine, _ = captured_engine(decoder, 4, reuse=True)
    asked = [([1, 2, 3], GREEDY, 20), ([2, 3, 4], PENALTIES, 20)]
    texts = [sequence(decoder, row, prompt, params, limit, seed=row) for row, (prompt, params, limit) in enumerate(asked)]
    for one in texts:
        engine.add(one)
        finish(engine)
    crowd = [sequence(decoder, 2 + row, [4, 5, row], PENALTIES, limit=14 + row, seed=2 + row) for row in range(4)]
    for one in crowd:
        engine.add(one)
    finish(engine)
    last = sequence(decoder, 9, [8, 8, 1], PENALTIES, limit=30, seed=9)
    engine.add(last)
    finish(engine)
    for one in (*texts, *crowd, last):
        assert one.new_tokens == alone(decoder, one, one.row)


def test_a_tabular_context_grows_with_its_sleeping_rows() -> None:
    context = TARGET.start(3, 8)
    assert isinstance(TARGET, TabularModel)
    context.prefill([[1, 2, 3], [4, 5], [6]])
    context.resize(1, 3)
    context.reserve(32)
    context.resize(3, 3)
    assert context.lengths == [3, 2, 1] and context.lengths_B.tolist() == [3, 2, 1]
    assert context.cache.tokens_BS[1, :2].tolist() == [4, 5]
    context.resize(2, 3)
    context.swap_rows(0, 2)
    assert context.lengths == [1, 2] and context.cache.tokens_BS[0, 0] == 6
    context.resize(3, 3)
    assert context.lengths == [1, 2, 3] and context.cache.tokens_BS[2, :3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["model", "head"])
def test_a_text_that_makes_room_is_not_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(name)
    engine, _ = captured_engine(decoder, 4, reuse=True)
    read = counted_reading(engine, monkeypatch)
    first = sequence(decoder, 0, [*GRAM_PROMPT, 3], GREEDY, limit=6, seed=0)
    second = sequence(decoder, 1, [9, 8, 7, 1], GREEDY, limit=60, seed=1)
    for one in (first, second):
        engine.add(one)
    finish(engine)
    assert len(engine.slots) == 1 and engine.slots[0] is second, "it has moved to where the first one was"
    del read[:]
    again = sequence(decoder, 2, [*first.tokens, 4], GREEDY, limit=9, seed=2)
    engine.add(again)
    finish(engine)
    assert sum(read) <= 3
    for one in (first, second, again):
        assert one.new_tokens == alone(decoder, one, 0)


@pytest.mark.parametrize("name", ["plain", "model", "head"])
def test_texts_let_go_while_they_are_read_leave_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(name)
    engine, _ = captured_engine(decoder, 4, reuse=True, chunk=5)
    read = counted_reading(engine, monkeypatch)
    long = [(3 * place) % 29 + 1 for place in range(60)]
    kept = [sequence(decoder, row, [5, 6, row], GREEDY, limit=50 + 30 * row, seed=row) for row in range(2)]
    gone = sequence(decoder, 2, long, GREEDY, limit=9, seed=2)
    for one in (*kept, gone):
        engine.add(one)
    for _ in range(6):
        engine.step()
    engine.end(gone, StopReason.CANCELLED, 0)
    finish(engine)
    assert len(engine.slots) == 1
    again = sequence(decoder, 3, long, GREEDY, limit=9, seed=3)
    others = [sequence(decoder, 4 + row, [7, row + 1], GREEDY, limit=30, seed=4 + row) for row in range(3)]
    for one in (again, *others):
        engine.add(one)
    finish(engine)
    assert max(read) <= 6, "prompts are read in chunks; a head sees the last token of one again"
    for one in (*kept, again, *others):
        assert one.new_tokens == alone(decoder, one, 0)


@pytest.mark.parametrize("name", ["plain", "model", "head"])
def test_slots_that_come_back_empty_keep_rounds_captured(name: str) -> None:
    decoder = decoder_of(name)
    engine, graphs = captured_engine(decoder, 8, reuse=True)

    def turn() -> tuple[int, int]:
        before = len(graphs.kinds), graphs.replays
        for row in range(3):
            engine.add(sequence(decoder, row, [4, 5, 6 + row], GREEDY, limit=[3, 3, 40][row], seed=row))
        finish(engine)
        return len(graphs.kinds) - before[0], graphs.replays - before[1]

    for _ in range(3):
        turn()
    rounds, replays = turn()
    assert rounds == replays > 10 and set(rows_of(graphs)) == {8, 1}


@pytest.mark.parametrize(
    ("name", "seed", "turns"),
    [("plain", 0, 40), ("assistant", 0, 12), *all_slow(["plain", "model", "head", "assistant"], range(12), [160])],
)
def test_whatever_happens_to_others(name: str, seed: int, turns: int) -> None:
    """Texts come, go on, are let go while they wait, are read or run; prompts are of any length, one token included."""
    decoder, chance = decoder_of(name), random.Random(seed)
    engine, _ = captured_engine(decoder, chance.choice([3, 5, 8]), reuse=True, chunk=chance.choice([3, 7, None]))
    texts: list[TokenSequence] = []
    for _ in range(turns):
        for _ in range(chance.choice([0, 0, 0, 1, 1, 4])):
            prompt = [chance.randrange(1, 32) for _ in range(chance.choice([1, 2, 5, 30]))]
            ended = [one for one in texts if one.done and one.new_tokens]
            if ended and chance.random() < 0.5:
                prompt = [*chance.choice(ended).tokens[: chance.choice([8, 1000])], 1 + seed]
            params = chance.choice([GREEDY, GREEDY, SamplingParams(), PENALTIES])
            texts.append(sequence(decoder, len(texts), prompt, params, limit=chance.choice([1, 4, 12, 40]), seed=len(texts)))
            engine.add(texts[-1])
        if chance.random() < 0.15 and any(not one.done for one in texts) and engine.stats.rounds:
            one = chance.choice([one for one in texts if not one.done])
            engine.end(one, StopReason.CANCELLED, len(one.new_tokens))
        if not engine.done:
            engine.step()
    for _ in range(5000):
        if not engine.done:
            engine.step()
    assert len(texts) > turns * 5 // 16 and engine.done
    for one in texts:
        expected = alone(decoder, one, one.row)
        whole = one.stop_reason != StopReason.CANCELLED
        assert one.new_tokens == (expected if whole else expected[: len(one.new_tokens)])


@pytest.mark.parametrize("name", ["static, decision", "static head, decision"])
def test_rows_stay_where_rounds_could_be_captured_and_are_not(name: str) -> None:
    """What such rounds keep by row does not stay where it is, so that rows could not come back as they were."""
    decoder = DYNAMIC_DECODERS[name]()
    engine, graphs = captured_engine(decoder, 4)
    assert engine.slots.sizes == [4] and not engine.workspace.elastic
    texts = [sequence(decoder, row, [1, 2, 3 + row], GREEDY, limit=limit, seed=row) for row, limit in enumerate([3, 4, 5, 50])]
    for one in texts:
        engine.add(one)
    finish(engine)
    assert len(engine.slots) == 4 and graphs.replays == 0
    assert [one.new_tokens for one in texts] == [alone(decoder, one, 0) for one in texts]


@pytest.mark.parametrize("name", ["plain", "model", "head", "adaptive model", "adaptive head", "self-draft"])
def test_rows_that_nobody_captures_follow_the_texts(name: str) -> None:
    decoder = {**DECODERS, "plain": lambda: decoder_of("plain")}[name]().replace(eos_token_ids=())
    engine = open_engine(decoder, slots=5, elastic=True)
    texts = [
        sequence(decoder, row, [3, 1, 4 + row], SamplingParams(), limit, seed=row) for row, limit in enumerate([4, 7, 9, 30, 5])
    ]
    for one in texts:
        engine.add(one)
    widths = widths_of(engine)
    assert widths[0] == 5 and widths[-1] == (4 if name == "self-draft" else 1)
    assert [one.new_tokens for one in texts] == [alone(decoder, one, one.row) for one in texts]
