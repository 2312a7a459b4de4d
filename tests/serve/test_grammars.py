"""Structured output: every text follows its grammar, and has the masked target's law, with speculation or without."""

import itertools
import json
import re

import numpy as np
import pytest
import torch

from polydraft.certify.chi_square import chi_square_p_value
from polydraft.sampling import SamplingParams
from polydraft.sampling.grammar import Grammars

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy", "z"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHAT, MESSAGES = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}


@pytest.fixture(scope="module")
def grammars(tiny_decoder):
    return Grammars(tiny_decoder.tokenizer, tiny_decoder.target.vocab_size, tiny_decoder.eos_token_ids)


def random_schema(number):
    """Make a schema with finitely many texts, none of them long."""
    kinds = [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 3]},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "string", "maxLength": 3},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        {"type": "object", "properties": {"in": {"const": 1}}, "required": ["in"], "additionalProperties": False},
    ]
    chosen = [kinds[(number * step + step) % len(kinds)] for step in (1, 3, 5)][: 1 + number % 3]
    properties = {f"key{place}": kind for place, kind in enumerate(chosen)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@pytest.mark.parametrize("speculative", ["auto", "off"])
def test_texts_of_many_schemas_are_valid(shared, speculative):
    for number in range(40):
        schema = random_schema(number)
        body = {"messages": MESSAGES, "response_format": schema_format(schema), "seed": number, "max_tokens": 200}
        answer = shared.post(CHAT, {**body, "speculative": speculative}).json()
        text = answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop", (schema, text)
        assert list(json.loads(text)) == schema["required"], text


def test_drafts_follow_the_grammar_too(shared):
    body = {"messages": MESSAGES, "response_format": schema_format(SCHEMA), "temperature": 0, "max_tokens": 100}
    found = shared.post(CHAT, body).json()["choices"][0]["speculation"]
    assert found["mean_acceptance_length"] > 1.5  # most of such a text is certain


def test_regular_expressions_and_grammars(shared):
    body = {"prompt": "x", "max_tokens": 40, "seed": 5}
    text = shared.post("/v1/completions", {**body, "regex": "[a-c]{3}-[0-9]{2}"}).json()["choices"][0]["text"]
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text)
    text = shared.post("/v1/completions", {**body, "grammar": 'start: "yes" | "no"'}).json()["choices"][0]["text"]
    assert text in ("yes", "no")
    answer = shared.post("/v1/completions", {**body, "response_format": {"type": "json_object"}}).json()
    assert answer["choices"][0]["text"].startswith("{")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": schema_format({"type": "nonsense"})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"regex": "(ab"}, "regex"),
        ({"grammar": "start: foo"}, "grammar"),
        ({"regex": "a", "grammar": 'start: "a"'}, "grammar"),
    ],
    ids=str,
)
def test_bad_grammars_are_named(shared, wrong, param):
    answer = shared.post(CHAT, {"messages": MESSAGES, **wrong})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@torch.inference_mode()
def exact_law(decoder, grammars, prompt, texts):
    """Sum up the masked target's law of each text, without any of the machinery under test."""
    processor = grammars.processor(grammars.compiled("json_schema", SCHEMA), len(prompt))
    law = {}
    for text in texts:
        ids, chance = list(prompt), 1.0
        for token in [*decoder.tokenizer(text)["input_ids"], decoder.tokenizer.eos_token_id]:
            scores_1V = processor(torch.tensor([ids]), decoder.target.plain(torch.tensor([ids]))[:, -1])
            chance *= float(torch.softmax(scores_1V, -1)[0, token])
            ids.append(token)
        law[text] = chance
    return law


@pytest.mark.parametrize("drafted", [True, False])
def test_the_law_is_the_masked_targets(tiny_decoder, grammars, drafted):
    decoder = tiny_decoder if drafted else tiny_decoder.replace(drafter=None)
    values = itertools.product((True, False), SCHEMA["properties"]["b"]["enum"])
    texts = [json.dumps({"a": a, "b": b}) for a, b in values]
    prompt = decoder.encode("Say")
    law = exact_law(decoder, grammars, prompt, texts)
    assert sum(law.values()) == pytest.approx(1, abs=1e-4)
    compiled, count = grammars.compiled("json_schema", SCHEMA), 600
    sampling = [SamplingParams(processors=(grammars.processor(compiled, len(prompt)),)) for _ in range(count)]
    found = decoder.generate([prompt] * count, sampling=sampling, max_new_tokens=60, seed=8)
    counts = [sum(one.text == text for one in found) for text in texts]
    assert sum(counts) == count
    assert chi_square_p_value(np.array(counts), np.array([law[text] for text in texts])) > 1e-5
