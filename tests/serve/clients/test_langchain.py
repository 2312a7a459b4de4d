"""LangChain's chat models: messages in, messages out, streamed, structured, with tools."""

import pydantic
import pytest

from .conftest import TOOL, needed

pytestmark = pytest.mark.filterwarnings("ignore")


class Answer(pydantic.BaseModel):
    """An answer."""

    word: str
    number: int


@pytest.fixture
def model(shared):
    langchain = needed("langchain_openai", "langchain-openai")
    return lambda **options: langchain.ChatOpenAI(
        base_url=f"{shared.url}/v1", api_key="none", model=shared.service.model, max_retries=0, **options
    )


@pytest.mark.parametrize("responses", [False, True])
def test_it_says_and_streams_what_the_openai_package_reads(model, shared, responses):
    chat = model(temperature=0, max_tokens=20, use_responses_api=responses)
    messages = [("system", "Be brief."), ("user", "Hello there")]
    said = [{"role": role, "content": content} for role, content in messages]
    options = {"model": shared.service.model, "messages": said, "temperature": 0, "max_tokens": 20}
    expected = shared.client.chat.completions.create(**options)
    found = chat.invoke(messages)
    assert found.text == expected.choices[0].message.content
    assert found.usage_metadata["output_tokens"] == expected.usage.completion_tokens
    chunks = list(chat.stream(messages))
    assert "".join(chunk.text for chunk in chunks) == found.text and len(chunks) > 1
    assert [one.text for one in chat.batch([messages, messages])] == [found.text] * 2


@pytest.mark.parametrize("responses", [False, True])
def test_it_gets_structured_answers(model, responses):
    chat = model(max_tokens=400, extra_body={"seed": 3}, use_responses_api=responses)
    found = chat.with_structured_output(Answer, method="json_schema").invoke("A word and a number.")
    assert isinstance(found, Answer)


@pytest.mark.parametrize("responses", [False, True])
def test_it_binds_tools(model, responses):
    chat = model(temperature=0, max_tokens=200, use_responses_api=responses).bind_tools([TOOL], tool_choice="required")
    found = chat.invoke("What is the weather?")
    assert found.tool_calls and found.tool_calls[0]["name"] == "weather" and "city" in found.tool_calls[0]["args"]
    whole = None
    for chunk in chat.stream("What is the weather?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == found.tool_calls[0]["args"]
    with_result = [
        ("user", "What is the weather?"),
        found,
        {"role": "tool", "content": "sunny", "tool_call_id": found.tool_calls[0]["id"]},
    ]
    assert chat.invoke(with_result).tool_calls
