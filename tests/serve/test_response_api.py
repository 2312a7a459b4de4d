"""`/v1/responses` is a chat by another form: same text, typed events in the API's order, nothing kept."""

import json

import openai
import pydantic
import pytest

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
PARTS = [{"type": "input_text", "text": "Hello "}, {"type": "input_text", "text": "there"}]
ITEMS = [{"type": "message", "role": "user", "content": PARTS}]
ASKED = {"instructions": "Be brief.", "max_output_tokens": 24, "temperature": 0.7}
TYPED = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip


class Answer(pydantic.BaseModel):
    word: str
    number: int


def respond(shared, **options):
    return shared.client.responses.create(**{"model": shared.service.model, "extra_body": {"seed": 7}, **options})


def chat(shared, **options):
    return shared.client.chat.completions.create(model=shared.service.model, seed=7, temperature=0.7, **options)


@pytest.mark.parametrize("given", ["Hello there", ITEMS])
def test_a_response_is_the_chats_answer(shared, given):
    expected = chat(shared, messages=MESSAGES, max_tokens=24)
    found = respond(shared, input=given, store=True, metadata={"team": "tests"}, **ASKED)
    assert found.output_text == expected.choices[0].message.content
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    assert found.usage.output_tokens == expected.usage.completion_tokens
    cut = expected.choices[0].finish_reason == "length"
    assert found.status == ("incomplete" if cut else "completed") == found.output[0].status
    assert (found.incomplete_details.reason if cut else None) == ("max_output_tokens" if cut else None)
    assert (found.instructions, found.temperature, found.max_output_tokens) == ("Be brief.", 0.7, 24)
    assert found.model == shared.service.model and found.metadata == {"team": "tests"} and not found.store


def test_an_answer_can_be_sent_back(shared):
    first = respond(shared, input="Hello there", **ASKED)
    said = [item.model_dump(exclude_none=True) for item in first.output]
    found = respond(shared, input=[*ITEMS, *said, {"role": "user", "content": "And then?"}], **ASKED)
    messages = [*MESSAGES, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And then?"}]
    assert found.output_text == chat(shared, messages=messages, max_tokens=24).choices[0].message.content


@pytest.mark.parametrize("limit", [1, 24])
def test_events_come_in_the_apis_order(shared, limit):
    options = {"input": "Hello there", **ASKED, "max_output_tokens": limit}
    whole = respond(shared, **options)
    events = list(respond(shared, **options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert list(dict.fromkeys(names)) == [*TYPED, f"response.{whole.status}"] and names.count("response.output_text.delta") >= 1
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    by_name = dict(zip(names, events, strict=True))
    assert by_name["response.output_text.done"].text == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage == whole.usage
    assert events[0].response.status == "in_progress" and not events[0].response.output
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {last.output[0].id} and last.id == events[0].response.id


def test_streams_name_their_events_and_end_by_the_last_one(shared):
    answer = shared.post("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "stream": True})
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n")]
    for name, data in frames:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert frames[-1][0] in ("event: response.completed", "event: response.incomplete")


def test_a_stream_that_fails_says_so(serving):
    server = serving(request_seconds=0.3, slot_tokens=1024)
    with pytest.raises(openai.APIError, match=r"not complete after 0\.3 seconds"):
        list(respond(server, input="Hello there", max_output_tokens=1000, stream=True, extra_body={"ignore_eos": True}))


def test_parse_gives_the_schemas_object(shared):
    options = {"model": shared.service.model, "input": "A word?", "text_format": Answer, "max_output_tokens": 400}
    bias = dict.fromkeys(shared.service.decoder.encode('"}'), 5)  # for short answers
    options["extra_body"] = {"seed": 3, "logit_bias": bias}
    found = shared.client.responses.parse(**options)
    assert isinstance(found.output_parsed, Answer)
    with shared.client.responses.stream(**options) as stream:
        *_, last = stream
        assert last.type == "response.completed" and stream.get_final_response().output_parsed == found.output_parsed


WRONG = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "instructions": 5}, "instructions"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "temperature": -1}, "temperature"),
    ({"input": "x", "messages": MESSAGES}, "messages"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "inptu": "x"}, "inptu"),
    ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"input": "x", "text": {"style": "brief"}}, "text.style"),
    ({"input": [{"role": "judge", "content": "x"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0] of type item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": "x" * 600}, "input"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=[f"{number} {one[1]}" for number, one in enumerate(WRONG)])
def test_what_is_wrong_is_named(shared, body, param):
    answer = shared.post("/v1/responses", body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert param.split("[")[0] in error["message"] or "prompt" in error["message"]
    assert "\n" not in error["message"] and "response_format" not in error["message"]


@pytest.mark.parametrize("path", ["embeddings", "audio/speech", "images/generations", "moderations", "responses/resp_1"])
def test_paths_of_other_servers_are_refused_by_what_is_here(shared, path):
    answer = shared.post(f"/v1/{path}", {})
    error = answer.json()["error"]
    assert answer.status_code == 404 and error["code"] == "not_served"
    assert (
        f"'/v1/{path}' is not served here: this server generates text" in error["message"]
        and "/v1/responses" in error["message"]
    )


def test_suffix_is_refused_by_what_is_here(shared):
    error = shared.post("/v1/completions", {"prompt": "x", "suffix": "y"}).json()["error"]
    assert error["param"] == "suffix" and "continues texts" in error["message"]
