"""The API as the client that everybody has speaks it: texts are the library's, figures are true, errors have names."""

import asyncio
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from covering import covering
from polydraft.loading import load
from polydraft.sampling import SamplingParams
from polydraft.serve.protocol import read_request
from polydraft.serve.token_texts import TokenTexts

MESSAGES = [{"role": "user", "content": "Hello there"}]


def library(shared, prompt, *, chat=False, **options):
    decoder = shared.service.decoder
    sampling = options.pop("sampling", SamplingParams())
    return decoder.generate(prompt, chat=chat, sampling=sampling, **options)


def test_a_chat_answers_with_the_librarys_text(shared):
    answer = shared.client.chat.completions.create(model=shared.service.model, messages=MESSAGES, max_tokens=24, seed=7)
    expected = library(shared, "Hello there", chat=True, max_new_tokens=24, seed=7)
    (choice,) = answer.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(shared.service.decoder.encode("Hello there", chat=True))
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.finish_reason == ("stop" if expected.stop_reason == "eos" else "length")


GIVEN = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"logit_bias": {"65": 5.0, "66": -100}},
]


@pytest.mark.parametrize(("given", "extra"), covering(GIVEN, [{}, {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}]))
def test_sampling_parameters_mean_what_they_mean_in_the_library(shared, given, extra):
    answer = shared.client.completions.create(
        model=shared.service.model, prompt="Once", max_tokens=20, seed=3, **given, extra_body=extra
    )
    bias = {int(token): value for token, value in given.get("logit_bias", {}).items()}
    sampling = SamplingParams(**{**given, "logit_bias": bias}, **extra)
    expected = library(shared, "Once", sampling=sampling, max_new_tokens=20, seed=3)
    assert answer.choices[0].text == expected.text


def test_streams_say_the_same_as_whole_answers(shared):
    options = {"model": shared.service.model, "messages": MESSAGES, "max_completion_tokens": 40, "seed": 5, "n": 2}
    whole = shared.client.chat.completions.create(**options)
    stream = shared.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    texts, ends, usage, figures = ["", ""], {}, None, {}
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
                figures[choice.index] = choice.speculation
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    assert figures == {choice.index: choice.speculation for choice in whole.choices}


def test_several_texts_are_a_batch_of_the_library(shared):
    answer = shared.client.completions.create(model=shared.service.model, prompt=["One", "Two"], n=2, max_tokens=12, seed=11)
    expected = library(shared, ["One", "One", "Two", "Two"], max_new_tokens=12, seed=11)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    read = sum(len(shared.service.decoder.encode(prompt)) for prompt in ("One", "Two"))
    assert answer.usage.prompt_tokens == read


def test_token_ids_are_prompts_too(shared):
    ids = shared.service.decoder.encode("Once upon")
    body = {"max_tokens": 8, "seed": 1}
    texts = [
        shared.post("/v1/completions", {"prompt": prompt, **body}).json()["choices"][0]["text"] for prompt in (ids, "Once upon")
    ]
    assert texts[0] == texts[1]
    assert shared.post("/v1/completions", {"prompt": [10**6], **body}).json()["error"]["param"] == "prompt"


