"""Tools of a request: functions that the model may call, and the grammar of texts that must call one."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polydraft.sampling.grammar import LARK, STYLE, Grammar
from polydraft.serve.errors import invalid_value, missing, unsupported
from polydraft.serve.forms import LLAMA, ChatForms
from polydraft.serve.parsing import FormParser, Parser, TemplateParser

AUTO, NONE, REQUIRED = "auto", "none", "required"
_MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MARKER = re.compile(r"(<[|/]?\w+\|?>|\[\w+\])")
_SHAPE = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
_CHOICES = '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Functions that a model may call."""

    functions: Mapping[str, dict[str, Any]]
    """By name, in the format of chat templates."""
    choice: str = AUTO
    """``"auto"``, ``"required"``, or the name of the function that must be called."""
    parallel: bool | None = None
    """Whether several calls are allowed. None means yes, but one call if it is forced: small models would go on for ever."""

    @property
    def rendered(self) -> list[dict[str, Any]]:
        """The functions in the format of chat templates."""
        return [{"type": "function", "function": function} for function in self.functions.values()]

    @property
    def forced(self) -> list[str]:
        """Names of functions, one of which must be called; empty if the model is free."""
        if self.choice == AUTO:
            return []
        return list(self.functions) if self.choice == REQUIRED else [self.choice]


def parser_of(forms: ChatForms, tools: Tools | None, prompt: str) -> Parser:
    """Return the parser for an answer to a prompt."""
    names, parallel = ((), True) if tools is None else (tuple(tools.functions), tools.parallel is not False)
    forced = tools is not None and bool(tools.forced)
    if forms.template is not None and not forced:
        rendered = [] if tools is None else tools.rendered
        return TemplateParser(forms.template, prompt, rendered, names, parallel=parallel)
    form = (forms.form or LLAMA) if forced else forms.form
    return FormParser(form, names, thought=forms.thought, thinks=forms.thinks(prompt), parallel=parallel)


def grammar_of(forms: ChatForms, tools: Tools, prompt: str, tokens: Mapping[str, int]) -> Grammar:
    """Return the grammar of an answer that must call a tool, after any reasoning.

    Parameters
    ----------
    forms : ChatForms
        Without a `Form`, calls are spelled ``{"name": ..., "parameters": ...}``.
    tools : Tools
    prompt : str
    tokens : mapping
        Ids of markers that are single tokens; models would not recognise them spelled as text.
    """

    def spelled(text: str) -> str:
        units = [unit for unit in _MARKER.split(text) if unit]
        return " ".join(f"<[{tokens[unit]}]>" if unit in tokens else json.dumps(unit) for unit in units)

    form = forms.form or LLAMA
    before, middle, after = form.call
    calls = [
        f"{spelled(before + name + middle)} arguments_{number} {spelled(after)}" for number, name in enumerate(tools.forced)
    ]
    more = f"({spelled(form.between)} call)*" if tools.parallel and tools.choice == REQUIRED else ""
    rules = [f"answer: {spelled(form.start)} call {more} {spelled(form.end)}", f"call: {' | '.join(calls)}"]
    for number, name in enumerate(tools.forced):
        schema = {**tools.functions[name]["parameters"], "x-guidance": STYLE}
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    if forms.thought is None:
        return Grammar(LARK, "\n".join(["start: answer", *rules]))
    opening, closing = forms.thought
    thought = "thought" if forms.thinks(prompt) else f"({spelled(opening)} thought)?"
    if closing in tokens:
        rules.append(f"thought: /(.|\\n)*/ {spelled(closing)}")
    else:
        rules.append("thought[lazy]: /(.|\\n)*{}/".format(re.escape(closing).replace("/", r"\/")))
    return Grammar(LARK, "\n".join([f"start: {thought} (/[ \\n]+/)? answer", *rules]))


