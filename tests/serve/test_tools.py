"""Tools and reasoning over HTTP: forced calls are valid, free ones are parsed, and speculation changes neither."""

import json
from itertools import product

import openai
import pytest
from pydantic import BaseModel

from covering import keeping

from .templated import PARTS, TEMPLATES, TOOL, leaning

CHAT = "/v1/chat/completions"
TIME = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
MESSAGES = [{"role": "user", "content": "Hi"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def streamed(server, body):
    """Put a stream's deltas together, one message for each choice, as clients do."""
    messages, reasons = {}, {}
    for line in server.post(CHAT, {**body, "stream": True}).text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        (choice,) = event["choices"]
        message = messages.setdefault(choice["index"], {})
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for part in value:
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        assert part["id"] and part["type"] == "function"
                        calls.append({"name": part["function"]["name"], "arguments": ""})
                    calls[part["index"]]["arguments"] += part["function"].get("arguments", "")
            elif value:
                message[name] = message.get(name, "") + value
        reasons[choice["index"]] = choice["finish_reason"]
    return [(said(message), reasons[index]) for index, message in sorted(messages.items())]


def said(message):
    calls = [one.get("function", one) for one in message.get("tool_calls", ())]
    calls = [(one["name"], one["arguments"]) for one in calls]
    return message.get("content") or "", message.get("reasoning_content", ""), calls


def whole(server, body):
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return [(said(choice["message"]), choice["finish_reason"]) for choice in answer.json()["choices"]]


def check_weather(call):
    name, arguments = call
    given = json.loads(arguments)
    assert name == "weather" and given["city"] in ("Paris", "Rome") and 1 <= given["days"] <= 9 and len(given) == 2


FORCED = list(product(TEMPLATES, ["required", "named"]))
QUICK = [("hermes", "required"), ("thinking", "named"), ("llama", "named"), ("mistral", "required"), ("mistral-args", "named")]


@pytest.mark.parametrize(("form", "choice"), keeping(FORCED, *QUICK, ("unknown", "required")))
def test_forced_calls_are_valid_in_every_form(templated, form, choice):
    choice = NAMED if choice == "named" else choice
    tools = [TIME, TOOL] if choice == NAMED else [TOOL]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": 3, "max_tokens": 400, "n": 2}
    body |= {"parallel_tool_calls": False, "logit_bias": leaning(templated(form), ["</think>", "<end>"], 8)}
    answers = whole(templated(form), body)
    assert len(answers) == 2
    for (content, _, calls), reason in answers:
        assert (content, reason) == ("", "tool_calls")
        check_weather(*calls)
    assert streamed(templated(form), body) == answers
    assert whole(templated(form), {**body, "temperature": 0, "speculative": "off"}) == whole(
        templated(form), {**body, "temperature": 0}
    )


def test_required_calls_may_be_several(templated):
    for form in ("hermes", "mistral"):
        bias = {**leaning(templated(form), ["<end>"], -4), **leaning(templated(form), ["Ċ", ","], 12)}
        body = {"messages": MESSAGES, "tools": [TOOL, TIME], "tool_choice": "required", "seed": 2, "max_tokens": 150}
        body |= {"parallel_tool_calls": True}
        ((_, _, calls), _), = whole(templated(form), body | {"logit_bias": bias})  # fmt: skip
        assert len(calls) > 1, form
        for name, arguments in calls[:-1]:
            assert name in ("weather", "time") and isinstance(json.loads(arguments), dict)


FREE = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 16}


@pytest.mark.parametrize("form", keeping(PARTS, "thinking", "llama"))
def test_free_texts_have_the_same_parts_with_speculation_and_without(templated, form, monkeypatch):
    server, calls, drafted = templated(form), 0, 0
    bias = leaning(server, PARTS[form])
    for number in range(1, 7):
        if number > 2 and calls > 3:
            break
        body = FREE | {"messages": [{"role": "user", "content": str(number)}], "seed": number, "logit_bias": bias}
        greedy = body | {"temperature": 0, "frequency_penalty": 1.5}
        found = [whole(server, greedy | {"speculative": way}) for way in ("auto", "off")]
        assert found[0] == found[1] == streamed(server, greedy)
        several = body | {"n": 8}
        answer = server.post(CHAT, several).json()["choices"]
        assert [(said(one["message"]), one["finish_reason"]) for one in answer] == streamed(server, several)
        for choice in answer:
            message = choice["message"]
            calls += len(message.get("tool_calls", ()))
            drafted += choice["speculation"]["mean_acceptance_length"] > 1
            assert "unused" not in str(message)
            if choice["finish_reason"] == "tool_calls":
                assert all(json.loads(one["function"]["arguments"]) is not None for one in message["tool_calls"])
    assert calls > 3 and drafted, calls


def test_special_tokens_leave_text_only_where_they_are_marks(templated):
    server = templated("hermes")
    sequence, = server.service.prepare(read(FREE), None).sequences  # fmt: skip
    tokens = server.service.decoder.tokenizer.convert_tokens_to_ids(["<unused>", "<tool_call>", "well ", "<end>"])
    assert "".join(sequence.take(tokens, ["target"] * 4).pieces) == "<tool_call>well "
    sequence, = server.service.prepare(read({"messages": MESSAGES}), None).sequences  # fmt: skip
    assert "".join(sequence.take(tokens, ["target"] * 4).pieces) == "well "


def read(body):
    from polydraft.serve.protocol import read_request

    return read_request(dict(body), chat=True)


def test_openais_client(templated):
    class weather(BaseModel):  # noqa: N801 - the function's name
        city: str
        days: int

    client = templated("hermes").client
    about = {"model": templated("hermes").service.model, "messages": MESSAGES, "seed": 3, "max_tokens": 400}
    about |= {"extra_body": {"logit_bias": leaning(templated("hermes"), ['"'], 3)}}
    tools = [openai.pydantic_function_tool(weather)]
    parsed = client.chat.completions.parse(**about, tools=tools, tool_choice="required", parallel_tool_calls=False)
    call, = parsed.choices[0].message.tool_calls  # fmt: skip
    assert isinstance(call.function.parsed_arguments, weather)
    assert parsed.choices[0].finish_reason == "tool_calls" and parsed.choices[0].message.content is None
    with client.chat.completions.stream(**about, tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert stream.get_final_completion().choices[0].message.tool_calls[0].function == call.function
    # The conversation goes on with the call and its result.
    further = [*MESSAGES, parsed.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    again = client.chat.completions.create(**{**about, "messages": further, "max_tokens": 5}, tools=tools)
    assert again.choices[0].message.role == "assistant"


def test_what_langchain_binds(templated):
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "model": templated("hermes").service.model,
        "tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "stream": False,
        "seed": 1,
        "max_tokens": 300,
    }
    ((_, _, (call,)), _), = whole(templated("hermes"), body)  # fmt: skip
    check_weather(call)
    flat = {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": {"type": "function", "name": "weather"}}
    check_weather(whole(templated("hermes"), {**body, **flat})[0][0][2][0])  # as Cursor sends them
    assert whole(templated("hermes"), {**body, "tool_choice": "none", "max_tokens": 4})[0][1] == "length"


def test_conversations_reach_the_template(templated):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "dry"}]},
    ]
    answer = templated("hermes").post("/tokenize", {"messages": messages, "tools": [TOOL]}).json()
    assert "".join(answer["pieces"]) == (
        "<system>weather <tool_call></><user>Hi</><assistant><tool_call>Rome</tool_call></><tool>dry of weather</><assistant>"
    )


