"""Parse a chat's text while it is being generated: content, reasoning, tool calls.

Parsers get the text in pieces of one or several tokens; the result does not depend on where it was cut.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.serve.forms import Form

CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning_content", "call", "arguments"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_JSON_MARKS = frozenset('{}[]:,+-."\t\n\r ')
_BROKEN_CALLS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What transformers and this module raise for a call that does not fit its template, or is nested too deeply."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer, complete or not."""

    kind: str
    """``"content"``, ``"reasoning_content"``, ``"call"`` (the text is the function's name), or ``"arguments"``."""
    text: str
    call: int = -1
    """Number of the call, from 0; -1 for other parts."""


class Parser:
    """Parse one text. This base class knows no markers, so all of it is content.

    White space between parts is dropped. Text that looks like a call, but is not a valid one, stays content.

    Parameters
    ----------
    names : collection of str
        Functions that may be called; calls of others are content.
    parallel : bool
        Whether to return more than the first call.
    """

    def __init__(self, names: Collection[str] = (), *, parallel: bool = True) -> None:
        self.names, self._parallel = frozenset(names), parallel
        self._pieces: list[Piece] = []
        self._kind, self._blank, self._fresh = CONTENT, "", False
        self._calls = self._complete = 0

    def add(self, text: str, last: bool = False) -> list[Piece]:
        """Add text, `last` if no more follows, and return the pieces that are certain by now."""
        self._pieces = []
        self._read(text, last)
        if last and self._kind == CONTENT:
            self._append(CONTENT, self._blank)
        return self._pieces

    @property
    def calls(self) -> bool:
        """Whether the answer calls tools, and every call is complete."""
        return 0 < self._calls == self._complete

    def _read(self, text: str, last: bool) -> None:
        self._emit(CONTENT, text)

    def _begin_part(self, kind: str) -> None:
        """Begin another part of the answer."""
        self._kind, self._blank, self._fresh = kind, "", True

    def _emit(self, kind: str, text: str) -> None:
        """Add content or reasoning to the pieces, without white space at its ends."""
        if not text:
            return
        if kind != self._kind:
            self._begin_part(kind)
        text = self._blank + (text.lstrip() if self._fresh else text)
        solid = text.rstrip()
        self._blank = text[len(solid) :]
        self._fresh = self._fresh and not solid
        self._append(kind, solid)

    def _emit_call(self, name: str) -> None:
        self._begin_part(CALL)
        self._calls += 1
        self._append(CALL, name)

    def _append(self, kind: str, text: str) -> None:
        call = self._calls - 1 if kind in (CALL, ARGUMENTS) else -1
        if not text or (call > 0 and not self._parallel):
            return
        if self._pieces and kind != CALL and (self._pieces[-1].kind, self._pieces[-1].call) == (kind, call):
            text = self._pieces.pop().text + text
        self._pieces.append(Piece(kind, text, call))

    def _is_call(self, name: Any, arguments: Any) -> bool:
        return isinstance(name, str) and name in self.names and isinstance(arguments, Mapping)

    def _emit_whole_call(self, name: Any, arguments: Any) -> bool:
        """Add a complete call to the pieces, and return True; return False if it is not valid."""
        if not self._is_call(name, arguments):
            return False
        self._emit_call(name)
        self._append(ARGUMENTS, json.dumps(arguments))  # in ASCII, because models also write unpaired surrogates
        self._complete += 1
        return True


