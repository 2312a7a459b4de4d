"""The openai package: helpers that its other tests here do not use."""

import asyncio

import openai
import pydantic
import pytest

from ..templated import leaning
from .conftest import TOOL

MESSAGES = [{"role": "user", "content": "Hello there"}]


class Answer(pydantic.BaseModel):
    word: str
    number: int


def test_chats_are_parsed(shared):
    bias = dict.fromkeys(shared.service.decoder.encode('"}'), 5)  # for short answers
    options = {"model": shared.service.model, "messages": MESSAGES, "seed": 3, "max_tokens": 400, "logit_bias": bias}
    found = shared.client.chat.completions.parse(**options, response_format=Answer)
    assert isinstance(found.choices[0].message.parsed, Answer)
    with shared.client.chat.completions.stream(**options, response_format=Answer) as stream:
        names = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == found.choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= names


def test_the_asynchronous_client_reads_all_three_ways_of_asking(shared):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            same = {"model": shared.service.model, "temperature": 0}
            chat = client.chat.completions.create(**same, messages=MESSAGES, max_tokens=12)
            response = client.responses.create(**same, input="Hello there", max_output_tokens=12)
            completion = client.completions.create(**same, prompt="Hello there", max_tokens=0, echo=True, logprobs=1)
            stream = await client.responses.create(**same, input="Hello there", max_output_tokens=12, stream=True)
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return *await asyncio.gather(chat, response, completion), "".join(deltas)

    chat, response, completion, streamed = asyncio.run(ask())
    assert chat.choices[0].message.content == response.output_text == streamed
    assert completion.choices[0].text == "Hello there" and len(completion.choices[0].logprobs.tokens) == 11


class weather(pydantic.BaseModel):  # noqa: N801 - the function's name
    """The weather of a city."""

    city: str
    days: int


def test_calls_of_a_response_are_parsed(templated):
    server = templated("hermes")
    options = {"model": server.service.model, "input": "Hi", "tool_choice": "required", "max_output_tokens": 300}
    options |= {
        "tools": [openai.pydantic_function_tool(weather)],
        "extra_body": {"seed": 3, "logit_bias": leaning(server, ['"'], 3)},
    }
    found = server.client.responses.parse(**options)
    (call,) = found.output
    assert isinstance(call.parsed_arguments, weather)
    with server.client.responses.stream(**options) as stream:
        events = list(stream)
    assert (
        events[-1].type == "response.completed"
        and stream.get_final_response().output[0].parsed_arguments == call.parsed_arguments
    )
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(snapshots) > 1 and snapshots[-1] == call.arguments
    told = [{"role": "user", "content": "Hi"}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}]
    further = server.client.responses.create(
        **{**options, "input": told, "tools": [], "tool_choice": "auto", "max_output_tokens": 8}
    )
    assert further.output[0].type == "message"


def test_reasoning_of_a_response_is_streamed_and_sent_back(templated):
    server = templated("thinking")
    asked = {"model": server.service.model, "input": "Hi", "max_output_tokens": 30}
    asked["extra_body"] = {"seed": 3, "logit_bias": leaning(server, ["well ", "</think>"])}
    whole = server.client.responses.create(**asked)
    with server.client.responses.stream(**asked) as stream:
        events = list(stream)
    thought, message = events[-1].response.output
    assert (thought.type, message.type) == ("reasoning", "message") and events[-1].response.output_text == whole.output_text
    deltas = (event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert "".join(deltas) == thought.content[0].text == whole.output[0].content[0].text
    told = [{"role": "user", "content": "Hi"}, *whole.output, {"role": "user", "content": "And?"}]
    assert server.client.responses.create(**asked | {"input": told}).output


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_response(shared, stream):
    tool = {"type": "function", **TOOL["function"], "strict": True}
    options = {"input": "Hello there", "tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
    found = shared.client.responses.create(model=shared.service.model, **options, stream=stream)
    if stream:
        *_, last = found
        found = last.response
    calls = [item for item in found.output if item.type == "function_call"]
    assert calls and calls[0].name == "weather" and "city" in calls[0].arguments
    told = [*(item.model_dump(exclude_none=True) for item in found.output)]
    told.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"})
    second = shared.client.responses.create(
        model=shared.service.model, input=[{"role": "user", "content": "Hello there"}, *told], max_output_tokens=8
    )
    assert second.output_text
