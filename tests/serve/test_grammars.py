"""Structured output: every text follows its grammar, and has the masked target's distribution, with speculation or without."""

import dataclasses
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from covering import covering, keeping
from families import FAMILIES
from polydraft.beam import BeamDecoder
from polydraft.certify.chi_square import chi_square_p_value
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.loading import load
from polydraft.models.hf import HFModel
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


def optional(count):
    """Make a schema of so many optional properties: too many for llguidance from some number on."""
    properties = {f"p{number}": {"type": "string"} for number in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


HOPELESS = {
    "itself": Grammar.json_schema({"$ref": "#"}),
    "a circle": Grammar.json_schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "no end": Grammar.lark('start: start "a"'),
    "no character": Grammar.regex(r"a[^\s\S]"),
    "properties": Grammar.json_schema(optional(700)),
    "properties inside": Grammar.json_schema(
        {"type": "object", "properties": {"x": optional(700)}, "required": ["x"], "additionalProperties": False}
    ),
    "alternatives": Grammar.json_schema(
        {"anyOf": [{"type": "object", "properties": {f"p{n}": {}}, "required": [f"p{n}"]} for n in range(3000)]}
    ),
    "lengths": Grammar.json_schema({"anyOf": [{"type": "string", "minLength": n, "maxLength": n + 1} for n in range(3000)]}),
}


@pytest.mark.parametrize("name", HOPELESS)
def test_what_no_text_can_follow_is_refused_before_there_is_any(shared, tiny_decoder, name):
    grammar = HOPELESS[name]
    with pytest.raises(UsageError, match="cannot be used"):
        tiny_decoder.stream("x", sampling=SamplingParams(grammar=grammar))
    asked = (
        {grammar.kind: grammar.given} if grammar.kind != "json_schema" else {"response_format": schema_format(grammar.given)}
    )
    answer = shared.post(CHAT, {"messages": MESSAGES, "max_tokens": 20, "stream": True, **asked})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(asked))


EITHER = {"anyOf": [{"type": "boolean"}, optional(700)]}
"""Whether its limits are met shows only when a text has begun."""


def leaning(tokenizer, character):
    return {tokenizer.convert_tokens_to_ids(character): 100.0}


@pytest.mark.parametrize(("speculative", "temperature"), covering(["auto", "off"], [0, 1]))
def test_a_text_that_meets_a_limit_fails_alone(shared, tiny_decoder, speculative, temperature):
    body = {"prompt": "x", "max_tokens": 40, "seed": 5, "temperature": temperature, "speculative": speculative}
    body |= {"response_format": schema_format(EITHER)}
    bad, good = ({**body, "logit_bias": leaning(tiny_decoder.tokenizer, character)} for character in "{t")
    with ThreadPoolExecutor(4) as threads:
        asked = [good, bad, {**bad, "stream": True}, good]
        answers = list(threads.map(lambda one: shared.post("/v1/completions", one), asked))
    assert [answer.json()["choices"][0]["text"] for answer in (answers[0], answers[3])] == ["true", "true"]
    message = r"the text cannot follow its grammar after 1 new tokens \(Parser Error: .* max is 2000"
    assert answers[1].status_code == 400 and re.match(message, answers[1].json()["error"]["message"])
    # What was streamed before stays valid, and the last event says why there is no more.
    events = [json.loads(line[6:]) for line in answers[2].text.splitlines() if line.startswith("data: ")] or [answers[2].json()]
    assert re.match(message, events[-1]["error"]["message"])
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) in ("", "{")


@pytest.mark.parametrize(("drafts", "temperature"), covering(["static", "none", "n-grams"], [0, 1]))
def test_the_library_says_which_limit_a_text_met(roomy, drafts, temperature):
    decoder = loaded(roomy, **DRAFTS[drafts])
    sampling = SamplingParams(temperature=temperature, grammar=Grammar.json_schema(EITHER))
    bad, good = (dataclasses.replace(sampling, logit_bias=leaning(decoder.tokenizer, one)) for one in "{t")
    assert decoder.generate("x", sampling=good, seed=1).text == "true"
    with pytest.raises(UsageError, match="cannot follow its grammar after 1 new tokens"):
        decoder.generate("x", sampling=bad, seed=1)


