"""What clients send beside a question: what changes nothing is accepted, what would change the answer works or is refused."""

import logging
from collections.abc import Iterator

import pytest
import torch

from polydraft.errors import UsageError
from polydraft.models.blocks import Pool
from polydraft.models.hf_context import HFContext
from polydraft.sampling import SamplingParams
from polydraft.serve import memory
from polydraft.serve.lane import Lane, LaneOptions
from polydraft.serve.memory import fitting_pool, fitting_tokens
from polydraft.serve.neutral import _NEUTRAL
from polydraft.serve.options import ServeOptions
from polydraft.serve.protocol import read_request

from .conftest import Live, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello there"}]
TASK = [{"role": "user", "content": "### Task:\nA title of 3 words."}]
SPOKEN = [
    {"role": "system", "content": [{"type": "text", "text": "You are terse."}]},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "function_call": None, "audio": None},
    {"role": "user", "name": "ann", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}]},
]
CLIENTS = {
    "openai, every default": (CHAT, {
        "messages": SPOKEN, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "top_logprobs": None,
        "max_completion_tokens": 8, "metadata": {"topic": "demo"}, "modalities": ["text"], "n": 1, "parallel_tool_calls": True,
        "presence_penalty": 0, "prompt_cache_key": "demo", "reasoning_effort": "medium", "response_format": {"type": "text"},
        "safety_identifier": "ab12", "seed": None, "service_tier": "auto", "stop": None, "store": False, "stream": False,
        "stream_options": None, "temperature": 1, "tool_choice": "none", "tools": None, "top_p": 1, "user": "ann",
        "verbosity": "medium",
    }),
    "open webui, chat": (CHAT, {
        "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7, "top_p": 0.95,
        "max_tokens": 8, "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": 7, "stop": ["###"], "logit_bias": {},
    }),
    "open webui, title": (CHAT, {
        "messages": TASK, "stream": False, "max_completion_tokens": 1000, "metadata": {"task": "title", "chat_id": None},
    }),
    "cursor": (CHAT, {
        "messages": SPOKEN, "temperature": 0.2, "user": "auth0|user_01", "stream": True, "max_tokens": 8192,
        "stream_options": {"include_usage": True}, "metadata": {"cursorConversationId": "5f0c"}, "store": True,
    }),
    "continue, chat": (CHAT, {"messages": MESSAGES, "max_tokens": 4096, "temperature": 0.5, "stream": True, "stop": []}),
    "continue, autocomplete": (COMPLETIONS, {
        "prompt": "def f(", "max_tokens": 4096, "temperature": 0.01, "stream": True, "top_p": None, "presence_penalty": None,
        "stop": ["<fim_prefix>", "<fim_suffix>", "\n\n", "/src/", "#- coding: utf-8", "```"],
    }),
    "langchain, invoke": (CHAT, {"messages": MESSAGES, "stream": False, "temperature": 0.7, "max_completion_tokens": 8}),
    "langchain, stream": (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "n": 1}),
    "litellm": (CHAT, {
        "messages": MESSAGES, "max_tokens": 8, "user": "ann", "metadata": {"tags": ["a"]}, "service_tier": "default",
        "prompt_cache_retention": "24h", "stream_options": {"include_usage": True},
    }),
    "vllm, chat with defaults": (CHAT, {
        "messages": MESSAGES, "top_logprobs": 0, "logprobs": False, "best_of": None, "use_beam_search": False, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "stop_token_ids": [], "ignore_eos": False,
        "include_stop_str_in_output": False, "min_tokens": 0, "skip_special_tokens": True, "echo": False, "priority": 0,
        "spaces_between_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False,
        "chat_template_kwargs": {}, "documents": None, "parallel_tool_calls": False, "max_tokens": 8, "bad_words": [],
        "truncate_prompt_tokens": None, "prompt_logprobs": None, "allowed_token_ids": None, "request_id": "cmpl-1",
    }),
    "vllm, benchmark": (COMPLETIONS, {
        "prompt": "Once", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 6, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }),
    "llama.cpp": (CHAT, {
        "messages": MESSAGES, "cache_prompt": True, "typical_p": 1, "mirostat": 0, "max_tokens": -1, "top_k": 40, "min_p": 0.05,
    }),
    "lm-eval, chat": (CHAT, {"messages": MESSAGES, "max_tokens": 256, "temperature": 0, "stop": ["\n", "</s>"], "seed": 1234}),
    "lm-eval, text": (COMPLETIONS, {
        "prompt": [[72, 101]], "max_tokens": 256, "temperature": 0, "stop": ["Q:", "</s>"], "seed": 1234,
    }),
    "old openai": (COMPLETIONS, {
        "prompt": "Once", "suffix": "", "echo": False, "best_of": 2, "n": 2, "logprobs": False, "user": "ann", "max_tokens": 4,
    }),
}  # fmt: skip
"""Bodies as these programs send them, but for the name of the model."""


