"""Beginnings that texts share, where rounds are captured and the next one may be under way while they are copied."""

import random

import pytest
import torch

from families import FAMILIES
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder, Engine, StopReason, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.models.hf import HFModel
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.serve.lane import Lane, LaneOptions
from polydraft.trees import parse_tree

from .test_round import head_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=0.8)
STEM = [2 + (7 * place + place // 9) % 60 for place in range(150)]


def target_of(kind: str) -> tuple[HFModel, Decoder]:
    """Make a decoder whose text does not depend on how its prompt was read: small models in float32 are invariant too."""
    target = HFModel(FAMILIES.get("llama").build(max_position_embeddings=512).to("cuda"), invariant=True)
    if kind == "none":
        return target, Decoder(target)
    drafter = head_tree(target, parse_tree("3x1")) if kind == "head" else TreeDrafter(target, parse_tree("1x1x1"))
    return target, Decoder(target, drafter)


def finish(engine: Engine, texts: list[TokenSequence]) -> None:
    for one in texts:
        engine.add(one)
    while not engine.done:
        engine.step()


@pytest.mark.parametrize("kind", ["none", "model", "head"])
def test_texts_and_acceptance_are_those_of_texts_that_share_nothing(kind: str) -> None:
    target, decoder = target_of(kind)
    prompts = [[*STEM[: 40 + 17 * number], 3 + number, 5] for number in range(6)] + [[*STEM, 9, number] for number in range(6)]

    def texts(space: str | None) -> list[TokenSequence]:
        return [
            decoder.sequence(prompt, [GREEDY, DRAWN][row % 2], seed=row, max_new_tokens=30, row=row, space=space)
            for row, prompt in enumerate(prompts)
        ]

    def engine() -> Engine:
        workspace = Workspace(target, decoder.drafter, RowParams((IDLE,) * 4))
        return Engine(workspace, elastic=True, chunk=96, prefixes=Prefixes(2**28))

    apart, shared = texts(None), texts("")
    finish(engine(), apart)
    one = engine()
    finish(one, shared)
    assert one.stats.replayed_rounds > 0 and sum(text.cached for text in shared) > 6 * 128
    assert [text.new_tokens for text in shared] == [text.new_tokens for text in apart]
    again = texts("")
    finish(one, again)
    assert all(text.cached == len(text.prompt) - 1 for text in again)
    assert [text.new_tokens for text in again] == [text.new_tokens for text in apart]
    if kind == "model":
        assert all(len(text.speculation.acceptance_histogram) <= 4 and text.speculation.rounds == 8 for text in again[::2])
    turns = [
        decoder.sequence([*text.tokens, 4, 4], GREEDY, seed=0, max_new_tokens=20, row=row) for row, text in enumerate(again)
    ]
    finish(one, turns)
    for turn in turns:
        assert turn.cached >= len(turn.prompt) - 3
        alone = decoder.generate(list(turn.prompt), sampling=GREEDY, max_new_tokens=20)
        assert turn.new_tokens == alone.token_ids


@pytest.mark.parametrize("kind", ["none", "head"])
def test_texts_that_come_and_go_with_little_room(kind: str) -> None:
    target, decoder = target_of(kind)
    chance, each = random.Random(5), 2**14
    workspace = Workspace(target, decoder.drafter, RowParams((IDLE,) * 5))
    prefixes = Prefixes(40 * each)
    engine = Engine(workspace, elastic=True, chunk=64, prefixes=prefixes)
    texts: list[TokenSequence] = []
    for _ in range(60):
        for _ in range(chance.choice([0, 0, 1, 3])):
            stem = chance.choice([STEM, STEM[::-1], *([one.tokens for one in texts if one.done][-1:])])
            prompt = [*stem[: chance.choice([30, 64, 100, 150])], *(chance.randrange(2, 60) for _ in range(3))]
            row = len(texts)
            texts.append(decoder.sequence(prompt, GREEDY, seed=row, max_new_tokens=20, row=row))
            engine.add(texts[-1])
        running = [one for one in texts if not one.done]
        if running and engine.stats.rounds and chance.random() < 0.2:
            one = chance.choice(running)
            engine.end(one, StopReason.CANCELLED, len(one.new_tokens))
        if not engine.done:
            engine.step()
        assert prefixes.nbytes <= prefixes.most
    finish(engine, [])
    assert any(one.cached for one in texts)
    for one in texts:
        alone = decoder.generate(list(one.prompt), sampling=GREEDY, max_new_tokens=20).token_ids
        assert one.new_tokens == (alone if one.stop_reason != StopReason.CANCELLED else alone[: len(one.new_tokens)])


def test_a_server_that_has_warmed_up_keeps_nothing_of_it() -> None:
    _, decoder = target_of("head")
    prefixes = Prefixes(2**28)
    lane = Lane(decoder, LaneOptions(slots=4, slot_tokens=400, chunk_tokens=256), prefixes=prefixes)
    lane.reserve()
    lane.warm_up([GREEDY], lambda: False)
    assert prefixes.nbytes == 0 and not lane.busy