def test_scores_are_never_left_as_they_are(tiny_decoder, grammars):
    vocab_size, tokenizer = tiny_decoder.target.vocab_size, tiny_decoder.tokenizer
    processor = grammars.processor(grammars.compiled(Grammar.json_schema(EITHER)), 0)
    brace, t, x = (tokenizer.convert_tokens_to_ids(character) for character in "{tx")
    for text in ([brace], [brace, t], [t, x], [x]):
        processor.foresee(text)
        for _ in range(2):
            with pytest.raises(UsageError, match="cannot follow its grammar"):
                processor(torch.tensor([text]), torch.zeros(1, vocab_size))
        assert processor.forced(text, 5) == []
    assert (processor(torch.tensor([[t]]), torch.zeros(1, vocab_size)) > -torch.inf).sum() == 1


@pytest.mark.parametrize("more", [1, 60])
def test_logits_may_have_more_columns_than_there_are_tokens(tiny_decoder, more):
    tokenizer = tiny_decoder.tokenizer
    model = FAMILIES.get("llama").build(vocab_size=len(tokenizer) + more, eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():  # columns beyond the tokenizer's would win
        model.lm_head.weight[len(tokenizer) :] = 10 * model.lm_head.weight[0]
    decoder = Decoder(HFModel(model), tokenizer=tokenizer, eos_token_ids=[tokenizer.eos_token_id])
    for temperature in (0, 1):
        sampling = SamplingParams(temperature=temperature, grammar=Grammar.json_schema(SCHEMA))
        for found in decoder.generate(["x"] * 3, sampling=sampling, max_new_tokens=60, seed=3):
            assert list(json.loads(found.text)) == ["a", "b"]


@torch.inference_mode()
def exact_distribution(decoder, grammars, prompt, texts):
    """Sum up the masked target's distribution of each text, without any of the machinery under test."""
    processor = grammars.processor(grammars.compiled(Grammar.json_schema(SCHEMA)), len(prompt))
    distribution = {}
    for text in texts:
        ids, chance = list(prompt), 1.0
        for token in [*decoder.tokenizer(text)["input_ids"], decoder.tokenizer.eos_token_id]:
            scores_1V = processor(torch.tensor([ids]), decoder.target.plain(torch.tensor([ids]))[:, -1])
            chance *= float(torch.softmax(scores_1V, -1)[0, token])
            ids.append(token)
        distribution[text] = chance
    return distribution


def loaded(roomy, **options):
    return load(roomy, dtype="float32", **options)


DRAFTS = {
    "static": {"draft": "early-exit:1", "tree": "3x2x1"},
    "dynamic": {"draft": "early-exit:1", "tree": "dynamic:12"},
    "n-grams": {"drafter": "lookup"},
    "none": {"draft": "none"},
    "predicted": {"draft": "early-exit:1", "tree": "3x2x1", "walk": "block"},
}


@pytest.mark.usefixtures("as_if_alone")
@pytest.mark.parametrize(("drafts", "count"), [
    ("static", 120), ("predicted", 60), *(pytest.param(name, 600, marks=pytest.mark.slow) for name in DRAFTS)
])  # fmt: skip
def test_the_distribution_is_the_masked_targets(roomy, grammars, drafts, count):
    decoder = loaded(roomy, **DRAFTS[drafts])
    values = itertools.product((True, False), SCHEMA["properties"]["b"]["enum"])
    texts = [json.dumps({"a": a, "b": b}) for a, b in values]
    prompt = decoder.encode("Say")
    distribution = exact_distribution(decoder, grammars, prompt, texts)
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-4)
    expected = texts[1] if drafts == "predicted" else None
    sampling = SamplingParams(grammar=Grammar.json_schema(SCHEMA), prediction=expected)
    found = decoder.generate([prompt] * count, sampling=sampling, max_new_tokens=60, seed=8)
    counts = [sum(one.text == text for one in found) for text in texts]
    assert sum(counts) == count
    assert chi_square_p_value(np.array(counts), np.array([distribution[text] for text in texts])) > 1e-5
    # One token per byte: most of the text is forced, and needs neither a draft nor a round of its own.
    sources = {source for one in found for source in one.sources}
    assert ("grammar" in sources) == (drafts in ("static", "dynamic", "predicted"))
    assert ("prediction" in sources) == (drafts == "predicted")
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
    lanes = shared.service.scheduler.lanes
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
    with pytest.raises(UsageError, match="generate them separately"):
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