@pytest.fixture(scope="module")
def short(tiny_decoder) -> Iterator[Live]:
    """A server of short texts."""
    with live(tiny_decoder, slot_tokens=112) as server:
        yield server


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_is_answered(short, client):
    path, body = CLIENTS[client]
    answer = short.post(path, {"model": short.service.model, **body})
    assert answer.status_code == 200, answer.text
    assert not body.get("stream") or answer.text.endswith("data: [DONE]\n\n")


OTHERS = [{}, [], "", "maybe", 0.5, 7, True, False, -1]
PLAIN, TOOLS = {"prompt": "Once"}, ("tools", "tool_choice", "parallel_tool_calls")  # which chats have


@pytest.mark.parametrize("name", _NEUTRAL)
def test_only_values_that_change_nothing_are_accepted(name):
    for value in (*_NEUTRAL[name], *OTHERS):
        kinds = [one for one in _NEUTRAL[name] if isinstance(one, type)]
        value = value() if isinstance(value, type) else value
        neutral = any(type(value) is type(one) and value == one for one in _NEUTRAL[name]) or type(value) in kinds
        try:
            read_request({**(PLAIN if name in TOOLS else {"messages": MESSAGES}), name: value}, chat=name not in TOOLS)
        except UsageError as error:
            raise AssertionError(f"{name}={value!r}") from error
        except Exception as error:
            assert not neutral and error.code == "unsupported_parameter" and error.param == name, (name, value)
        else:
            assert neutral, f"{name}={value!r} was ignored"


def test_an_answer_is_the_same_with_them(shared):
    bare = {"prompt": "Once", "max_tokens": 12, "seed": 3}
    neutral = {name: values[0]() if isinstance(values[0], type) else values[0] for name, values in _NEUTRAL.items()}
    texts = [shared.post(COMPLETIONS, body).json()["choices"][0]["text"] for body in (bare, {**bare, **neutral})]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_longer_than_the_slot_are_cut_and_it_is_said(short, stream):
    room = short.service.slot_tokens - len("Once")
    body = {"prompt": "Once", "temperature": 0, "ignore_eos": True, "stream": stream}
    cut = short.post(COMPLETIONS, {**body, "max_tokens": 10**6})
    assert cut.headers["x-polydraft-max-tokens"] == str(room) and '"finish_reason": "length"' in cut.text
    if not stream:
        assert cut.json()["usage"]["completion_tokens"] == room
    for most in (4, room, -1):
        assert "x-polydraft-max-tokens" not in short.post(COMPLETIONS, {**body, "max_tokens": most}).headers


def test_as_many_tokens_as_fit(short):
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    for name in ("max_tokens", "max_completion_tokens"):
        usage = short.post(CHAT, {**body, name: -1}).json()["usage"]
        assert usage["total_tokens"] == short.service.slot_tokens
    full = {"prompt": [5] * short.service.slot_tokens, "max_tokens": -1}
    error = short.post(COMPLETIONS, full).json()["error"]
    assert error["code"] == "context_length_exceeded" and "leaves no room for new ones in 112" in error["message"]


