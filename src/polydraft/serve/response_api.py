"""`/v1/responses`: the API's newer form of a chat, translated to a chat and back. Nothing is kept between requests."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from polydraft.serve.errors import RequestError, error_object, invalid_value, missing, unknown_parameter, unsupported
from polydraft.serve.neutral import KNOWN_ELSEWHERE
from polydraft.serve.parsing import ARGUMENTS, CALL, CONTENT, REASONING, Piece, json_or_none
from polydraft.serve.protocol import CHAT_NAMES, CompletionRequest, read_request, text_of
from polydraft.serve.request import Progress
from polydraft.serve.responses import ResponseBuilder, call_id
from polydraft.serve.service import Builds

_STATELESS = "by this server, which keeps no responses: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "by this server, which answers while the client waits",
    **dict.fromkeys(("include", "prompt", "context_management", "max_tool_calls", "moderation", "top_logprobs"), "here"),
    "stream_options": "by /v1/responses of this server",
    "truncation": "here: nothing is cut off a conversation",
}
"""Parameters that are refused, and why; harmless values are accepted."""
_HARMLESS: tuple[Any, ...] = (None, False, [], 0, "disabled", {"include_obfuscation": False})
_NOT_HERE = {
    "messages", "max_tokens", "max_completion_tokens", "response_format", "n", "logprobs", "reasoning_effort", "verbosity",
    "echo",
}  # fmt: skip
"""Parameters of chats that have another name here, or no meaning."""
_NAMES = {"input", "instructions", "max_output_tokens", "text", "reasoning", *_REFUSED} | CHAT_NAMES | KNOWN_ELSEWHERE
_NAMES -= _NOT_HERE
_CHAT_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""What a chat's parameters are called here, for its errors."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "reasoning_text", "text")
_INPUT = 'text, or a list such as [{"role": "user", "content": "..."}]'
_ITEM_NAMES = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"summary", "content", "encrypted_content"},
}
_ANY_ITEM_NAMES = {"type", "id", "status"}
_ITEMS = {
    CONTENT: ("message", "msg", "output_text"),
    REASONING: ("reasoning", "rs", "reasoning_text"),
    ARGUMENTS: ("function_call", "fc", "function_call_arguments"),
}
"""For each kind of piece: the type of its item, the prefix of that item's id, and the name in its events."""
_REPEATED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None,
    "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None, "user": None,
}  # fmt: skip
"""Parameters of the request that a response repeats, with their defaults."""


def read_response_request(body: dict[str, Any]) -> tuple[CompletionRequest, Builds]:
    """Read the body of a request for a response; return it as a chat, and how to build the answer."""
    left = {name: value for name, value in body.items() if value is not None}
    for name, value in left.items():
        if name not in _NAMES:
            raise unknown_parameter(name, _NAMES)
        if name in _REFUSED and value not in _HARMLESS:
            raise unsupported(name, _REFUSED[name])
    chat = {name: value for name, value in left.items() if name not in _REFUSED}
    chat["messages"] = _messages(chat.pop("input", None), chat.pop("instructions", None))
    chat["max_completion_tokens"] = chat.pop("max_output_tokens", None)
    chat["reasoning_effort"] = _only(chat, "reasoning", "effort").get("effort")
    text = _only(chat, "text", "format", "verbosity")
    chat["verbosity"], chat["response_format"] = text.get("verbosity"), _response_format(text.get("format"))
    try:
        wanted = read_request(chat, chat=True, prompt_name="input")
    except RequestError as error:
        error.rename(_CHAT_NAMES)
        raise
    return wanted, partial(ResponseApiBuilder, asked=left)


def _only(left: dict[str, Any], name: str, *allowed: str) -> dict[str, Any]:
    """Remove and return an object; refuse names other than these."""
    value = left.pop(name, {})
    if not isinstance(value, dict):
        raise invalid_value(name, value, f"an object with {' and '.join(allowed)}")
    found = {part: one for part, one in value.items() if one is not None}
    for part in found:
        if part not in allowed:
            raise unsupported(f"{name}.{part}")
    return found