def test_a_call_that_is_cut_off_is_no_500(templated):
    server = templated("hermes")
    forced = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": NAMED, "seed": 1}
    for limit in (1, 2, 3, 5, 8, 14):
        body = forced | {"max_tokens": limit}
        (((content, _, calls), reason),) = found = whole(server, body)
        assert streamed(server, body) == found
        assert reason == "length" and (content or calls)
    for stop in ('{"city', '": "'):
        body = forced | {"stop": stop, "max_tokens": 100}
        (((_, _, calls), reason),) = found = whole(server, body)
        assert streamed(server, body) == found
        assert reason == "stop" and not any("}" in arguments for _, arguments in calls)


def test_log_probabilities_are_of_all_tokens(templated):
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": NAMED, "seed": 1, "max_tokens": 100, "logprobs": True}
    answer = templated("hermes").post(CHAT, body).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


def test_reasoning_is_apart_from_content(templated):
    server = templated("thinking")
    assert server.service._forms.thinks("a<think>\n") and not server.service._forms.thinks("<think></think>")
    body = {"messages": MESSAGES, "max_tokens": 20, "seed": 1, "logit_bias": leaning(server, ["well ", "</think>"])}
    for (content, reasoning, _), _ in whole(server, body | {"n": 8}):
        assert "think" not in reasoning and set((content + " " + reasoning).replace("</think>", "").split()) <= {"well"}
    asked = body | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}}
    assert whole(server, asked)[0][0][0] in ("true", "false")  # a grammar is for the whole text


@pytest.mark.parametrize(
    ("form", "body", "message"),
    [
        ("deaf", {"tools": [TOOL]}, "does not mention tools; force a call"),
        ("unknown", {"tools": [TOOL]}, "calls of an unknown form; force a call"),
        ("hermes", {"tools": [{"type": "web_search"}]}, "'tools[0] of type web_search' is not supported here: allowed are"),
        ("hermes", {"tools": [{**TOOL, "name": "x"}]}, "tools[0]"),
        ("hermes", {"tools": [TOOL, TOOL]}, "unique names"),
        ("hermes", {"tools": "weather"}, "a list of up to 128"),
        ("hermes", {"tools": [TOOL] * 129}, "a list of up to 128"),
        ("hermes", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "names of up to 64"),
        ("hermes", {"tools": [TOOL], "tool_choice": "any"}, "tool_choice='any' is invalid"),
        ("hermes", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "of a function in tools"),
        ("hermes", {"tool_choice": "required"}, "tools is missing"),
        ("hermes", {"tools": [TOOL], "regex": "a"}, "cannot be combined"),
        ("hermes", {"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            "hermes",
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}], "tool_choice": "required"},
            "tools[0].parameters.type=5 is invalid",
        ),
        ("hermes", {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages[0].tool_calls[0]"),
        ("hermes", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
        ("hermes", {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(templated, form, body, message):
    answer = templated(form).post(CHAT, {"messages": MESSAGES, "max_tokens": 5, **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
