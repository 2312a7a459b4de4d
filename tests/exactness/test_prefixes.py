"""Beginnings that texts share are read once, and nobody's text is another one for it."""

import random
from typing import Any

import pytest
import torch

from covering import all_slow, covering
from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Engine, StopReason, TokenSequence
from polydraft.models.hf import HFModel
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import SamplingParams
from polydraft.trees import parse_tree

from .setups import HEAD, PENALTIES, TARGET
from .test_admission import open_engine, sequence
from .test_mixed_rows import DECODERS, PARAMS
from .test_rows import captured_engine, counted_reading, decoder_of
from .test_slots import alone, finish, with_a_hole

pytestmark = pytest.mark.usefixtures("short_blocks")

GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams()
STEM = [(5 * place + place // 7) % 29 + 1 for place in range(50)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short texts have many pieces."""
    for module in ("models.prefixes", "engine.slots"):
        monkeypatch.setattr(f"polydraft.{module}.BLOCK", 8)


def endless(decoder: Decoder) -> Decoder:
    return decoder.replace(eos_token_ids=())


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("name", ["none", "model", "head", "translated"])
def test_a_burst_reads_a_shared_prompt_once(name: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = endless(DECODERS[name]())
    engine = open_engine(decoder, slots=6, reuse=True, chunk=chunk, elastic=True)
    read = counted_reading(engine, monkeypatch)
    texts = [sequence(decoder, row, [*STEM, 3 + row, row], DRAWN, limit=9, seed=row) for row in range(6)]
    for one in texts:
        engine.add(one)
    finish(engine)
    repeated = 4 if name == "head" else 0  # a head sees the last token of each part again
    assert sum(read) <= len(STEM) + 6 * (2 + 8) + 6 * repeated < 2 * len(STEM) + 12 + 6 * repeated
    assert [one.cached for one in texts] == [0, 48, 48, 48, 48, 48]
    assert [one.new_tokens for one in texts] == [alone(decoder, one, row) for row, one in enumerate(texts)]


def test_a_long_system_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # blocks of their real size
    decoder = endless(DECODERS["model"]())
    engine = open_engine(decoder, slots=4, reuse=True, chunk=256)
    read = counted_reading(engine, monkeypatch)
    system = [(7 * place + place // 31) % 32 for place in range(2000)]
    texts = [sequence(decoder, row, [*system, row, *range(20)], GREEDY, limit=5, seed=row) for row in range(12)]
    for one in texts:
        engine.add(one)
    finish(engine)
    # 2,000 tokens are 31 blocks and 16 tokens more.
    assert sum(read) <= 2000 + 12 * (16 + 21), sum(read)
    assert [one.new_tokens for one in texts] == [alone(decoder, one, 0) for one in texts]


def test_nobody_waits_for_a_prompt_that_is_much_longer_than_what_is_shared() -> None:
    decoder = endless(DECODERS["none"]())
    engine = open_engine(decoder, slots=2, reuse=True, chunk=32)
    long = sequence(decoder, 0, [*STEM, *range(30), *STEM, *STEM], GREEDY, limit=5, seed=0)
    short = sequence(decoder, 1, [*STEM[:8], 3], GREEDY, limit=5, seed=1)
    engine.add(long)
    engine.step()
    engine.add(short)
    for _ in range(2):
        engine.step()
    assert long.is_fresh and short.new_tokens and not short.cached
    finish(engine)


@pytest.mark.parametrize("ending", ["cancelled while it is read", "cancelled at work", "failed"])
def test_who_waits_for_a_prompt_goes_on_without_it(ending: str) -> None:
    decoder = endless(with_a_hole(7))
    engine = open_engine(decoder, slots=3, reuse=True, chunk=16, isolate=True)
    sane = SamplingParams(temperature=0, logit_bias={7: -torch.inf})
    stem = [1 + token % 6 for token in STEM]
    first = sequence(decoder, 0, [*stem, 7] if ending == "failed" else [*stem, 5, 5], sane, limit=30, seed=0)
    others = [sequence(decoder, 1 + row, [*stem, 2, row], sane, limit=8, seed=row) for row in range(3)]
    for one in (first, *others):
        engine.add(one)
    engine.step()
    if ending == "cancelled at work":
        while len(first.new_tokens) < 4:
            engine.step()
    if ending != "failed":
        engine.end(first, StopReason.CANCELLED, len(first.new_tokens))
    finish(engine)
    assert first.stop_reason is (StopReason.FAILED if ending == "failed" else StopReason.CANCELLED)
    assert [one.new_tokens for one in others] == [alone(decoder, one, 0) for one in others]
    assert sorted(one.cached for one in others) == ([48, 48, 50] if ending == "cancelled at work" else [0, 48, 48])


def seven_at_last(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Let a text say nothing but 3 for a while, and then 7."""
    only = torch.full_like(scores, -torch.inf)
    only[:, 3 if input_ids.shape[1] < 21 else 7] = 0.0
    return only + 0 * scores  # which may be NaN


def test_what_fails_is_never_kept() -> None:
    """Neither a prompt whose first round fails nor a text that fails later on."""
    decoder, prefixes = endless(with_a_hole(7)), Prefixes(2**20)
    engine = open_engine(decoder, slots=2, isolate=True, prefixes=prefixes)
    at_once = sequence(decoder, 0, [*STEM[:20], 7], GREEDY, limit=9, seed=1)
    later = sequence(decoder, 1, [3] * 17, SamplingParams(processors=(seven_at_last,)), limit=9, seed=1)
    for one in (at_once, later):
        engine.add(one)
    finish(engine)
    context = engine.workspace.memory.context
    assert at_once.stop_reason is later.stop_reason is StopReason.FAILED
    assert prefixes.known(context, "", at_once.prompt) == 0
    assert later.new_tokens in ([3] * 3, [3] * 4)
    assert prefixes.known(context, "", later.tokens) == 16, "what a sound round has seen of the prompt, and no more"


@pytest.mark.parametrize("name", ["model", "head"])
def test_texts_of_others_are_not_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = endless(DECODERS[name]())
    engine = open_engine(decoder, slots=1, reuse=True)
    read = counted_reading(engine, monkeypatch)
    for number, (space, found) in enumerate([("a", 0), ("b", 0), (None, 0), (None, 0), ("b", 51), ("a", 51), ("", 0)]):
        one = sequence(decoder, number, [*STEM, 9, 9], DRAWN, limit=6, seed=number)
        one.space = space
        del read[:]
        engine.add(one)
        finish(engine)
        assert one.cached == found and (sum(read) >= len(STEM)) == (found == 0), (number, read)
        assert one.new_tokens == alone(decoder, one, number)


def drafting(name: str) -> Decoder:
    """Make a decoder whose draft is its target, or a head."""
    if name == "head":
        return endless(Decoder(TARGET, TreeDrafter(HEAD, parse_tree("2x2"))))
    return endless(Decoder(TARGET, TreeDrafter(TARGET, parse_tree("1x1x1"))))


@pytest.mark.parametrize(
    ("name", "params", "captured"), covering([("model", GREEDY), ("model", DRAWN), ("head", DRAWN)], [False, True])
)
def test_drafts_are_as_good_after_a_hit(name: str, params: SamplingParams, captured: bool) -> None:
    """Errors in the draft's own memory cost acceptance, and change what a seed gives; nothing else sees them."""
    decoder = drafting(name)
    engine = captured_engine(decoder, 3, reuse=True)[0] if captured else open_engine(decoder, slots=3, reuse=True)
    prompts = [STEM, [*STEM, 4, 4], [*STEM[:33], 9, 9], [*STEM, 4, 4], STEM[:20]]
    fresh = []
    for prompt in prompts:
        fresh.append(sequence(decoder, 0, prompt, params, limit=30, seed=0))
        unshared = open_engine(decoder, slots=3)
        unshared.add(fresh[-1])
        finish(unshared)
    for number, (prompt, expected) in enumerate(zip(prompts, fresh, strict=True)):
        one = sequence(decoder, number, prompt, params, limit=30, seed=0)
        engine.add(one)
        finish(engine)
        assert one.cached == [0, 50, 33, 51, 19][number]
        assert one.new_tokens == expected.new_tokens and one.speculation == expected.speculation
        assert name == "head" or one.speculation.acceptance_histogram == [0, 0, 0, one.speculation.passes]
    turn = sequence(decoder, 9, [*one.tokens, 3, 3], params, limit=30, seed=0)
    engine.add(turn)
    finish(engine)
    assert turn.cached >= len(one.tokens) - 1 and turn.new_tokens == alone(decoder, turn, 0)


def test_lanes_share_what_the_target_has_read() -> None:
    prefixes, model, plain = Prefixes(2**20), endless(DECODERS["model"]()), endless(DECODERS["none"]())
    for number, decoder in enumerate([model, plain, endless(Decoder(TARGET, TreeDrafter(HEAD, parse_tree("2x2")))), model]):
        engine = open_engine(decoder, slots=2, prefixes=prefixes)
        one = sequence(decoder, number, [*STEM, number], DRAWN, limit=12, seed=number)
        engine.add(one)
        finish(engine)
        assert (one.cached > 0) == (number > 0) and one.new_tokens == alone(decoder, one, number)


def test_the_target_of_transformers_shares_too() -> None:
    target = HFModel(FAMILIES.get("llama").build(seed=1))
    decoder = Decoder(target, TreeDrafter(target, parse_tree("2x1")))
    stem = [3 + token for token in STEM]
    for engine in (open_engine(decoder, slots=3, reuse=True, chunk=20), captured_engine(decoder, 3, reuse=True)[0]):
        texts = [sequence(decoder, row, [*stem, 7, 5 + row], GREEDY, limit=12, seed=row) for row in range(6)]
        for one in texts:
            engine.add(one)
        finish(engine)
        assert sorted(one.cached for one in texts) == [0, 48, 48, 48, 48, 48] or texts[-1].cached > 48
        assert [one.new_tokens for one in texts] == [alone(decoder, one, 0) for one in texts]


@pytest.mark.parametrize(("name", "captured", "seed"), [
    *covering(["plain", "model", "head", "translated", "head@peagle"], [False, True], [1, 2, 3]),
    *all_slow(["plain", "model", "head", "translated", "head@peagle", "head@dflash", "lookup+model"], [False, True], range(4)),
])  # fmt: skip
def test_whoever_comes_goes_and_shares(name: str, captured: bool, seed: int) -> None:
    """Texts with common beginnings come, go on and are let go, with room for many copies, or hardly any, or none."""
    chance = random.Random(seed)
    decoder = endless(decoder_of(name) if name == "plain" else DECODERS[name]())
    prefixes = Prefixes(chance.choice([0, 3000, 20000, 2**20]))
    options: dict[str, Any] = {"chunk": chance.choice([5, 16, None]), "prefixes": prefixes}
    slots = chance.choice([1, 3, 6])
    engine: Engine = (
        captured_engine(decoder, slots, **options)[0] if captured else open_engine(decoder, slots, elastic=True, **options)
    )
    stems = [[chance.randrange(1, 32) for _ in range(chance.choice([9, 30, 60]))] for _ in range(3)]
    texts: list[TokenSequence] = []
    for _ in range(16):
        for _ in range(chance.choice([0, 0, 1, 1, 5])):
            ended = [one for one in texts if one.done and one.new_tokens]
            stem = chance.choice(stems) if not ended or chance.random() < 0.7 else list(chance.choice(ended).tokens)
            prompt = [*stem[: chance.choice([8, 17, 999])], *(chance.randrange(1, 32) for _ in range(chance.choice([1, 2, 9])))]
            params = chance.choice([GREEDY, DRAWN, PENALTIES, PARAMS[2]])
            texts.append(sequence(decoder, len(texts), prompt, params, limit=chance.choice([1, 5, 20]), seed=len(texts)))
            texts[-1].space = chance.choice(["", "", "", "other", None])
            engine.add(texts[-1])
        if chance.random() < 0.2 and any(not one.done for one in texts) and engine.stats.rounds:
            one = chance.choice([one for one in texts if not one.done])
            engine.end(one, StopReason.CANCELLED, len(one.new_tokens))
        if not engine.done:
            engine.step()
        assert prefixes.nbytes <= prefixes.most
    for _ in range(5000):
        if not engine.done:
            engine.step()
    assert engine.done
    for one in texts:
        expected, whole = alone(decoder, one, one.row), one.stop_reason != StopReason.CANCELLED
        assert one.new_tokens == (expected if whole else expected[: len(one.new_tokens)])
    assert prefixes.most < 2**20 or any(one.cached for one in texts)
