"""Texts share a pool: when it runs dry new ones wait, the youngest give theirs up, and all come to the ends they would have."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from covering import keeping
from polydraft.engine import Decoder, Engine, StopReason, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.loading import load
from polydraft.models.blocks import Pool
from polydraft.models.hf import HFModel
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, RowParams, SamplingParams

SLOTS, LONGEST = 4, 240
PARAMS = [SamplingParams(temperature=0), SamplingParams(top_k=30), SamplingParams(temperature=0.7, repetition_penalty=1.2)]
WAYS = {
    "model": {"draft": "early-exit:1", "tree": "3x2x1"},
    "none": {"draft": "none"},
    "lookup": {"draft": "none", "drafter": "lookup"},
    "torch's layers": {"draft": "none", "lean": False},
}


def made(folder: str, way: str) -> Decoder:
    """Return the decoder of a way; a model without layers of our own says late what its keys look like."""
    options = dict(WAYS[way])
    lean = options.pop("lean", True)
    decoder = load(folder, dtype="float32", **options)
    return decoder if lean else decoder.replace(target=HFModel(decoder.target.hf_model, lean=False, native=False))


def opened(decoder: Decoder, texts: float, **options: Any) -> tuple[Engine, Pool]:
    """Return an engine with memory for so many of the longest texts beside slots that idle."""
    pool = Pool(10**12)
    workspace = Workspace(decoder.target, decoder.drafter, RowParams((IDLE,) * SLOTS), decoder.graphs, decoder.ahead, pool)
    workspace.reserve(LONGEST)
    engine = Engine(workspace, walk=decoder.walk, elastic=True, isolate=True, **options)
    first = decoder.sequence([1, 2, 3], IDLE, seed=0, max_new_tokens=1)  # some storage is known by then only
    engine.add(first)
    finish(engine, [first])
    idle = SLOTS * workspace.idle_bytes
    pool.size = idle + int(texts * workspace.room(LONGEST, 2))
    pool.least = idle + workspace.room(LONGEST, 2)
    return engine, pool


def finish(engine: Engine, sequences: list[TokenSequence]) -> None:
    pool = engine.workspace.pool
    assert pool is not None
    for _ in range(3000):
        if engine.done:
            break
        engine.step()
        assert pool.used <= pool.size
    assert all(one.done for one in sequences), "the loop does not end"


def asked(decoder: Decoder, count: int, **options: Any) -> list[TokenSequence]:
    chance, found = random.Random(3), []
    for number in range(count):
        prompt = [chance.randrange(3, 60) for _ in range(chance.choice([5, 40, 90]))]
        params = replace(PARAMS[number % len(PARAMS)], min_tokens=30)
        limit = chance.randrange(40, LONGEST - 100)
        found.append(decoder.sequence(prompt, params, seed=number, max_new_tokens=limit, row=number, **options))
    return found


def alone(decoder: Decoder, one: TokenSequence) -> list[int]:
    options = {"sampling": one.params, "max_new_tokens": one.max_new_tokens, "seed": [one.row]}
    return decoder.generate(list(one.prompt), **options).token_ids


@pytest.mark.parametrize(("way", "shared"), keeping([*product(WAYS, (True, False))], ("model", True), ("lookup", False)))
def test_texts_are_the_same_however_little_memory_there_is(roomy: str, way: str, shared: bool) -> None:
    decoder = made(roomy, way)
    engine, pool = opened(decoder, 1.3, chunk=64, prefixes=Prefixes(10**8) if shared else None)
    texts = asked(decoder, 6)
    for one in texts:
        engine.add(one)
    finish(engine, texts)
    assert pool.evictions and not [one for one in pool.evicted if not one.done]
    assert pool.used <= pool.least - engine.workspace.room(LONGEST, 2), "texts leave nothing behind"
    assert [one.new_tokens for one in texts] == [alone(decoder, one) for one in texts]


def test_a_new_text_waits_for_memory_and_for_those_that_gave_theirs_up(roomy: str) -> None:
    decoder = load(roomy, dtype="float32", draft="none").replace(eos_token_ids=())
    engine, pool = opened(decoder, 1.5)
    first, second = (decoder.sequence([5, 6, number], PARAMS[1], seed=1, max_new_tokens=230) for number in range(2))
    for one in (first, second):
        engine.add(one)
    while not pool.evictions:
        engine.step()
    assert list(pool.evicted) == [second] == list(engine.waiting), "the youngest goes"
    late = decoder.sequence([9], IDLE, seed=0, max_new_tokens=2)
    engine.add(late)
    engine.step()
    assert late.is_fresh and not first.done, "there would be memory for it, but the other comes first"
    finish(engine, [first, second, late])
    assert late.done and pool.evictions == 1, "it came back when there was memory up to its end"


def test_a_text_may_be_cancelled_while_it_waits_for_memory(roomy: str) -> None:
    decoder = load(roomy, dtype="float32", draft="none").replace(eos_token_ids=())
    engine, pool = opened(decoder, 1.5)
    idle = pool.used
    texts = [decoder.sequence([5, 6, number], PARAMS[1], seed=1, max_new_tokens=230) for number in range(3)]
    for one in texts:
        engine.add(one)
    while not pool.evictions:
        engine.step()
    gone = engine.waiting[0]
    kept = gone.new_tokens
    engine.end(gone, StopReason.CANCELLED, len(kept))
    assert gone.stop_reason is StopReason.CANCELLED and gone.new_tokens == kept
    finish(engine, texts)
    assert pool.used == idle


def test_a_long_prompt_gives_its_memory_up_while_it_is_read(roomy: str) -> None:
    decoder = load(roomy, dtype="float32", draft="none").replace(eos_token_ids=())
    engine, pool = opened(decoder, 1.2, chunk=16)
    first = decoder.sequence([5], PARAMS[0], seed=1, max_new_tokens=235)
    late = decoder.sequence(list(range(3, 60)) * 3, PARAMS[0], seed=1, max_new_tokens=30, prompt_top_logprobs=2)
    engine.add(first)
    while len(first.tokens) < 60:
        engine.step()
    engine.add(late)
    finish(engine, [first, late])
    assert pool.evictions and late.new_tokens == alone(decoder, late)
    assert len(late.prompt_logprobs) == len(late.prompt) - 1, "each token's is told once"


def test_without_memory_for_one_text_the_engine_says_so(roomy: str) -> None:
    decoder = load(roomy, dtype="float32", draft="none").replace(eos_token_ids=())
    engine, pool = opened(decoder, 1.5)
    engine.add(decoder.sequence([5], IDLE, seed=1, max_new_tokens=200))
    engine.step()
    pool.least = pool.size + 1
    with pytest.raises(torch.OutOfMemoryError):
        pool.shrink()


def test_idle_slots_need_memory_too(roomy: str) -> None:
    decoder = load(roomy, dtype="float32", draft="none")
    params = RowParams((IDLE,) * SLOTS)
    workspace = Workspace(decoder.target, decoder.drafter, params, decoder.graphs, decoder.ahead, Pool(1000))
    with pytest.raises(torch.OutOfMemoryError):
        workspace.reserve(LONGEST)