class FormParser(Parser):
    """Parse calls of a `Form`; arguments are passed on while they are being written.

    Parameters
    ----------
    form : Form, optional
        How calls are spelled; None if there are none.
    names : collection of str
    thought : pair of str, optional
        Markers around reasoning.
    thinks : bool
        Whether the prompt has opened the reasoning.
    parallel : bool
    """

    def __init__(
        self,
        form: Form | None,
        names: Collection[str] = (),
        *,
        thought: tuple[str, str] | None = None,
        thinks: bool = False,
        parallel: bool = True,
    ) -> None:
        super().__init__(names, parallel=parallel)
        self._form = form if self.names else None
        self._thought = thought
        self._buffer = ""
        self._state: Callable[[bool], bool] = self._in_reasoning if thought and thinks else self._in_content
        self._leads: tuple[str, ...] = self._first_leads(thought is not None and not thinks)
        self._depth, self._in_string, self._escaped, self._arguments = 0, False, False, ""

    def _first_leads(self, may_think: bool) -> tuple[str, ...]:
        """Return the markers that count only at the beginning."""
        thought = (self._thought[0],) if may_think and self._thought else ()
        return thought + ((self._form.bare,) if self._form is not None and self._form.bare else ())

    def _read(self, text: str, last: bool) -> None:
        self._buffer += text
        while self._buffer and self._state(last):
            pass

    def _in_reasoning(self, last: bool) -> bool:
        assert self._thought is not None
        end = self._thought[1]
        before, found, after = self._buffer.partition(end)
        held = 0 if found or last else _partial_marker(before, end)
        self._emit(REASONING, before[: len(before) - held])
        self._buffer = after if found else before[len(before) - held :]
        if found:
            self._state, self._leads = self._in_content, self._first_leads(False)
            self._begin_part(CONTENT)
        return bool(found)

    def _in_content(self, last: bool) -> bool:
        """Look for the marker that ends content; return whether to go on."""
        start = self._buffer.lstrip()
        at = len(self._buffer) - len(start)
        lead = next((lead for lead in self._leads if start.startswith(lead)), None)
        if lead is None and not last and any(lead.startswith(start) for lead in self._leads):
            return False
        if lead is not None and self._thought is not None and lead == self._thought[0]:
            self._buffer, self._state = start[len(lead) :], self._in_reasoning
            self._begin_part(REASONING)
            return True
        if lead is None:
            self._leads = ()
            at = -1 if self._form is None else self._buffer.find(self._form.marker)
        if at < 0:
            held = 0 if last or self._form is None else _partial_marker(self._buffer, self._form.marker)
            self._emit(CONTENT, self._buffer[: len(self._buffer) - held])
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        return self._read_call(at, last)

    def _read_call(self, at: int, last: bool) -> bool:
        """Read a call up to its arguments; return whether to go on."""
        assert self._form is not None
        head = self._form.head.match(self._buffer, at, partial=True)
        if head is not None and head.partial and not last:
            self._emit(CONTENT, self._buffer[:at])
            self._buffer = self._buffer[at:]
            return False
        if head is not None and not head.partial and head["name"] in self.names:
            self._emit(CONTENT, self._buffer[:at])
            self._emit_call(head["name"])
            self._buffer, self._state = self._buffer[head.end() :], self._in_arguments
            self._depth, self._arguments = 0, ""
            return True
        if self._form.close and self._buffer.startswith(self._form.marker, at):  # a call may have its keys in another order
            inside, found, after = self._buffer[at + len(self._form.marker) :].partition(self._form.close)
            if not found and not last:
                return False
            call = json_or_none(inside) if found else None
            if isinstance(call, Mapping) and self._is_call(call.get("name"), call.get("arguments")):
                self._emit(CONTENT, self._buffer[:at])
                self._emit_whole_call(call["name"], call["arguments"])
                self._buffer, self._leads = after, ()
                return True
        self._emit(CONTENT, self._buffer[: at + 1])
        self._buffer, self._leads = self._buffer[at + 1 :], ()
        return True

    def _in_arguments(self, last: bool) -> bool:
        """Read a JSON object up to its last brace, or to the first character that cannot be JSON."""
        length, ended = 0, False
        for character in self._buffer:
            ended = not self._in_string and not (character in _JSON_MARKS or character.isalnum())
            if ended:
                break
            length += 1
            self._follow(character)
            ended = not self._depth
            if ended:
                break
        found, self._buffer = self._buffer[:length], self._buffer[length:]
        self._arguments += found
        self._append(ARGUMENTS, found)
        if ended:
            self._complete += json_or_none(self._arguments) is not None
            self._state = self._tail
        return ended

    def _follow(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped, self._in_string = character == "\\", character != '"'
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")

    def _tail(self, last: bool) -> bool:
        """Read the text that closes a call; if it is incomplete at the end of the text, it is dropped."""
        assert self._form is not None
        tail = self._form.tail.match(self._buffer, partial=True)
        if tail is not None and tail.partial and not last:
            return False
        if tail is not None:
            self._buffer = self._buffer[tail.end() :]
        self._state = self._in_content
        self._leads = (self._form.between.strip(),) if self._form.between.strip() else ()
        return True


class TemplateParser(Parser):
    """Parse calls of a response template with the parser of transformers; only complete calls are returned.

    That parser gets one character at a time: the result then does not depend on how the text was cut, and parsing can go on
    right after a call that is not valid, which becomes content, without its markers.

    Parameters
    ----------
    template : mapping
        The tokenizer's ``response_template``.
    prompt : str
        Its end may already begin the answer.
    tools : sequence of dict
        In the format of chat templates; arguments get the types that the schemas say.
    names : collection of str
    parallel : bool
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        prompt: str,
        tools: Sequence[dict[str, Any]],
        names: Collection[str],
        *,
        parallel: bool = True,
    ) -> None:
        super().__init__(names, parallel=parallel)
        self._template, self._tools = dict(template), list(tools)
        self._raw = ""
        self._start(prompt)

    def _start(self, prompt: str) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(self._template, prefix=prompt, tools=self._tools)

    def _read(self, text: str, last: bool) -> None:
        for character in text:
            # The parser matches a closing pattern one character late.
            if not self._reads(character) and "close_pattern" in self._template["fields"].get("tool_calls", ()):
                self._reads(character)
        if last:
            self._reads(None)

    def _reads(self, character: str | None) -> bool:
        """Parse one character, or the end (None), and return whether it fits the template."""
        try:
            events = self._parser.finalize()[1] if character is None else self._parser.feed(character)
            for event in events:
                self._take(event["type"], event["field"], event)
        except _BROKEN_CALLS:
            self._emit(CONTENT, self._raw)
            self._raw = ""
            self._start("")
            return False
        return True

    def _take(self, kind: str, field: str, event: Mapping[str, Any]) -> None:
        if kind == "region_chunk" and field == "tool_calls":
            self._raw += event["text"]
        elif kind == "region_chunk" and field in (CONTENT, *_REASONING_FIELDS):
            self._emit(CONTENT if field == CONTENT else REASONING, event["text"])
        elif kind == "region_close" and field == "tool_calls":
            value = event["value"]
            functions = [call["function"] for call in (value if isinstance(value, list) else [value])]
            if not all(self._emit_whole_call(one["name"], one["arguments"]) for one in functions):
                self._emit(CONTENT, self._raw)
            self._raw = ""


def _partial_marker(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that may be the beginning of a marker."""
    return next((length for length in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-length:])), 0)


def json_or_none(text: str) -> Any:
    """Parse JSON; return None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