def test_stop_strings_end_texts(shared):
    whole = library(shared, "Once", max_new_tokens=60, seed=2).text
    stop = whole[10:13]
    answer = shared.client.completions.create(
        model=shared.service.model, prompt="Once", max_tokens=60, seed=2, stop=[stop, "@@@@"]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("speculative", ["auto", "off"])
def test_log_probabilities_are_the_targets(shared, speculative):
    answer = shared.client.chat.completions.create(
        model=shared.service.model, messages=MESSAGES, max_tokens=12, temperature=0.5, seed=4, logprobs=True, top_logprobs=3,
        extra_body={"speculative": speculative},
    )  # fmt: skip
    decoder = shared.service.decoder
    tokenizer, text = decoder.tokenizer, decoder.encode("Hello there", chat=True)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for told in content:
        distribution_V = torch.log_softmax(decoder.target.plain(torch.tensor([text]))[0, -1], -1)
        best = distribution_V.topk(3)
        assert [one.logprob for one in told.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        token = next(
            one
            for one in range(len(distribution_V))
            if tokenizer.decode([one]) == told.token and abs(distribution_V[one] - told.logprob) < 1e-4
        )
        assert bytes(told.bytes) == bytes([_byte(tokenizer, token)]) or token == tokenizer.eos_token_id
        text.append(token)


def _byte(tokenizer, token):
    from polydraft.serve.token_texts import _BYTE_OF

    return _BYTE_OF.get(tokenizer.convert_ids_to_tokens(token), 0)


def test_log_probabilities_of_completions(shared):
    answer = shared.client.completions.create(model=shared.service.model, prompt="Once", max_tokens=6, seed=4, logprobs=2)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 6
    assert all(
        len(top) <= 2 and -math.inf < value <= 0 for top, value in zip(told.top_logprobs, told.token_logprobs, strict=True)
    )


def test_of_tokens_with_equal_text_the_likeliest_is_told(shared):
    # One token a byte: those of parts of characters all decode to the replacement character.
    decoder, tokenizer = shared.service.decoder, shared.service.decoder.tokenizer
    answer = shared.client.completions.create(model=shared.service.model, prompt="Once", max_tokens=1, seed=4, logprobs=20)
    distribution_V = torch.log_softmax(decoder.target.plain(torch.tensor([decoder.encode("Once")]))[0, -1], -1)
    expected: dict[str, list[float]] = {}
    for token in distribution_V.topk(20).indices.tolist():
        expected.setdefault(tokenizer.decode([token]), []).append(float(distribution_V[token]))
    assert max(map(len, expected.values())) > 3
    (told,) = answer.choices[0].logprobs.top_logprobs
    assert told == pytest.approx({text: max(values) for text, values in expected.items()}, abs=1e-4)
    assert list(told.values()) == sorted(told.values(), reverse=True)


def test_tokens_with_and_without_a_space_are_told_apart():
    pieces = ["<s>", "</s>", "a", "\u2581the", "the", "\u2581", "<0xE2>", "<0x0A>"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"))
    told = [texts(number) for number in range(len(pieces))]
    assert [text for text, _ in told] == ["<s>", "</s>", "a", " the", "the", " ", "\ufffd", "\n"]
    assert [bytes(found) for _, found in told] == [b"<s>", b"</s>", b"a", b" the", b"the", b" ", b"\xe2", b"\n"]


def test_what_speculation_did_is_told(shared):
    def ask(speculative):
        body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0, "speculative": speculative}
        return shared.post("/v1/chat/completions", body).json()["choices"][0]

    auto, off, tree = ask("auto"), ask("off"), ask({"tree": "2x1"})
    assert auto["message"] == off["message"] == tree["message"]
    found = auto["speculation"]
    assert found["drafted_tokens"] == 15 * found["rounds"] and found["rested_because"] is None
    assert sum(found["acceptance_histogram"]) == found["rounds"]
    accepted = sum(count * rounds for count, rounds in enumerate(found["acceptance_histogram"]))
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / found["rounds"], abs=1e-4)
    assert (
        off["speculation"]["drafted_tokens"] == 0
        and off["speculation"]["rested_because"] == "the request turned speculation off"
    )
    assert tree["speculation"]["drafted_tokens"] == 4 * tree["speculation"]["rounds"]


def test_a_trace_names_every_tokens_source(shared):
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "stream": True, "speculative": {"trace": True}}
    lines = shared.post("/v1/chat/completions", body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    traces = [chunk["choices"][0]["trace"] for chunk in chunks if "trace" in chunk["choices"][0]]
    tokens = [token for trace in traces for token in trace["tokens"]]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert "".join(token["text"] for token in tokens) == text
    assert {token["source"] for token in tokens} <= {"target", "model"} and all(trace["drafted"] == 15 for trace in traces)
    for trace in traces:
        parents = [parent for parent, _ in trace["tree"]]
        assert parents == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
    assert lines[-2] == "data: [DONE]"


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_k", "seed", "n")
SCHEMA = {"type": "integer"}
LOOSE = [
    ("echo", 0),
    ("best_of", True),
    ("best_of", 1.0),
    ("store", 0),
    ("parallel_tool_calls", 1),
    ("regex", ""),
    ("grammar", ""),
    ("response_format", {"type": "text", "schema": SCHEMA}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA, "length": 5}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "length": 5}),
]
"""Values that Python takes for what asks for nothing, or that would be ignored."""
WRONG = [
    ({"mesages": MESSAGES}, "messages", 400),
    ({"messages": MESSAGES, "temprature": 1}, "temprature", 400),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", 400),
    ({"messages": MESSAGES, "tool_choice": "auto"}, "tool_choice", 400),
    ({"messages": MESSAGES, "temperature": -1}, "temperature", 400),
    ({"messages": MESSAGES, "temperature": "hot"}, "temperature", 400),
    ({"messages": MESSAGES, "top_p": 0}, "top_p", 400),
    ({"messages": MESSAGES, "n": 0}, "n", 400),
    ({"messages": MESSAGES, "n": 100}, "n", 400),
    ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", 400),
    ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", 400),
    ({"messages": MESSAGES, "max_tokens": 5000}, "messages", 400),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", 400),
    ({"messages": MESSAGES, "stop": [""]}, "stop", 400),
    *(({"messages": MESSAGES, "stop": value}, "stop", 400) for value in (5, 0, False, {}, "", [None])),
    *(({"messages": MESSAGES, name: value}, name, 400) for name, value in LOOSE),
    *(({"messages": MESSAGES, name: 10**400}, name, 400) for name in NUMBERS),
    ({"messages": MESSAGES, "logit_bias": {"5": 10**400}}, "logit_bias", 400),
    ({"messages": MESSAGES, "logit_bias": {"9" * 5000: 1}}, "logit_bias", 400),
    ({"messages": MESSAGES, "logit_bias": {"\u0663": 1}}, "logit_bias", 400),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", 400),
    ({"messages": MESSAGES, "stream": True, "stream_options": {"include_obfuscation": 0}}, "include_obfuscation", 400),
    ({"messages": MESSAGES, "seed": 1.5}, "seed", 400),
    ({"messages": MESSAGES, "stream": "yes"}, "stream", 400),
    ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", 400),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", 400),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", 400),
    ({"messages": MESSAGES, "logit_bias": {"x": 1}}, "logit_bias", 400),
    ({"messages": MESSAGES, "logit_bias": {"99999": 1}}, "logit_bias", 400),
    ({"messages": MESSAGES, "top_k": 99999}, "top_k", 400),
    ({"messages": MESSAGES, "speculative": "fast"}, "speculative", 400),
    ({"messages": MESSAGES, "speculative": {"tree": "oak"}}, "speculative", 400),
    ({"messages": MESSAGES, "model": "gpt-9"}, "model", 404),
    ({"messages": []}, "messages", 400),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0]", 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", 400),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls", 400),
]


