"""Sequences that join and leave between rounds: each gets the text that it would get alone, whoever shares its slots."""

import random
from typing import Any

import numpy as np
import pytest

from covering import all_slow, covering
from families import FAMILIES
from polydraft.certify.reference import next_distributions
from polydraft.engine import Decoder, Engine, StopReason, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.models.hf import HFModel
from polydraft.models.prefixes import Prefixes
from polydraft.sampling import IDLE, RowParams, SamplingParams

from .checks import text_p_values
from .setups import ADMITTED, DRAFT, GRAM_PROMPT, TARGET
from .test_mixed_rows import DECODERS, PARAMS

pytestmark = pytest.mark.usefixtures("short_blocks")


def open_engine(decoder: Decoder, slots: int, *, reuse: bool = False, **options: Any) -> Engine:
    """Open an engine; with `reuse` texts find their beginnings where others have read them."""
    workspace = Workspace(decoder.target, decoder.drafter, RowParams((IDLE,) * slots))
    if reuse:
        options["prefixes"] = Prefixes(2**30)
    return Engine(workspace, walk=decoder.walk, **options)


def sequence(decoder: Decoder, row: int, prompt: list[int], params: SamplingParams, limit: int, seed: int) -> TokenSequence:
    return decoder.sequence(prompt, params, seed=seed, max_new_tokens=limit, row=row)


def requests(count: int) -> list[dict[str, Any]]:
    chance = random.Random(3)
    return [
        {
            "prompt": [chance.randrange(32) for _ in range(chance.randrange(1, 9))] + list(GRAM_PROMPT)[: chance.randrange(12)],
            "params": PARAMS[number % len(PARAMS)],
            "limit": chance.randrange(1, 20),
            "seed": 70 + number,
        }
        for number in range(count)
    ]


def driven(engine: Engine, sequences: list[TokenSequence], seed: int) -> None:
    """Let them come at odd times, several at once now and then."""
    chance, coming = random.Random(seed), list(sequences)
    for _ in range(2000):
        for _ in range(chance.choice([0, 0, 1, 1, 3])):
            if coming:
                engine.add(coming.pop(0))
        if engine.done and not coming:
            return
        if not engine.done:
            engine.step()
    raise AssertionError("the loop does not end")


ADMISSIONS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "in chunks": {"chunk": 4, "reuse": True},
    "elastic": {"elastic": True, "chunk": 9},
}


QUICK = [*ADMITTED, "lookup+model", "race, block", "translated"]
"""All kinds of memories, with what they take by themselves; other schemes, walks and unions have rows in other tests."""


@pytest.mark.parametrize(
    ("name", "admission"),
    [*covering(QUICK, ADMISSIONS), *all_slow([name for name in DECODERS if name not in QUICK], ADMISSIONS)],
)
def test_a_sequence_gets_its_own_text_whoever_comes_and_goes(name: str, admission: str) -> None:
    decoder, asked = DECODERS[name](), requests(len(PARAMS))
    engine = open_engine(decoder, slots=3, **ADMISSIONS[admission])
    sequences = [sequence(decoder, row, **one) for row, one in enumerate(asked)]
    driven(engine, sequences, seed=len(name))
    for found, one in zip(sequences, asked, strict=True):
        alone = decoder.generate(one["prompt"], sampling=one["params"], max_new_tokens=one["limit"], seed=[one["seed"]])
        assert found.new_tokens == alone.token_ids
        assert found.stop_reason == alone.stop_reason
    assert engine.stats.new_tokens == sum(len(found.new_tokens) for found in sequences)


# Slow: texts are those of a row alone, above, whose distribution is tested for every drafter.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "self-draft", "head", "lookup+model", "adaptive model"])
def test_texts_of_a_full_house_follow_the_target_distribution(name: str) -> None:
    decoder = DECODERS[name]().replace(eos_token_ids=())
    drawn = [params for params in PARAMS if params.temperature > 0 and not params.processors][:3]
    engine, count = open_engine(decoder, slots=60), 900
    prompt = list(GRAM_PROMPT)
    # Lengths differ, so that slots are freed at different times; the first four tokens are tested.
    sequences = [
        sequence(decoder, row, prompt, drawn[row % len(drawn)], limit=4 + row % 3, seed=1000 + row) for row in range(count)
    ]
    for one in sequences:
        engine.add(one)
    while not engine.done:
        engine.step()
    lowest = 1.0
    for number, params in enumerate(drawn):
        tokens_NL = np.array([one.new_tokens[:4] for one in sequences[number :: len(drawn)]])
        p_values = text_p_values(
            tokens_NL,
            lambda new_NL, params=params: next_distributions(TARGET, prompt, new_NL, params),
            lambda new_NL: next_distributions(DRAFT, prompt, new_NL, SamplingParams()),
        )
        lowest = min(lowest, *p_values)
    # Three kinds of sequences, thirteen tests each, five drafters: false alarm below 1e-4 together.
    assert lowest > 1e-4 / (13 * 3 * 5)


def test_a_hugging_face_model_admits_sequences_too() -> None:
    target = HFModel(FAMILIES.get("llama").build(seed=1))
    decoder = Decoder(target)
    chance = random.Random(5)
    prompts = [[chance.randrange(3, 60) for _ in range(chance.randrange(1, 30))] for _ in range(8)]
    greedy = SamplingParams(temperature=0)
    sequences = [sequence(decoder, row, prompt, greedy, limit=5 + row, seed=row) for row, prompt in enumerate(prompts)]
    driven(open_engine(decoder, slots=3), sequences, seed=2)
    for found, prompt in zip(sequences, prompts, strict=True):
        alone = decoder.generate(prompt, sampling=greedy, max_new_tokens=found.max_new_tokens)
        assert found.new_tokens == alone.token_ids


def test_a_sequence_can_be_ended_while_it_waits_or_runs() -> None:
    decoder = DECODERS["model"]()
    engine = open_engine(decoder, slots=1)
    first, second, third = (sequence(decoder, row, [1, 2, 3], SamplingParams(), limit=30, seed=row) for row in range(3))
    early = sequence(decoder, 3, [1, 2, 3], SamplingParams(), limit=30, seed=3)
    engine.add(early)
    engine.end(early, StopReason.CANCELLED, 0)  # before anybody was let in
    for one in (first, second, third):
        engine.add(one)
    engine.step()
    engine.end(second, StopReason.CANCELLED, 0)
    engine.end(first, StopReason.CANCELLED, 1)
    while not engine.done:
        engine.step()
    assert len(first.new_tokens) == 1 and second.new_tokens == early.new_tokens == []
    alone = decoder.generate([1, 2, 3], max_new_tokens=30, seed=[2])
    assert third.new_tokens == alone.token_ids