def _messages(given: Any, instructions: Any) -> list[dict[str, Any]]:
    if given in (None, []):
        raise missing("input", _INPUT)
    if not isinstance(given, str | list):
        raise invalid_value("input", given, _INPUT)
    if not isinstance(instructions, str | None):
        raise invalid_value("instructions", instructions, "a string")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    for number, item in enumerate(items):
        message = _message(item, f"input[{number}]")
        if messages and _is_one_answer(messages[-1], message):
            for name in message.keys() - {"role"}:
                messages[-1][name] = messages[-1][name] + message[name] if name in messages[-1] else message[name]
        else:
            messages.append(message)
    return messages


def _is_one_answer(message: dict[str, Any], further: dict[str, Any]) -> bool:
    """Whether two messages are one in a chat, where an answer has its text, reasoning and calls in one message."""
    both = message.keys() | further.keys()
    return message["role"] == further["role"] == "assistant" and not both.isdisjoint(("tool_calls", "reasoning_content"))


def _message(item: Any, where: str) -> dict[str, Any]:
    """Turn an item of the input into a message, or a part of one."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if not (isinstance(kind, str) and kind in _ITEM_NAMES):
        raise unsupported(f"{where} of type {kind}", f"here: allowed are {', '.join(_ITEM_NAMES)}")
    names = _ITEM_NAMES[kind]
    if isinstance(item, dict) and {name for name, value in item.items() if value is not None} <= names | _ANY_ITEM_NAMES:
        match item:
            case {"role": str() as role} if kind == "message" and role in _ROLES:
                return {"role": role, "content": text_of(item.get("content"), f"{where}.content", _TEXTS)}
            case {"type": "function_call", "call_id": str() as number, "name": str() as name, "arguments": str() as given}:
                call = {"id": number, "type": "function", "function": {"name": name, "arguments": given}}
                return {"role": "assistant", "tool_calls": [call]}
            case {"type": "function_call_output", "call_id": str() as number, "output": output}:
                return {"role": "tool", "tool_call_id": number, "content": text_of(output, f"{where}.output", _TEXTS)}
            case {"type": "reasoning"}:  # the summary is left out: no model wrote it
                return {
                    "role": "assistant",
                    "reasoning_content": text_of(item.get("content") or "", f"{where}.content", _TEXTS),
                }
    roles = f"; roles are {', '.join(_ROLES)}" if kind == "message" else ""
    raise invalid_value(where, item, f"a {kind} with {', '.join(sorted(names))}{roles}")


def _response_format(value: Any) -> Any:
    """Return the format as chats have it, with the schema nested one level deeper."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: one for name, one in value.items() if name != "type"}}
    return value