@pytest.mark.parametrize(("body", "param", "status"), WRONG, ids=[f"{number} {one[1]}" for number, one in enumerate(WRONG)])
def test_what_is_wrong_is_named(shared, body, param, status):
    answer = shared.post("/v1/chat/completions", body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["param"] == param and (param.split("[")[0] in error["message"] or "prompt" in error["message"])
    assert "\n" not in error["message"] and error["type"] in ("invalid_request_error", "not_found_error")


def test_values_that_ask_for_nothing_are_no_errors(shared):
    body = {"messages": MESSAGES, "max_tokens": 3, "tools": None, "n": None, "user": "somebody", "store": False, "top_k": -1}
    assert shared.post("/v1/chat/completions", body).status_code == 200
    body = {"prompt": "x", "max_tokens": 3, "echo": False, "best_of": 1, "suffix": None}
    assert shared.post("/v1/completions", body).status_code == 200


def test_what_is_no_json_is_refused(shared):
    for content in (b"{", b"[1]", b'{"prompt": NaN}', b"\xff"):
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{shared.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("field", ["%s", "stop", "user", "model", "regex", "messages", "prompt", "inside"])
def test_halves_of_characters_are_refused(shared, path, field):
    """As a value or as a name, escaped or as bytes: nothing that we could tokenize, or answer with."""
    for half in (rb"\ud800", rb"\uDfFf\ud83d", b"\xed\xa0\x80"):
        body = {
            "%s": b'{"%s": 1}',
            "messages": b'{"messages": [{"role": "user", "content": "%s"}]}',
            "inside": b'{"messages": [{"role": "user", "content": "x", "%s": "1"}]}',
        }.get(field, b'{"prompt": "x", "' + field.encode() + b'": "%s"}')
        headers = {"content-type": "application/json"}
        answer = httpx.post(shared.url + path, content=body % half, headers=headers)
        assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]


def test_whole_characters_that_are_escaped_are_fine(shared):
    content = rb'\xef\xbb\xbf{"prompt": "\ud83d\ude00", "max_tokens": 2}'.replace(rb"\xef\xbb\xbf", b"\xef\xbb\xbf")
    answer = httpx.post(f"{shared.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 4


def test_token_ids_that_do_not_exist_are_refused(shared):
    for path in ("/v1/completions", "/tokenize"):
        for token in (10**400, -1, 10**6):
            answer = shared.post(path, {"prompt": [token]})
            assert answer.status_code == 400 and "outside the vocabulary" in answer.json()["error"]["message"]


def test_errors_repeat_only_the_beginning_of_what_was_wrong(shared):
    long = "x" * 50_000
    answers = [shared.post("/v1/chat/completions", {"messages": MESSAGES, **wrong}) for wrong in ({long: 1}, {"model": long})]
    answers += [httpx.get(f"{shared.url}/{path}") for path in (long, f"v1/models/{long}")]
    assert all(len(answer.json()["error"]["message"]) < 1000 for answer in answers)


def test_the_clients_own_errors(shared):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        shared.client.chat.completions.create(model=shared.service.model, messages=MESSAGES, temperature=-3)
    with pytest.raises(openai.NotFoundError):
        shared.client.chat.completions.create(model="another", messages=MESSAGES)


def test_models(shared):
    (model,) = shared.client.models.list().data
    assert model.id == shared.service.model
    assert shared.client.models.retrieve(model.id).max_model_len == 512
    assert httpx.get(f"{shared.url}/v1/models/other").status_code == 404


def test_tokenize(shared):
    answer = shared.post("/tokenize", {"prompt": "Hé"}).json()
    assert answer["tokens"] == shared.service.decoder.encode("Hé") and answer["count"] == 3
    answer = shared.post("/tokenize", {"messages": MESSAGES}).json()
    assert answer["tokens"] == shared.service.decoder.encode("Hello there", chat=True)
    assert shared.post("/tokenize", {"text": "x"}).json()["error"]["param"] == "text"


def test_health_and_readiness(shared):
    assert httpx.get(f"{shared.url}/health").status_code == 200
    assert httpx.get(f"{shared.url}/ready").json() == {"status": "ready"}


def test_unknown_paths_and_methods(shared):
    for answer, status in ((httpx.get(f"{shared.url}/v2"), 404), (httpx.get(f"{shared.url}/v1/completions"), 405)):
        assert answer.status_code == status and "/v1/chat/completions" in answer.json()["error"]["message"]


def test_requests_have_names(shared):
    wished = httpx.get(f"{shared.url}/health", headers={"x-request-id": "mine-1"})
    assert wished.headers["x-request-id"] == "mine-1"
    odd = httpx.get(f"{shared.url}/health", headers={"x-request-id": "a b\t<script>"})
    assert len(odd.headers["x-request-id"]) == 24


def test_metrics_count_what_happened(serving):
    server = serving()
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    found = server.post("/v1/chat/completions", body).json()
    server.post("/v1/chat/completions", {"messages": 3})
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    speculation, usage = found["choices"][0]["speculation"], found["usage"]
    assert float(values["polydraft:generation_tokens_total"]) == usage["completion_tokens"]
    assert float(values["polydraft:prompt_tokens_total"]) == usage["prompt_tokens"]
    assert float(values["polydraft:spec_decode_num_drafts_total"]) == speculation["rounds"]
    assert float(values["polydraft:spec_decode_num_draft_tokens_total"]) == speculation["drafted_tokens"]
    accepted = sum(count * rounds for count, rounds in enumerate(speculation["acceptance_histogram"]))
    assert float(values["polydraft:spec_decode_num_accepted_tokens_total"]) == accepted
    assert float(values['polydraft:request_failure_total{status="400"}']) == 1
    assert float(values["polydraft:time_to_first_token_seconds_count"]) == 1
    assert float(values["polydraft:inter_token_latency_seconds_count"]) > 0
    assert float(values["polydraft:num_requests_running"]) == 0 == float(values["polydraft:num_requests_waiting"])


def test_the_dashboard_asks_for_figures_that_exist(shared):
    shared.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, "temperature": 0})
    shared.post("/v1/chat/completions", {})
    known = httpx.get(f"{shared.url}/metrics").text
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {
        name for panel in dashboard["panels"] for one in panel["targets"] for name in re.findall(r"polydraft:\w+", one["expr"])
    }
    assert len(asked) > 10
    assert not [name for name in asked if f"# TYPE {name.removesuffix('_bucket')} " not in known]


