"""Prompts get their log-probabilities once, from the target's own pass, however they are read and whatever is known of them."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.exactness.test_admission import driven, open_engine
from tests.exactness.test_mixed_rows import DECODERS

from families import FAMILIES
from polydraft.engine import Decoder, Engine, StopReason, TokenSequence, logprobs
from polydraft.models.hf import HFModel
from polydraft.sampling import SamplingParams

CHANCE = random.Random(5)
PROMPTS = [[CHANCE.randrange(32) for _ in range(length)] for length in (1, 2, 5, 11, 23, 9)]
READINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "in parts": {"chunk": 4, "reuse": True},
    "elastic": {"elastic": True, "chunk": 9},
}


def asking(decoder: Decoder, prompt: Sequence[int], top: int | None, limit: int, row: int = 0) -> TokenSequence:
    params = SamplingParams(temperature=0)
    return decoder.sequence(prompt, params, seed=row, max_new_tokens=limit, row=row, prompt_top_logprobs=top)


@torch.inference_mode()
def check(decoder: Decoder, sequence: TokenSequence, top: int) -> None:
    """Compare with one pass over the whole prompt."""
    context = decoder.target.start(1, len(sequence.prompt))
    shown: list[torch.Tensor] = []
    context.prefill([sequence.prompt], lambda rows, starts, counts, features_BTF: shown.append(features_BTF[0, : counts[0]]))
    expected_DV = torch.log_softmax(decoder.target.head(torch.cat(shown)).float(), -1)[:-1]
    found = sequence.prompt_logprobs
    assert len(found) == len(sequence.prompt) - 1
    for one, token, expected_V in zip(found, sequence.prompt[1:], expected_DV, strict=True):
        assert one.logprob == pytest.approx(float(expected_V[token]), abs=1e-5)
        assert [value for _, value in one.top] == pytest.approx(expected_V.topk(top).values.tolist(), abs=1e-5)
        assert all(value == pytest.approx(float(expected_V[likely]), abs=1e-5) for likely, value in one.top)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", ["none", "model", "head", "lookup+model"])
def test_prompts_are_told_however_they_are_read(name: str, reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_MOST_AT_ONCE", 3)
    decoder = DECODERS[name]()
    engine = open_engine(decoder, slots=3, **READINGS[reading])
    asked = [(prompt, None if number % 4 == 3 else 2, number % 3) for number, prompt in enumerate(PROMPTS * 2)]
    sequences = [asking(decoder, *one, row=row) for row, one in enumerate(asked)]
    driven(engine, sequences, seed=len(name))
    for sequence, (prompt, top, limit) in zip(sequences, asked, strict=True):
        if top is None:
            assert not sequence.prompt_logprobs
        else:
            check(decoder, sequence, top)
        alone = decoder.generate(prompt, sampling=SamplingParams(temperature=0), max_new_tokens=limit or 1, seed=[1])
        assert sequence.new_tokens == alone.token_ids[:limit]


def test_a_hugging_face_model_tells_them_too() -> None:
    decoder = Decoder(HFModel(FAMILIES.get("llama").build(seed=1)))
    sequences = [asking(decoder, prompt, 3, 0, row) for row, prompt in enumerate(PROMPTS)]
    driven(open_engine(decoder, slots=2, chunk=7, reuse=True), sequences, seed=1)
    for sequence in sequences:
        check(decoder, sequence, 3)


class Counting:
    """An engine of one slot, and how many tokens of prompts its target reads."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Engine = open_engine(decoder, slots=1, reuse=True, chunk=8)
        context, self.read, self.most = self.engine.workspace.memory.context, 0, 0
        prefill = context.prefill

        def counted(texts: Sequence[Sequence[int]], observer: Any = None) -> None:
            self.read += sum(map(len, texts))
            self.most = max(self.most, *map(len, texts))
            prefill(texts, observer)

        monkeypatch.setattr(context, "prefill", counted)

    def run(self, sequence: TokenSequence) -> int:
        before = self.read
        self.engine.add(sequence)
        while not self.engine.done:
            self.engine.step()
        return self.read - before


@pytest.mark.parametrize("name", ["model", "head"])
def test_a_known_prompt_is_read_again_only_where_that_was_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = DECODERS[name]()
    counting, prompt = Counting(decoder, monkeypatch), PROMPTS[4]
    counting.run(asking(decoder, prompt, None, 2))
    assert counting.run(asking(decoder, prompt, None, 2)) <= 1
    again = asking(decoder, prompt, 2, 2)
    repeated = 2 if name == "head" else 0  # the last token of each part but the last
    assert counting.run(again) == len(prompt) - 1 + repeated and counting.most <= 8 + repeated
    check(decoder, again, 2)


def test_a_text_that_asks_for_nothing_new_takes_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = DECODERS["model"]()
    counting, sequence = Counting(decoder, monkeypatch), asking(decoder, PROMPTS[3], 1, 0)
    counting.run(sequence)
    assert sequence.stop_reason is StopReason.LENGTH and counting.engine.stats.rounds == 0
    check(decoder, sequence, 1)