GIVEN = [
    {"min_tokens": 9},
    {"ignore_eos": True},
    {"stop_token_ids": [101, 32]},
    {"min_tokens": 12, "stop_token_ids": list(range(60, 120)), "min_p": 0.01},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_where_texts_end_is_the_librarys(shared, given):
    for prompt, seed in (("Once", 3), ("Twice", 4)):
        body = {"prompt": prompt, "max_tokens": 30, "seed": seed, "temperature": 0.8, **given}
        (choice,) = shared.post(COMPLETIONS, body).json()["choices"]
        sampling = SamplingParams(temperature=0.8, **given)
        expected = shared.service.decoder.generate(prompt, sampling=sampling, max_new_tokens=30, seed=seed)
        assert choice["text"] == expected.text
        assert choice["finish_reason"] == ("stop" if expected.stop_reason == "eos" else "length")
        assert len(expected.token_ids) > given.get("min_tokens", 0)


@pytest.mark.parametrize(("wrong", "param", "message"), [
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "at most max_tokens, which is 10"),
    ({"min_tokens": 20}, "min_tokens", "at most max_tokens, which is 16"),
    ({"min_tokens": -1}, "min_tokens", "whole numbers from 0"),
    ({"ignore_eos": 1}, "ignore_eos", "true, false"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "the target's vocabulary"),
    ({"stop_token_ids": "5"}, "stop_token_ids", "token ids"),
    ({"min_tokens": 3, "regex": "a+"}, "min_tokens", "min_tokens and a grammar"),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos", "ignore_eos and a grammar"),
    ({"max_tokens": -2}, "max_tokens", "from -1"),
    ({"stream_options": {"include_usage": 1}}, "include_usage", "true, false"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not supported"),
])  # fmt: skip
def test_what_cannot_be_is_named(shared, wrong, param, message):
    error = shared.post(COMPLETIONS, {"prompt": "Once", **wrong}).json()["error"]
    assert error["param"] == param and message in error["message"]


def test_aliases(serving):
    live = serving(model_name="small", model_alias=("gpt-4o-mini", "small", "org/other"))
    assert [model.id for model in live.client.models.list().data] == ["small", "gpt-4o-mini", "org/other"]
    assert live.client.models.retrieve("org/other").id == "org/other"
    for name in ("small", "gpt-4o-mini", "org/other", None):
        answer = live.post(CHAT, {"model": name, "messages": MESSAGES, "max_tokens": 2}).json()
        assert answer["model"] == "small", "the first name says what answered"
    error = live.post(CHAT, {"model": "gpt-4o", "messages": MESSAGES}).json()["error"]
    assert error["code"] == "model_not_found" and "'small', 'gpt-4o-mini', 'org/other'" in error["message"]


def test_slots_are_as_long_as_the_model_and_the_memory_allow(tiny_decoder, serving, monkeypatch, caplog):
    assert ServeOptions().slot_tokens is None
    assert serving(slot_tokens=None).service.slot_tokens == tiny_decoder.target.max_positions == 1024
    monkeypatch.setattr(tiny_decoder.target, "max_positions", 10_000)
    assert fitting_tokens(tiny_decoder, 6, Pool(1)) == 10_000, "texts take memory as they grow"
    monkeypatch.setattr(tiny_decoder.target, "max_positions", None)
    assert fitting_tokens(tiny_decoder, 6, Pool(1)) == 16_384
    monkeypatch.setattr(HFContext, "lend", lambda self, pool: None)
    one = Lane(tiny_decoder, LaneOptions(slots=1, slot_tokens=2048, chunk_tokens=64))
    one.reserve()
    per_token = one.cache_bytes / 2048
    caplog.set_level(logging.INFO, "polydraft.serve")
    assert fitting_tokens(tiny_decoder, 6, Pool(1)) == 2048, (
        "the least, whatever the memory: reserving it says what is too much"
    )
    assert fitting_tokens(tiny_decoder, 2, Pool(10**12)) == 16_384
    middle = fitting_tokens(tiny_decoder, 6, Pool(int(6 * 5000 * per_token)))
    assert 4500 <= middle <= 5000 and middle % 256 == 0
    assert f"--slot-tokens {middle}: 6 slots take" in caplog.text


@pytest.mark.parametrize(
    ("free", "asked", "size"),
    [(None, None, 1e9), (8e9, None, 2e9), (10**12, None, 4e9), (1, 3.5, 3.5e9)],
)
def test_the_pool_is_as_large_as_asked_or_as_the_memory_allows(monkeypatch, free, asked, size):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    assert fitting_pool(torch.device("cpu"), asked).size == size
    on_gpu = fitting_pool(torch.device("cuda"), asked)
    assert (None if on_gpu is None else on_gpu.size / 1e9) == asked
