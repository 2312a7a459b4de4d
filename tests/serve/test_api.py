"""The API as the client that everybody has speaks it: texts are the library's, figures are true, errors have names."""

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from covering import covering
from polydraft.loading import load
from polydraft.sampling import SamplingParams
from polydraft.serve.protocol import read_request
from polydraft.serve.streaming import framed

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
    found = usage.prompt_tokens_details.cached_tokens
    assert found == usage.prompt_tokens - 1, "the second time, the prompt is known"
    whole.usage.prompt_tokens_details.cached_tokens = found
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


def test_requests_have_names(shared):
    wished = httpx.get(f"{shared.url}/health", headers={"x-request-id": "mine-1"})
    assert wished.headers["x-request-id"] == "mine-1"
    odd = httpx.get(f"{shared.url}/health", headers={"x-request-id": "a b\t<script>"})
    assert len(odd.headers["x-request-id"]) == 24


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
        (sequence,) = service.prepare(asked, loop).sequences
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


def test_streams_have_no_line_ends_inside_their_lines():
    text = "".join(map(chr, range(0x2100))) + "\U0001f600"
    stream = framed([{"text": text}, {"type": "end"}]).decode()
    first, none, kind, last, *rest = stream.splitlines()
    assert json.loads(first.removeprefix("data: ")) == {"text": text} and "é" in first, "readable where it may be"
    assert [none, kind, last, *rest] == ["", "event: end", 'data: {"type": "end"}', ""]