def test_what_a_request_leaves_out_follows_the_model(serving, roomy: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(roomy, folder)
    file = folder / "generation_config.json"
    own = {"do_sample": True, "temperature": 0.3, "top_k": 5, "repetition_penalty": 1.3, "suppress_tokens": [40]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    decoder = load(str(folder), "early-exit:1", tree="2x1", device="cpu", dtype="float32")
    names = ("temperature", "top_k", "repetition_penalty")

    def effective(body: dict[str, Any]) -> tuple[float, ...]:
        asked = read_request({"prompt": "abc", **body}, chat=False)
        loop = asyncio.new_event_loop()
        (sequence,) = service._ticket(asked, loop).sequences
        loop.close()
        assert sequence.params.logit_bias == {40: -math.inf}
        return tuple(getattr(sequence.params, name) for name in names)

    server = serving(decoder)
    service = server.service
    assert effective({}) == (0.3, 5, 1.3)
    assert effective({"temperature": 1, "top_k": -1, "repetition_penalty": 1.0}) == (1, 0, 1.0)
    answer = server.post("/v1/completions", {"prompt": "abc", "temperature": 0, "max_tokens": 12}).json()
    expected = decoder.generate("abc", sampling=SamplingParams(temperature=0), max_new_tokens=12)
    assert answer["choices"][0]["text"] == expected.text
