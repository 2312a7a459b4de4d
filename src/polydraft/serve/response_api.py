"""`/v1/responses`: a chat in the API's newer form, translated there and back. Nothing is kept from one request to the next."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from polydraft.errors import unknown_name
from polydraft.serve.errors import RequestError, error_object, invalid_value, missing, unsupported
from polydraft.serve.neutral import KNOWN_ELSEWHERE
from polydraft.serve.protocol import CHAT_NAMES, CompletionRequest, read_request
from polydraft.serve.request import Progress
from polydraft.serve.responses import ResponseBuilder
from polydraft.serve.service import Builds

_STATELESS = "by this server, which keeps no responses: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": "by this server, which answers while the client waits",
    **dict.fromkeys(("include", "prompt", "context_management", "max_tool_calls", "moderation", "top_logprobs"), "here"),
    **dict.fromkeys(("tools", "stream_options"), "by /v1/responses of this server"),
    "truncation": "here: nothing is cut off a conversation",
}
"""Why; what asks for nothing is accepted."""
_HARMLESS: tuple[Any, ...] = (None, False, [], 0, "disabled", {"include_obfuscation": False})
_NOT_HERE = {
    "messages", "max_tokens", "max_completion_tokens", "response_format", "n", "logprobs", "reasoning_effort", "verbosity",
    "echo",
}  # fmt: skip
"""Names of chats that have others here, or mean nothing."""
_NAMES = {"input", "instructions", "max_output_tokens", "text", "reasoning", *_REFUSED} | CHAT_NAMES | KNOWN_ELSEWHERE
_NAMES -= _NOT_HERE
_CHAT_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""What errors about the chat are about."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_INPUT = 'text, or a list such as [{"role": "user", "content": "..."}]'
_MESSAGE_NAMES = {"type", "role", "content", "id", "status", "phase"}
_TOLD: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None,
    "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": None, "user": None,
}  # fmt: skip
"""What a response repeats of its request, with the values where that has none."""


def read_response_request(body: dict[str, Any]) -> tuple[CompletionRequest, Builds]:
    """Read the body of a request for a response; return the chat that it asks for, and who tells the answer."""
    left = {name: value for name, value in body.items() if value is not None}
    for name, value in left.items():
        if name not in _NAMES:
            raise RequestError("unknown_parameter", param=name, message=unknown_name("parameter", name, sorted(_NAMES)))
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
        error.rename(_CHAT_NAMES.get(error.param or ""))
        raise
    return wanted, partial(ResponseApiBuilder, asked=left)


def _only(left: dict[str, Any], name: str, *allowed: str) -> dict[str, Any]:
    """Take out an object that has these names alone."""
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
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    return first + [_message(item, f"input[{number}]") for number, item in enumerate(items)]


def _message(item: Any, where: str) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if isinstance(kind, str) and kind != "message":
        raise unsupported(f"{where} of type {kind}", "here: allowed are messages")
    if kind is None or item.get("role") not in _ROLES or not set(item) <= _MESSAGE_NAMES:
        raise invalid_value(where, item, f"messages with content and a role of {', '.join(_ROLES)}")
    return {"role": item["role"], "content": _text(item.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if isinstance(parts, list) and parts:
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") in _TEXTS else None for part in parts]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise invalid_value(where, content, "a string, or a list of parts of type input_text")


def _response_format(value: Any) -> Any:
    """Return a format as chats have it, which keep a schema one level further down."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: one for name, one in value.items() if name != "type"}}
    return value


class ResponseApiBuilder(ResponseBuilder):
    """Tell a chat's answer as a response, whole or by typed events.

    Parameters
    ----------
    asked : dict
        The request.
    *arguments, **options
        As of `ResponseBuilder`.
    """

    last = b""

    def __init__(self, *arguments: Any, asked: dict[str, Any], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked, self._numbers = asked, count()
        self._id = str(self._head["id"]).removeprefix("chatcmpl-")
        self._items: list[dict[str, Any]] = []
        """Of the answer, the last of which may grow."""

    def complete(self) -> dict[str, Any]:
        """Return the complete answer."""
        (choice,) = super().complete()["choices"]
        for _ in self._grow(choice["message"]["content"]):
            pass
        return self._end_response(choice)[1]

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that open a stream."""
        names = "response.created", "response.in_progress"
        return [self._event(name, response=self._response("in_progress")) for name in names]

    def events(self, progress: Progress) -> list[dict[str, Any]]:
        """Return the events of a stream that tell of what a round brought."""
        found = list[dict[str, Any]]()
        for chunk in super().events(progress):
            (choice,) = chunk["choices"]
            found += self._grow(choice["delta"].get("content"))
            if choice["finish_reason"] is not None:
                events, response = self._end_response(choice)
                found += [*events, self._event(f"response.{response['status']}", response=response)]
        return found

    def failure(self, error: BaseException) -> dict[str, Any]:
        """Return the event that ends a stream that failed: as the API has it, and as other streams have it."""
        told = error_object(error)
        return self._event("error", **{name: told["error"][name] for name in ("code", "message", "param")}, **told)

    def _grow(self, text: str | None) -> Iterator[dict[str, Any]]:
        """Add text to the answer's message."""
        if not text and self._items:
            return
        if not self._items:
            item = {"id": f"msg_{self._id}", "type": "message", "status": "in_progress", "role": "assistant"}
            self._items.append(item | {"content": [_part("")]})
            yield self._event("response.output_item.added", output_index=0, item=item | {"content": []})
            yield self._of_part("response.content_part.added", part=_part(""))
        if text:
            self._items[-1]["content"][0]["text"] += text
            yield self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def _end_response(self, choice: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """End the answer; return the events that tell so, and the response."""
        cut = choice["finish_reason"] == "length"
        item = self._items[-1] = self._items[-1] | {"status": "incomplete" if cut else "completed"}
        (part,) = item["content"]
        events = [
            self._of_part("response.output_text.done", text=part["text"], logprobs=[]),
            self._of_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]
        details = {"reason": "max_output_tokens"} if cut else None
        told = {"incomplete_details": details, "usage": self._response_usage(), "speculation": choice["speculation"]}
        return events, self._response(item["status"], output=self._items, **told)

    def _response_usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **self.usage.get("completion_tokens_details", {})},
            "total_tokens": self.usage["total_tokens"],
        }

    def _response(self, status: str, **told: Any) -> dict[str, Any]:
        repeated = {name: self._asked.get(name, default) for name, default in _TOLD.items()}
        about = {"id": f"resp_{self._id}", "object": "response", "created_at": self._head["created"], "status": status}
        fixed = {"background": False, "error": None, "incomplete_details": None, "previous_response_id": None, "store": False}
        model = {"model": self._head["model"], "output": [], "truncation": "disabled", "usage": None}
        return {**about, **fixed, **model, **repeated, **told}

    def _of_part(self, name: str, **told: Any) -> dict[str, Any]:
        return self._event(name, item_id=self._items[-1]["id"], output_index=0, content_index=0, **told)

    def _event(self, name: str, **told: Any) -> dict[str, Any]:
        return {"type": name, "sequence_number": next(self._numbers), **told}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