def read_tools(left: dict[str, Any]) -> Tools | None:
    """Remove the parameters about tools from a chat's; return the tools, or None if there are none to call."""
    tools, choice, parallel = left.pop("tools", []), left.pop("tool_choice", AUTO), left.pop("parallel_tool_calls", None)
    if not isinstance(tools, list) or len(tools) > _MOST_TOOLS:
        raise invalid_value("tools", tools, f"a list of up to {_MOST_TOOLS} functions")
    if not isinstance(parallel, bool | None):
        raise invalid_value("parallel_tool_calls", parallel, "true, false")
    functions: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools):
        function = _function(tool, f"tools[{number}]")
        if function["name"] in functions:
            raise invalid_value(f"tools[{number}]", function["name"], "unique names")
        functions[function["name"]] = function
    match _flat(choice):
        case "auto" | "none" | "required":
            pass
        case {"type": "function", "name": str() as name, **rest} if name in functions and not rest:
            choice = name
        case _:
            raise invalid_value("tool_choice", choice, f"{_CHOICES} of a function in tools")
    if choice == REQUIRED and not functions:
        raise missing("tools", f"[{_SHAPE}]")
    return Tools(functions=functions, choice=choice, parallel=parallel) if functions and choice != NONE else None


def _flat(value: Any) -> Any:
    """Return a function in the flat form of `/v1/responses`; in chats, its fields are nested one level deeper."""
    match value:
        case {"type": "function", "function": {**about}, **rest} if not rest:
            return {**about, "type": "function"}
    return value


def _function(tool: Any, where: str) -> dict[str, Any]:
    match _flat(tool):
        case {"type": str() as kind} if kind != "function":
            raise unsupported(f"{where} of type {kind}", "here: allowed are functions")
        case {"type": "function", "name": str() as name, **about}:
            parameters, description = about.get("parameters") or {}, about.get("description") or ""
            known = {part for part, value in about.items() if value is not None} <= {"description", "parameters", "strict"}
            if known and _NAME.fullmatch(name) and isinstance(parameters, dict) and isinstance(description, str):
                parameters = {"type": "object", "properties": {}, **parameters}
                if parameters["type"] != "object":  # other calls could not be told from content
                    raise invalid_value(f"{where}.parameters.type", parameters["type"], '"object"')
                return {"name": name, "description": description, "parameters": parameters}
    names = "with names of up to 64 letters, digits, '_', '-' and '.'"
    raise invalid_value(where, tool, f"{_SHAPE}, or flat as in /v1/responses, {names}")


def read_calls(message: Mapping[str, Any], where: str, named: dict[str, str]) -> dict[str, Any]:
    """Return a message's tool calls, call id and reasoning, in the format of chat templates.

    Parameters
    ----------
    message : mapping
    where : str
        What errors call the message.
    named : dict
        Function names by call id. Calls of this message are added, so that later tool messages find them.
    """
    found: dict[str, Any] = {}
    calls, reasoning = message.get("tool_calls"), message.get("reasoning_content")
    if message["role"] == "assistant" and calls:
        if not isinstance(calls, list):
            raise invalid_value(f"{where}.tool_calls", calls, "a list of calls")
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
        named.update((call["id"], call["function"]["name"]) for call in found["tool_calls"])
    if message["role"] == "assistant" and reasoning:
        if not isinstance(reasoning, str):
            raise invalid_value(f"{where}.reasoning_content", reasoning, "a string")
        found["reasoning_content"] = reasoning
    if message["role"] == "tool" and (answered := message.get("tool_call_id")):
        if not isinstance(answered, str):
            raise invalid_value(f"{where}.tool_call_id", answered, "a string")
        name = message.get("name") or named.get(answered)
        found |= {"tool_call_id": answered} | ({"name": name} if name else {})
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    match call:
        case {"id": str() as number, "function": {"name": str() as name, "arguments": str() as arguments}}:
            try:
                given = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                given = arguments  # as the model wrote it
            return {"id": number, "type": "function", "function": {"name": name, "arguments": given}}
    raise invalid_value(where, call, '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}')
