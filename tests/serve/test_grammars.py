"""Structured output: every text follows its grammar, and has the masked target's law, with speculation or without."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
import torch

from covering import keeping
from polydraft.beam import BeamDecoder
from polydraft.certify.chi_square import chi_square_p_value
from polydraft.errors import UsageError
from polydraft.loading import load
from polydraft.sampling import Grammar, SamplingParams, Warper
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


@pytest.mark.parametrize(("speculative", "count"), keeping([*itertools.product(["auto", "off"], [7, 40])], ("auto", 7)))
def test_texts_of_many_schemas_are_valid(shared, speculative, count):
    for number in range(count):
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
    processor = grammars.processor(grammars.compiled(Grammar.json_schema(SCHEMA)), len(prompt))
    law = {}
    for text in texts:
        ids, chance = list(prompt), 1.0
        for token in [*decoder.tokenizer(text)["input_ids"], decoder.tokenizer.eos_token_id]:
            scores_1V = processor(torch.tensor([ids]), decoder.target.plain(torch.tensor([ids]))[:, -1])
            chance *= float(torch.softmax(scores_1V, -1)[0, token])
            ids.append(token)
        law[text] = chance
    return law


def loaded(roomy, **options):
    return load(roomy, dtype="float32", **options)


DRAFTS = {
    "static": {"draft": "early-exit:1", "tree": "3x2x1"},
    "dynamic": {"draft": "early-exit:1", "tree": "dynamic:12"},
    "n-grams": {"drafter": "lookup"},
    "none": {},
}


@pytest.mark.parametrize(("drafts", "count"), [
    ("static", 300), *(pytest.param(name, 600, marks=pytest.mark.slow) for name in DRAFTS)
])  # fmt: skip
def test_the_law_is_the_masked_targets(roomy, grammars, drafts, count):
    decoder = loaded(roomy, **DRAFTS[drafts])
    values = itertools.product((True, False), SCHEMA["properties"]["b"]["enum"])
    texts = [json.dumps({"a": a, "b": b}) for a, b in values]
    prompt = decoder.encode("Say")
    law = exact_law(decoder, grammars, prompt, texts)
    assert sum(law.values()) == pytest.approx(1, abs=1e-4)
    sampling = SamplingParams(grammar=Grammar.json_schema(SCHEMA))
    found = decoder.generate([prompt] * count, sampling=sampling, max_new_tokens=60, seed=8)
    counts = [sum(one.text == text for one in found) for text in texts]
    assert sum(counts) == count
    assert chi_square_p_value(np.array(counts), np.array([law[text] for text in texts])) > 1e-5
    # One token per byte: most of the text is forced, and needs neither a draft nor a round of its own.
    sources = {source for one in found for source in one.sources}
    assert ("grammar" in sources) == (drafts in ("static", "dynamic"))
    if drafts == "static":
        assert found[0].stats.tokens_per_pass > 4


@pytest.mark.parametrize(
    ("drafts", "count"), keeping([("static", 9), ("none", 9), ("static", 200), ("none", 200)], ("static", 9))
)
def test_texts_of_the_library_are_valid(roomy, drafts, count):
    decoder = loaded(roomy, **DRAFTS[drafts])
    for number in range(count):
        schema = random_schema(number)
        sampling = SamplingParams(temperature=(0, 0.7, 1.0)[number % 3], grammar=Grammar.json_schema(schema))
        for found in decoder.generate(["Hello"] * 3, sampling=sampling, max_new_tokens=200, seed=number):
            assert found.stop_reason == "eos" and list(json.loads(found.text)) == schema["required"], (schema, found.text)


def test_the_library_has_regular_expressions_and_rules(tiny_decoder):
    def text(grammar):
        return tiny_decoder.generate("x", sampling=SamplingParams(grammar=grammar), max_new_tokens=60, seed=5).text

    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text(Grammar.regex("[a-c]{3}-[0-9]{2}")))
    assert text(Grammar.lark('start: "yes" | "no"')) in ("yes", "no")
    assert text(Grammar.json_object()).startswith("{")


def test_a_text_of_the_server_is_the_librarys(shared, tiny_decoder):
    body = {"prompt": "Say", "max_tokens": 80, "seed": 4, "response_format": schema_format(SCHEMA)}
    sampling = SamplingParams(grammar=Grammar.json_schema(SCHEMA))
    for temperature in (0, 1.0):
        told = shared.post("/v1/completions", {**body, "temperature": temperature}).json()["choices"][0]
        own = dataclasses.replace(sampling, temperature=temperature)
        assert told["text"] == tiny_decoder.generate("Say", sampling=own, max_new_tokens=80, seed=4).text
        assert told["speculation"]["accepted_tokens"]["grammar"] > 5


def test_texts_without_a_grammar_keep_to_themselves(shared):
    lanes = shared.service.scheduler._lanes
    shared.post("/v1/completions", {"prompt": "x", "max_tokens": 20, "response_format": schema_format(SCHEMA)})
    assert "auto+grammar" in lanes and lanes["auto+grammar"] is not lanes["auto"]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (lambda: SamplingParams(grammar="a+"), "allowed: Grammar.json_schema"),
        (lambda: Grammar("yaml", "x"), "unknown kind of grammar 'yaml'"),
        (lambda: Grammar.regex(5), "regex 5 is not a grammar; allowed: text"),
        (lambda: Grammar.json_schema("x"), "allowed: a JSON schema as a dict"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar, message):
    with pytest.raises(UsageError, match=message):
        grammar()


def test_what_grammars_cannot_do_is_refused(tiny_decoder):
    some = SamplingParams(grammar=Grammar.regex("a+"))
    with pytest.raises(UsageError, match="generate them apart"):
        tiny_decoder.generate(["a", "b"], sampling=[some, SamplingParams()])
    with pytest.raises(UsageError, match="cannot be used"):
        tiny_decoder.generate("a", sampling=SamplingParams(grammar=Grammar.regex("(a")))
    with pytest.raises(UsageError, match="need a tokenizer"):
        tiny_decoder.replace(tokenizer=None).generate([1, 2], sampling=some)
    with pytest.raises(UsageError, match="not for beams"):
        BeamDecoder(tiny_decoder).search("a", sampling=some, beams=2)


def test_masks_can_be_found_before_the_pass_is_over(tiny_decoder, grammars, monkeypatch):
    processor = grammars.processor(grammars.compiled(Grammar.regex("ab|ac")), 1)
    warper = Warper(SamplingParams(processors=(processor,)), tiny_decoder.target.vocab_size, [[0]], torch.device("cpu"))
    a, b = tiny_decoder.tokenizer("ab")["input_ids"]
    warper.foresee([[[-1], [a]]])
    monkeypatch.setattr(processor, "_start", None)  # nothing is left to find
    logits_12V = torch.zeros(1, 2, tiny_decoder.target.vocab_size)
    probs_12V = warper.probs(logits_12V, torch.tensor([[[-1], [a]]]))
    assert probs_12V[0, 0].nonzero().flatten().tolist() == [a] and probs_12V[0, 1, b] == 0.5