class ResponseApiBuilder(ResponseBuilder):
    """Build a response from a chat's answer, whole or as typed events.

    Parameters
    ----------
    asked : dict
        The request.
    *arguments, **options
        Those of `ResponseBuilder`.
    """

    last = b""

    def __init__(self, *arguments: Any, asked: dict[str, Any], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked, self._numbers = asked, count()
        self._id = str(self._head["id"]).removeprefix("chatcmpl-")
        self._items: list[dict[str, Any]] = []
        """Items of the answer: messages, reasoning, calls."""
        self._kind = self._text = ""
        """Kind and text of the last item, which may still grow."""

    def complete(self) -> dict[str, Any]:
        """Return the complete answer."""
        (choice,) = super().complete()["choices"]
        *_, last = self._answer(choice, choice["message"])
        return dict(last["response"])

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that open a stream."""
        names = "response.created", "response.in_progress"
        return [self._event(name, response=self._response("in_progress")) for name in names]

    def events(self, progress: Progress) -> list[dict[str, Any]]:
        """Return the events of a stream for what one round added."""
        choices = (choice for chunk in super().events(progress) for choice in chunk["choices"])
        return [event for choice in choices for event in self._answer(choice, choice["delta"])]

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return the event that ends a failed stream, with the error also in the form that chats have."""
        body = error_object(error)
        return self._event("error", **{name: body["error"][name] for name in ("code", "message", "param")}, **body)

    def _answer(self, choice: dict[str, Any], said: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events for what a chat's choice says, and for its end."""
        pieces = self._pieces[0] if self._parsers else [Piece(CONTENT, said["content"])]
        for piece in pieces:
            if piece.text:
                yield from self._grow(piece)
        if choice["finish_reason"] is None:
            return
        cut = choice["finish_reason"] == "length"
        status = "incomplete" if cut else "completed"
        if not self._items:
            yield from self._open(CONTENT, "")
        yield from self._close(status)
        fields = {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "output": self._items}
        response = self._response(status, **fields, usage=self._response_usage(), speculation=choice["speculation"])
        yield self._event(f"response.{status}", response=response)

    def _grow(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Add a piece to the last item, or begin the next with it."""
        if piece.kind == CALL or piece.kind != self._kind:
            yield from self._close("completed")
            yield from self._open(ARGUMENTS if piece.kind == CALL else piece.kind, piece.text)
        if piece.kind != CALL:
            self._text += piece.text
            yield self._text_event("delta", delta=piece.text)

    def _open(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        """Begin an item; `name` is the function of a call."""
        (called, prefix, _), self._kind, self._text = _ITEMS[kind], kind, ""
        about = {"id": f"{prefix}_{self._id}_{len(self._items)}", "type": called, "status": "in_progress"}
        item = about | _fresh(kind, name)
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))
        if kind != ARGUMENTS:
            yield self._item_event("response.content_part.added", part=_part(kind, ""))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the last item, if any. A call is complete if its arguments are valid JSON."""
        if not self._items:
            return
        item, text = self._items[-1], self._text
        if self._kind == ARGUMENTS:
            item |= {"arguments": text, "status": "incomplete" if json_or_none(text) is None else "completed"}
            yield self._text_event("done", arguments=text)
        else:
            part = _part(self._kind, text)
            item |= {"content": [part], "status": status}
            yield self._text_event("done", text=text)
            yield self._item_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _response_usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.usage["prompt_tokens"],
            "input_tokens_details": self.usage["prompt_tokens_details"],
            "output_tokens": self.usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **self.usage.get("completion_tokens_details", {})},
            "total_tokens": self.usage["total_tokens"],
        }

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        repeated = {name: self._asked.get(name, default) for name, default in _REPEATED.items()}
        about = {"id": f"resp_{self._id}", "object": "response", "created_at": self._head["created"], "status": status}
        fixed = {"background": False, "error": None, "incomplete_details": None, "previous_response_id": None, "store": False}
        model = {"model": self._head["model"], "output": [], "truncation": "disabled", "usage": None}
        return {**about, **fixed, **model, **repeated, **fields}

    def _text_event(self, what: str, **fields: Any) -> dict[str, Any]:
        logprobs: dict[str, Any] = {"logprobs": []} if self._kind == CONTENT else {}
        return self._item_event(f"response.{_ITEMS[self._kind][2]}.{what}", **fields, **logprobs)

    def _item_event(self, name: str, **fields: Any) -> dict[str, Any]:
        place = {} if self._kind == ARGUMENTS else {"content_index": 0}
        return self._event(name, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **place, **fields)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": name, "sequence_number": next(self._numbers), **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    about: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == CONTENT else {}
    return {"type": _ITEMS[kind][2], "text": text, **about}


def _fresh(kind: str, name: str) -> dict[str, Any]:
    """Return the fields of a new item of this kind, without those that all items have."""
    if kind == ARGUMENTS:
        return {"call_id": call_id(), "name": name, "arguments": ""}
    return {"content": [], **({"role": "assistant"} if kind == CONTENT else {"summary": []})}
