"""The openai package: helpers that its other tests here do not use."""

import asyncio

import openai
import pydantic
import pytest

from .conftest import RESPONSES, TOOL, needs_tools

MESSAGES = [{"role": "user", "content": "Hello there"}]


class Answer(pydantic.BaseModel):
    word: str
    number: int


def test_chats_are_parsed(shared):
    options = {"model": shared.service.model, "messages": MESSAGES, "seed": 3, "max_tokens": 400}
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


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_response(shared, stream):
    needs_tools(shared, RESPONSES)
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
