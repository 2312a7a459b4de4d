"""Every refusal names the parameter, says what is allowed, and is built in one module."""

import re
from pathlib import Path

import httpx
import openai
import pytest

import polydraft.serve

MESSAGES = [{"role": "user", "content": "Hello there"}]


def tool_with(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


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
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0]", 400),
    ({"messages": MESSAGES, "tools": [tool_with({"type": "array"})]}, "tools[0].parameters.type", 400),
    ({"messages": MESSAGES, "tools": [tool_with({"type": ["object", "null"]})]}, "tools[0].parameters.type", 400),
    ({"messages": MESSAGES, "tool_choice": "sometimes"}, "tool_choice", 400),
    ({"messages": MESSAGES, "temperature": -1}, "temperature", 400),
    ({"messages": MESSAGES, "temperature": "hot"}, "temperature", 400),
    ({"messages": MESSAGES, "top_p": 0}, "top_p", 400),
    ({"messages": MESSAGES, "n": 0}, "n", 400),
    ({"messages": MESSAGES, "n": 100}, "n", 400),
    ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens", 400),
    ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", 400),
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
    ({"messages": MESSAGES, "stream_options": {"include_usages": True}}, "stream_options", 400),
    ({"messages": MESSAGES, "reasoning_effort": "high"}, "reasoning_effort", 400),
    ({"messages": MESSAGES, "service_tier": "priority"}, "service_tier", 400),
    ({"messages": MESSAGES, "modalities": ["text", "audio"]}, "modalities", 400),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", 400),
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


@pytest.mark.parametrize("name", ["tree", "scheme"])
def test_drafting_is_chosen_by_one_parameter(shared, name):
    error = shared.post("/v1/chat/completions", {"messages": MESSAGES, name: "4x2x1"}).json()["error"]
    assert error["code"] == "unknown_parameter" and '"speculative": "auto", "off", or {"tree": "4x2x1"' in error["message"]


def test_the_servers_limit_of_choices_is_named(shared):
    error = shared.post("/v1/chat/completions", {"messages": MESSAGES, "n": 0}).json()["error"]
    assert f"whole numbers from 1 to {shared.service.options.max_choices}" in error["message"]


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


def test_unknown_paths_and_methods(shared):
    for answer, status in ((httpx.get(f"{shared.url}/v2"), 404), (httpx.get(f"{shared.url}/v1/completions"), 405)):
        assert answer.status_code == status and "/v1/chat/completions" in answer.json()["error"]["message"]


def test_every_code_is_raised_somewhere():
    """Whoever looks a code up finds its message in one module, and the check that raises it by its name."""
    files = Path(polydraft.serve.__file__).parent.glob("*.py")
    raised = {code for file in files for code in re.findall(r'"(\w+)"', file.read_text()) if file.name != "errors.py"}
    table = Path(polydraft.serve.__file__).with_name("errors.py").read_text()
    codes = set(re.findall(r'^    "(\w+)": \(', table, re.M))
    assert len(codes) > 20 and codes - raised == {"invalid_value", "missing_parameter", "unexpected"}  # by errors.py itself
