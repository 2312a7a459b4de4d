"""LiteLLM: an OpenAI-compatible server by its address, chats, completions and responses."""

import pydantic
import pytest

from .conftest import needed

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MESSAGES = [{"role": "user", "content": "Hello there"}]


class Answer(pydantic.BaseModel):
    word: str
    number: int


def test_it_speaks_to_the_server(shared, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = needed("litellm", "litellm")
    server = {"model": f"openai/{shared.service.model}", "api_base": f"{shared.url}/v1", "api_key": "none", "num_retries": 0}
    same = {"model": shared.service.model, "temperature": 0}
    expected = shared.client.chat.completions.create(**same, messages=MESSAGES, max_tokens=20)
    text = expected.choices[0].message.content
    found = litellm.completion(**server, messages=MESSAGES, max_tokens=20, temperature=0)
    assert found.choices[0].message.content == text and found.usage.completion_tokens == expected.usage.completion_tokens
    stream = litellm.completion(
        **server, messages=MESSAGES, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    parsed = litellm.completion(**server, messages=MESSAGES, max_tokens=400, seed=3, response_format=Answer)
    Answer.model_validate_json(parsed.choices[0].message.content)
    completed = litellm.text_completion(
        **{**server, "model": f"text-completion-openai/{shared.service.model}"}, prompt="Once", max_tokens=8, temperature=0
    )
    assert completed.choices[0].text == shared.client.completions.create(**same, prompt="Once", max_tokens=8).choices[0].text
    response = litellm.responses(**server, input="Hello there", max_output_tokens=20, temperature=0)
    assert response.output[0].content[0].text == text
    events = litellm.responses(**server, input="Hello there", max_output_tokens=20, temperature=0, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
