"""How models spell tool calls and reasoning: tables, looked up by the markers in a chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Markers around reasoning."""
_NAME = r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?"
_UNIT = re.compile(r'<[|/]?\w+\|?>|\[\w+\]|"\w+"|\S')
"""A piece of text without white space inside: a marker, a key, one character."""
_ID = r'(?:\s*,\s*"id"\s*:\s*"\w*")?'
"""An id after the arguments: some models copy ids from the conversation."""


@dataclass(frozen=True)
class Form:
    """How a model spells tool calls whose arguments are JSON."""

    marker: str
    """Starts a call, anywhere in a text."""
    call: tuple[str, str, str]
    """Texts before the function's name, between name and arguments, and after the arguments."""
    between: str = ""
    """Separates calls."""
    start: str = ""
    end: str = ""
    """Texts before the first and after the last call."""
    bare: str = ""
    """Starts a call without the marker, at the beginning of an answer only."""
    close: str = ""
    """Ends a call, if there is a marker for that."""

    @cached_property
    def head(self) -> Any:
        """Pattern of what comes before the arguments, with any white space between its parts."""
        before = _loose(self.call[0])
        openings = {_loose(self.start), _loose(self.between), _loose(self.marker if self.bare else "")} - {""}
        if openings:
            before = rf"(?:(?:{'|'.join(sorted(openings))})\s*)?{before}"
        return regex.compile(rf"{before}{_NAME}{_loose(self.call[1])}\s*(?=\{{)")

    @cached_property
    def tail(self) -> Any:
        """Pattern of what comes after the arguments."""
        after = (_ID + r"\s*" + _loose(self.call[2])) if self.call[2] else ""
        more = rf"\s*(?:{_loose(self.end)}|(?={_loose(self.between)}))" if self.end else ""
        return regex.compile(after + more)


def _loose(text: str) -> str:
    return r"\s*".join(map(regex.escape, _UNIT.findall(text)))


LLAMA = Form("<|python_tag|>", ('{"name": "', '", "parameters": ', "}"), "; ", bare="{")
_FORMS: Mapping[tuple[str, ...], Form] = {
    ("[TOOL_CALLS]", "[ARGS]"): Form("[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]", "")),
    ("[TOOL_CALLS]",): Form("[TOOL_CALLS]", ('{"name": "', '", "arguments": ', "}"), ", ", "[TOOL_CALLS][", "]"),
    ("<tool_call>",): Form(
        "<tool_call>", ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), "\n", close="</tool_call>"
    ),
    ("<|start_header_id|>", '"parameters": '): LLAMA,
}
"""Forms by the markers in a chat template; the first that fits counts."""


def _template(anchor: str, thought: tuple[str, str], **call: Any) -> dict[str, Any]:
    """Return the response template for such markers around reasoning, and such calls."""
    called = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    return {
        "start_anchor": anchor,
        "fields": {
            "content": {"content": "text"},
            "reasoning_content": {"open": thought[0], "close": thought[1], "content": "text"},
            "tool_calls": {"repeats": True, "transform": called, **call},
        },
    }


def _keyed(anchor: str, opening: str, closing: str, quote: str) -> dict[str, Any]:
    """Return the response template for calls such as ``call:NAME{key:value}``, with special quotes around strings."""
    return _template(
        anchor,
        ("<|channel>thought\n", "<channel|>"),
        open_pattern=rf"{re.escape(opening)}call:(?P<name>[\w.-]+)",
        close=closing,
        content="json",
        content_args={"unquoted_keys": True, "string_delims": [[quote, quote]]},
    )


_TEMPLATES: Mapping[tuple[str, ...], dict[str, Any]] = {
    ("<|tool_call>call:",): _keyed("<|turn>model\n", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ("<start_function_call>",): _keyed("<start_of_turn>model\n", "<start_function_call>", "<end_function_call>", "<escape>"),
    ("<function=", "<tool_call>"): _template(
        "<|im_start|>assistant\n",
        THOUGHTS[0],
        open_pattern=r"<tool_call>\s*<function=(?P<name>[\w.-]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    ),
}
"""Response templates for arguments that are not JSON: Gemma 4, FunctionGemma, Qwen3-Coder and Qwen 3.5."""


@dataclass(frozen=True)
class ChatForms:
    """How the answers to a chat template spell calls and reasoning.

    Parameters
    ----------
    form : Form, optional
    template : mapping, optional
        A response template of transformers; takes precedence over the form.
    thought : pair of str, optional
        Markers around reasoning.
    """

    form: Form | None = None
    template: Mapping[str, Any] | None = None
    thought: tuple[str, str] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> "ChatForms":
        """Recognise the forms of a tokenizer's chat template."""
        templates = getattr(tokenizer, "chat_template", None) or ""
        chat = "".join(templates.values()) if isinstance(templates, Mapping) else templates
        own = getattr(tokenizer, "response_template", None)
        thought = next((pair for pair in THOUGHTS if pair[1] in chat), None)
        return cls(None if own else _first(_FORMS, chat), own or _first(_TEMPLATES, chat), thought)

    def thinks(self, prompt: str) -> bool:
        """Whether a prompt ends in the opening marker of reasoning."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought[0])


def _first(table: Mapping[tuple[str, ...], Any], template: str) -> Any:
    """Return the first entry whose markers are all in a chat template, or None."""
    return next((entry for marks, entry in table.items() if all(mark in template for mark in marks)), None)


def marker_tokens(tokenizer: Any, forms: ChatForms, ends: Sequence[int]) -> frozenset[int]:
    """Return the special tokens that are markers of calls or reasoning: decoded texts must include them."""
    form, template = forms.form, "" if forms.template is None else json.dumps(forms.template, ensure_ascii=False)
    markers = [*(forms.thought or ()), re.sub(r"\\+", "", template)]
    if form is not None:
        markers += [form.marker, form.start, *form.call, form.end]
    text, added = "".join(markers), getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset(number for number, one in added if one.special and str(one.content) in text) - frozenset(ends)
