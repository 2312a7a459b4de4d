"""`generate(do_sample=True, custom_generate=Speculate(...))` samples as the model and its processors say."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    set_seed,
)

from covering import keeping
from polydraft.certify.chi_square import chi_square_p_value
from polydraft.hf_generate import Speculate

from .setups import PROMPTS, draft, padded, target

FALSE_ALARM = 1e-4
NEW_TOKENS = 3
PROMPT = [62, 88, 14, 89, 70, 92, 11, *PROMPTS[0]]
"""Penalties find something in it."""
DISTRIBUTIONS = {
    "top-k": dict(temperature=1.5, top_k=3),
    "top-p": dict(temperature=0.8, top_p=0.4, top_k=0),
    "penalised": dict(temperature=1.2, top_k=3, repetition_penalty=1.8),
    "all": dict(temperature=1.0, top_k=5, top_p=0.8, repetition_penalty=1.8),
}
"""Few enough tokens survive that each text of three is counted."""


def processors(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0) -> LogitsProcessorList:
    """Make the list that `generate` makes, by hand."""
    made = LogitsProcessorList()
    if repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    made.append(TemperatureLogitsWarper(temperature))
    if top_k:
        made.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        made.append(TopPLogitsWarper(top_p))
    return made


@cache
def text_distribution(name: str) -> dict[tuple[int, ...], float]:
    """Enumerate all texts by plain forward passes and Hugging Face's own processors."""
    process, distribution = processors(**DISTRIBUTIONS[name]), {(): 1.0}
    for _ in range(NEW_TOKENS):
        ids_NL = torch.tensor([[*PROMPT, *text] for text in distribution])
        with torch.inference_mode():
            logits_NV = torch.cat([target()(input_ids=part_NL).logits[:, -1] for part_NL in ids_NL.split(256)])
        distribution_NV = process(ids_NL, logits_NV.float()).double().softmax(-1)
        distribution = {
            (*text, token): chance * float(distribution_V[token])
            for (text, chance), distribution_V in zip(distribution.items(), distribution_NV, strict=True)
            for token in distribution_V.nonzero()[:, 0].tolist()
        }
    return distribution


def p_value(texts: list[list[int]], name: str) -> float:
    distribution = text_distribution(name)
    places = {text: place for place, text in enumerate(distribution)}
    counts_X = np.zeros(len(distribution) + 1)
    for text in texts:
        counts_X[places.get(tuple(text), len(distribution))] += 1
    return chi_square_p_value(counts_X, np.array([*distribution.values(), 0.0]))


def sampled(custom: Speculate | None, count: int, prompts: list[list[int]], **options) -> list[list[list[int]]]:
    """Return the new tokens of `count` texts of each prompt."""
    set_seed(1)
    inputs = padded(prompts)
    result = target().generate(
        **inputs,
        do_sample=True,
        num_return_sequences=count,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        custom_generate=custom,
        **options,
    )
    new = result[:, inputs["input_ids"].shape[1] :].tolist()
    return [new[row * count : (row + 1) * count] for row in range(len(prompts))]


WAYS = {
    "model": lambda: Speculate(draft=draft(), tree="3x2x1"),
    "chain": lambda: Speculate(draft=draft(), tree="chain:2", scheme="rrs-wor"),
    "lookup": lambda: Speculate(ngrams="lookup"),
}
CASES = [("model", name) for name in DISTRIBUTIONS] + [("chain", "all"), ("lookup", "penalised")]


# All rules together, each way of drafting; one by one they are drawn often in the slow tests.
@pytest.mark.parametrize(("way", "name"), keeping(CASES, ("model", "all"), ("chain", "all"), ("lookup", "penalised")))
def test_texts_follow_the_distribution_of_model_and_processors(way: str, name: str) -> None:
    custom = WAYS[way]()
    (texts,) = sampled(custom, 500, [PROMPT], **DISTRIBUTIONS[name])
    assert len(text_distribution(name)) > 10 and p_value(texts, name) > FALSE_ALARM / len(CASES)
    assert way == "lookup" or 0.2 < custom.stats[0].acceptance_rate < 0.98


def test_a_row_with_padding_follows_its_own_distribution() -> None:
    """The other row is longer: what pads this one must not be seen."""
    _, texts = sampled(WAYS["model"](), 250, [[*PROMPTS[1], *PROMPT], PROMPT], **DISTRIBUTIONS["top-k"])
    assert p_value(texts, "top-k") > FALSE_ALARM


@pytest.mark.parametrize("left_out", keeping(["repetition_penalty", "top_p"], "top_p"))
def test_a_processor_that_is_not_obeyed_shows(left_out: str) -> None:
    (texts,) = sampled(WAYS["model"](), 400, [PROMPT], **DISTRIBUTIONS["all"] | {left_out: 1.0})
    assert p_value(texts, "all") < FALSE_ALARM / len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name"), CASES)
def test_many_texts_follow_the_distribution_of_model_and_processors(way: str, name: str) -> None:
    (texts,) = sampled(WAYS[way](), 4000, [PROMPT], **DISTRIBUTIONS[name])
    assert p_value(texts, name) > FALSE_ALARM / len(CASES)
