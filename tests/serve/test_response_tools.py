"""Tools and reasoning in `/v1/responses`: the items are the parts of the chat's answer, whole, streamed, and sent back."""

import json

import pytest

from polydraft.serve.response_api import read_response_request

from .templated import PARTS, TOOL, leaning

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FLAT = {"type": "function", **TOOL["function"], "strict": True}
NAMED = {"type": "function", "name": "weather"}
ASK = {"input": "Hi", "tools": [FLAT], "seed": 3, "max_output_tokens": 200}
TEXT_EVENTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
}


def whole(server, body):
    answer = server.post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(item):
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def plain(response):
    """What does not differ between two answers to one request."""
    return [(item["type"], item["status"], item.get("name"), text_of(item)) for item in response["output"]]


def streamed(server, body):
    """Follow a stream event by event, and return the response that it ends with."""
    answer = server.post(RESPONSES, {**body, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last, items = events[-1]["response"], []
    assert events[-1]["type"] == f"response.{last['status']}"
    rest = iter(events[2:-1])
    for event in rest:
        assert (event["type"], event["output_index"]) == ("response.output_item.added", len(items))
        item = event["item"]
        assert item["status"] == "in_progress" and text_of(item) == ""
        about, name = TEXT_EVENTS[item["type"]]
        place = {"item_id": item["id"], "output_index": len(items)}
        if item["type"] != "function_call":
            place["content_index"] = 0
            assert next(rest).items() >= ({"type": "response.content_part.added"} | place).items()
        written = ""
        while (event := next(rest))["type"] == f"response.{about}.delta":
            assert event.items() >= place.items() and event["delta"]
            written += event["delta"]
        assert event.items() >= ({"type": f"response.{about}.done", name: written} | place).items()
        if item["type"] != "function_call":
            (part,) = last["output"][len(items)]["content"]
            assert next(rest).items() >= ({"type": "response.content_part.done", "part": part} | place).items()
        done = next(rest)
        assert (done["type"], done["output_index"]) == ("response.output_item.done", len(items))
        assert text_of(done["item"]) == written and done["item"]["id"] == item["id"]
        items.append(done["item"])
    assert items == last["output"]
    return last


def chat(server, body):
    """What the chat says to the same: content, reasoning and calls."""
    tools = [{"type": "function", "function": TOOL["function"]}]
    asked = {"messages": [{"role": "user", "content": body["input"]}], "tools": tools, "max_tokens": body["max_output_tokens"]}
    (choice,) = server.post(CHAT, {**{name: value for name, value in body.items() if name != "input"}, **asked} | {
        "max_output_tokens": None, "tool_choice": body.get("tool_choice", "auto"),
    }).json()["choices"]  # fmt: skip
    message = choice["message"]
    calls = [tuple(call["function"].values()) for call in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]


def joined(response):
    items = response["output"]
    content, reasoning = ("".join(text_of(one) for one in items if one["type"] == kind) for kind in ("message", "reasoning"))
    calls = [(one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]
    called = calls and all(one["status"] == "completed" for one in items if one["type"] == "function_call")
    reason = "length" if response["status"] == "incomplete" else "tool_calls" if called else "stop"
    return content, reasoning, calls, reason


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_the_chats(templated, choice):
    body = ASK | {"tool_choice": choice}
    found = whole(templated("hermes"), body)
    (call,) = found["output"]
    assert call["type"] == "function_call" and call["id"].startswith("fc_") and len(call["call_id"]) == 9
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    assert call["status"] == found["status"] == "completed" and found["incomplete_details"] is None
    assert (found["tools"], found["tool_choice"]) == ([FLAT], choice)
    assert joined(found) == chat(templated("hermes"), body)
    assert plain(streamed(templated("hermes"), body)) == plain(found)


@pytest.mark.parametrize("form", ["thinking", pytest.param("llama", marks=pytest.mark.slow), "hermes"])
def test_free_answers_have_the_chats_parts_in_their_order(templated, form):
    server, kinds, between = templated(form), set(), 0
    for number in range(6):
        body = ASK | {"input": str(number % 3), "seed": number, "logit_bias": leaning(server, PARTS[form])}
        body["max_output_tokens"] = 16 - 4 * (number % 3)
        found = whole(server, body)
        assert joined(found) == chat(server, body)
        assert plain(streamed(server, body)) == plain(found)
        order = [item["type"] for item in found["output"]]
        kinds |= set(order)
        between += "message,function_call" in ",".join(order)
        statuses = [item["status"] for item in found["output"] if item["type"] != "function_call"]
        assert "incomplete" not in statuses[:-1] and len({item["id"] for item in found["output"]}) == len(order)
        for item in found["output"]:
            assert "reasoning_text" not in str(item) or (item["type"] == "reasoning" and item["summary"] == [])
    assert kinds >= ({"reasoning"} if form == "thinking" else {"message", "function_call"}) and (between or form != "hermes")


def test_what_is_cut_is_incomplete(templated):
    for limit in (1, 3, 8):
        body = ASK | {"tool_choice": "required", "max_output_tokens": limit}
        found = whole(templated("hermes"), body)
        assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
        assert found["output"][-1]["status"] == "incomplete" and plain(streamed(templated("hermes"), body)) == plain(found)
    stopped = whole(templated("hermes"), ASK | {"tool_choice": "required", "stop": '"days'})
    assert stopped["status"] == "completed" and plain(stopped)[0][:3] == ("function_call", "incomplete", "weather")


CALLS = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
DRY = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "dry"}]}
TOLD = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "dry"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sure."}]}
USER = {"role": "user", "content": "Hi"}
OTHER = [{"id": "c2", "type": "function", "function": {"name": "time", "arguments": {}}}]
CONVERSATIONS = {
    "a call": ([CALLED, DRY], [{"content": "", "tool_calls": CALLS}, TOLD]),
    "all parts": ([THOUGHT, SAID, CALLED, DRY], [{"content": "Sure.", "reasoning_content": "hm", "tool_calls": CALLS}, TOLD]),
    "text behind": ([CALLED, SAID, DRY], [{"content": "Sure.", "tool_calls": CALLS}, TOLD]),
    "two calls": (
        [CALLED, {**CALLED, "call_id": "c2", "name": "time", "arguments": "{}"}, DRY, {**DRY, "call_id": "c2", "output": "5"}],
        [{"content": "", "tool_calls": CALLS + OTHER}, TOLD,
         {"role": "tool", "tool_call_id": "c2", "name": "time", "content": "5"}],
    ),
    "one by one": ([CALLED, DRY, CALLED, DRY], [{"content": "", "tool_calls": CALLS}, TOLD] * 2),
    "separate texts": ([SAID, SAID], [{"content": "Sure."}] * 2),
    "a summary": ([{"type": "reasoning", "summary": [{"text": "x"}], "status": None}, SAID], [{"content": "Sure."}]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_items_become_the_messages_of_a_chat(name):
    items, expected = CONVERSATIONS[name]
    wanted, _ = read_response_request({"input": [USER, *items, USER]})
    assert wanted.messages == [USER, *({"role": "assistant", **message} for message in expected), USER]


def test_answers_with_parts_can_be_sent_back(templated):
    server = templated("hermes")
    first = whole(server, ASK | {"tool_choice": "required"})
    (call,) = first["output"]
    items = [USER, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}]
    found = whole(server, {"input": items, "tools": [FLAT], "seed": 5, "max_output_tokens": 12})
    city = json.loads(call["arguments"])["city"]
    said = "<system>weather <tool_call></><user>Hi</><assistant><tool_call>{}</tool_call></><tool>dry of weather</><assistant>"
    expected = server.post("/tokenize", {"prompt": said.format(city)}).json()
    assert found["usage"]["input_tokens"] == expected["count"] and joined(found)[0]


WRONG = [
    ({"tools": [{"type": "web_search"}]}, "tools[0] of type web_search", "allowed are functions"),
    ({"tools": [FLAT, {"type": "mcp", "server_label": "x"}]}, "tools[1] of type mcp", "allowed are functions"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "flat as in /v1/responses"),
    ({"tools": [FLAT, FLAT]}, "tools[1]", "unique names"),
    ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "of a function in tools"),
    ({"tools": [FLAT], "tool_choice": {"type": "web_search"}}, "tool_choice", "of a function in tools"),
    ({"tool_choice": "required"}, "tools", "tools is missing"),
    ({"tools": [FLAT], "text": {"format": {"type": "json_object"}}}, "tools", "tools and text.format, regex or grammar"),
    ({"input": [USER, {**CALLED, "arguments": {}}]}, "input[1]", "a function_call with arguments, call_id, name"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]", "a function_call_output with call_id, output"),
    ({"input": [{**DRY, "output": [{"type": "input_image"}]}]}, "input[0].output", "parts of type input_text"),
    ({"input": [{**THOUGHT, "content": 5}]}, "input[0].content", "parts of type input_text"),
    ({"input": [{**CALLED, "namespace": "x"}]}, "input[0]", "a function_call with"),
    ({"input": [{"type": 5}]}, "input[0] of type 5", "allowed are message, function_call,"),
]


@pytest.mark.parametrize(("body", "param", "message"), WRONG, ids=[f"{number} {one[1]}" for number, one in enumerate(WRONG)])
def test_what_cannot_be_is_named(templated, body, param, message):
    answer = templated("hermes").post(RESPONSES, {"input": "x", "max_output_tokens": 4, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error
