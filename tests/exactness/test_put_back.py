"""A text that gives its memory up for others, and is read again, is the text that it would have been."""

import random
from dataclasses import replace

import pytest
import torch

from covering import keeping
from polydraft.engine import Decoder, Engine, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.models.blocks import Pool
from polydraft.sampling import IDLE, RowParams, SamplingParams

from .setups import ADMITTED, EVERY_DRAFTER, GRAM_PROMPT, PENALTIES, PROMPT, make_decoder
from .test_admission import sequence

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=20),
    replace(PENALTIES, min_tokens=9),
    SamplingParams(top_p=0.9, logit_bias={5: 2.0}),
]


def texts(decoder: Decoder) -> list[TokenSequence]:
    prompts = [[4, 17], PROMPT, list(GRAM_PROMPT), [30, 2, 2, 8]]
    return [
        sequence(decoder, number, prompt, params, limit=30, seed=7 + number)
        for number, (prompt, params) in enumerate(zip(prompts, KINDS, strict=True))
    ]


def generate(decoder: Decoder, some: list[TokenSequence], chance: random.Random | None = None) -> list[int]:
    """Generate some texts, putting one back now and then if there is a chance; return which ones that were."""
    params = RowParams((IDLE,) * 3)
    workspace = Workspace(decoder.target, decoder.drafter, params, decoder.graphs, decoder.ahead, Pool(10**9))
    engine, gone = Engine(workspace, walk=decoder.walk, elastic=True, chunk=16), list[int]()
    for one in some:
        engine.add(one)
    for _ in range(500):
        if engine.done:
            return gone
        engine.step()
        if chance is not None and not engine._launched and any(engine.slots.running()) and chance.random() < 0.4:
            with torch.inference_mode():
                engine._evict()
            gone.append(engine.waiting[0].row)
    raise AssertionError("the loop does not end")


@pytest.mark.parametrize("name", keeping(EVERY_DRAFTER, *ADMITTED, "lookup+model", "suffix", "self-draft"))
def test_a_text_does_not_change_by_being_put_back(name: str) -> None:
    decoder = make_decoder(drafter=name)
    wanted, gone = texts(decoder), set[int]()
    generate(decoder, wanted)
    for order in (1, -1):  # it is the youngest that have to go
        found = texts(decoder)
        gone |= set(generate(decoder, found[::order], random.Random(3)))
        assert [one.new_tokens for one in found] == [one.new_tokens for one in wanted]
    assert gone == {0, 1, 2, 3}
