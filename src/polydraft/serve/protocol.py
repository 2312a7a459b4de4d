"""The body of a request: every parameter is checked, and none is ignored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.errors import UsageError, shown
from polydraft.sampling import SamplingParams
from polydraft.sampling.grammar import LARK, REGEX, Grammar
from polydraft.serve.errors import RequestError, from_library, invalid_value, missing, unknown_parameter, unsupported
from polydraft.serve.neutral import KNOWN_ELSEWHERE, changes_nothing
from polydraft.serve.request import AUTO, OFF
from polydraft.serve.tools import Tools, read_calls, read_tools

_MOST_LOGPROBS = 20
_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_BIASED = 1024
_MOST_DIGITS = 20
"""Most digits of a token id: Python refuses to parse thousands."""
_MOST_TOKENS = 10**9
_PLAIN_LENGTH = 16
"""The API's default of `max_tokens` for completions."""
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_WHY = {"suffix": "by this server, which continues texts and does not fill gaps in them"}
_SPECULATIVE = '"auto", "off", or {"tree": "4x2x1", "trace": true}'
_OF_DRAFTING = ("tree", "trace", "scheme", "walk", "drafter", "draft")
_ABOUT_DRAFTING = f'a request chooses how to draft with "speculative": {_SPECULATIVE}; the rest are flags of polydraft serve'

_ABOUT_SCHEMAS = {"name", "description", "strict"}
"""What the API has beside a schema; ignored, as texts always follow the schema."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A checked request for a chat or for completions."""

    chat: bool
    model: str | None = None
    messages: Messages = field(default_factory=list)
    """For chats."""
    prompts: Sequence[str | list[int]] = ()
    """For completions."""
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    """None for as many as fit."""
    n: int = 1
    """Texts per prompt."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    """Whether completions begin with their prompts, whose log-probabilities are then included."""
    prompt_name: str = "prompt"
    """Name of the parameter that holds the prompt."""
    speculative: str = AUTO
    """``"auto"``, ``"off"``, or a tree."""
    grammar: Grammar | None = None
    prediction: str | None = None
    """The text that the client expects."""
    cache_salt: str = ""
    """Only requests with the same salt share beginnings of texts."""
    tools: Tools | None = None
    trace: bool = False
    """Whether chunks say where each token came from."""

    @property
    def num_texts(self) -> int:
        """Texts to generate."""
        return self.n * (1 if self.chat else len(self.prompts))


def read_request(
    body: dict[str, Any], *, chat: bool, max_choices: int = 1024, prompt_name: str | None = None
) -> CompletionRequest:
    """Read the body of a request for a chat or for completions, with at most `max_choices` texts per prompt."""
    # Every reader below removes what it reads from `left`; what remains at the end is refused.
    left = {str(name): value for name, value in body.items() if value is not None}
    wants: dict[str, Any] = {"chat": chat, "prompt_name": prompt_name or ("messages" if chat else "prompt")}
    if chat:
        wants["messages"] = _messages(left.pop("messages", None))
        wants["tools"] = read_tools(left)
        wants["max_new_tokens"] = _max_tokens(left)
        wants["top_logprobs"] = _chat_logprobs(left)
    else:
        wants["prompts"] = _prompts(left.pop("prompt", None))
        wants["max_new_tokens"] = _limit(left, "max_tokens", _PLAIN_LENGTH, least=0)
        if left.get("logprobs") is False:  # the form that chats have
            del left["logprobs"]
        wants["top_logprobs"] = _whole(left, "logprobs", 0, _MOST_LOGPROBS, None)
        wants["echo"] = _flag(left, "echo")
    wants["model"] = _text(left, "model")
    wants["n"] = _whole(left, "n", 1, max_choices, 1)
    wants["seed"] = _whole(left, "seed", -(2**63), 2**63 - 1, None)
    wants["stop"] = _stop(left.pop("stop", []))
    wants["stream"] = _flag(left, "stream")
    wants["include_usage"] = _stream_options(left.pop("stream_options", None), wants["stream"])
    wants["speculative"], wants["trace"] = _speculative(left.pop("speculative", AUTO))
    wants["cache_salt"] = _text(left, "cache_salt") or ""
    wants["prediction"] = _prediction(left.pop("prediction", None))
    if wants["prediction"] and wants["speculative"] == OFF:
        raise RequestError("conflicting_parameters", param="prediction", names='prediction and "speculative": "off"')
    wants["params"] = _sampling(left)
    wants["grammar"] = _grammar(left)
    tools = wants.get("tools")
    if wants["grammar"] is not None and tools is not None:
        raise RequestError("conflicting_parameters", param="tools", names="tools and response_format, regex or grammar")
    _check_ends(wants["params"], wants["max_new_tokens"], wants["grammar"] is not None or bool(tools and tools.forced))
    _refuse_rest(left, wants["n"], chat)
    return CompletionRequest(**wants)


def _refuse_rest(left: Mapping[str, Any], n: int, chat: bool) -> None:
    for name, value in left.items():
        if changes_nothing(name, value, n):
            continue
        if name in KNOWN_ELSEWHERE:
            where = _WHY.get(name, f"with the value {shown(value)}")
            raise unsupported(name, where, f"{name} is not supported with this value")
        if name in _OF_DRAFTING:
            message = f"unknown parameter {name!r}; {_ABOUT_DRAFTING}"
            raise RequestError("unknown_parameter", param=name, message=message)
        raise unknown_parameter(name, CHAT_NAMES if chat else COMPLETION_NAMES)


def _whole(left: dict[str, Any], name: str, low: int, high: int, default: Any) -> Any:
    value = left.pop(name, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid_value(name, value, f"whole numbers from {low} to {high}")
    return value


def _number(name: str, value: Any, allowed: str) -> float:
    """Read a number that a float can hold."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return value
    except OverflowError:
        pass
    raise invalid_value(name, value, allowed)


def _flag(left: dict[str, Any], name: str) -> bool:
    value = left.pop(name, False)
    if not isinstance(value, bool):
        raise invalid_value(name, value, "true, false")
    return value


def _text(left: dict[str, Any], name: str) -> str | None:
    value = left.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise invalid_value(name, value, "a string")
    return value


def _limit(left: dict[str, Any], name: str, default: int | None = None, least: int = 1) -> Any:
    """Read a limit on new tokens; -1 in the request and None here stand for as many as fit."""
    value = _whole(left, name, -1, _MOST_TOKENS, default)
    if value == 0 < least:
        raise invalid_value(name, 0, f"whole numbers from 1 to {_MOST_TOKENS}, or -1 for as many as fit")
    return None if value == -1 else value


def _max_tokens(left: dict[str, Any]) -> Any:
    old, new = _limit(left, "max_tokens"), _limit(left, "max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError("conflicting_parameters", param="max_tokens", names="max_tokens and max_completion_tokens")
    return old if new is None else new


def _chat_logprobs(left: dict[str, Any]) -> int | None:
    wanted, top = _flag(left, "logprobs"), _whole(left, "top_logprobs", 0, _MOST_LOGPROBS, None)
    if top and not wanted:
        raise invalid_value("top_logprobs", top, 'only with "logprobs": true')
    return (top or 0) if wanted else None


def _messages(value: Any) -> Messages:
    allowed = 'a list such as [{"role": "user", "content": "..."}]'
    if value in (None, []):
        raise missing("messages", allowed)
    if not isinstance(value, list):
        raise invalid_value("messages", value, allowed)
    named: dict[str, str] = {}
    return [_message(message, f"messages[{number}]", named) for number, message in enumerate(value)]


def _message(message: Any, where: str, named: dict[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise invalid_value(where, message, f"objects with content and a role of {', '.join(_ROLES)}")
    about_calls = read_calls(message, where, named)
    for name, value in message.items():
        if name not in ("role", "content", "name", *about_calls) and value not in (None, [], ""):
            raise unsupported(f"{where}.{name}")
    if not isinstance(message.get("name"), str | None):
        raise invalid_value(f"{where}.name", message["name"], "a string")
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content")
    written = text_of("" if content is None and role == "assistant" else content, f"{where}.content")
    return {"role": role, "content": written, **about_calls}


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of some content: a string, or a list of parts of these kinds."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise invalid_value(where, content, f"a string, or a list of parts of type {kinds[0]}")


def _prompts(value: Any) -> list[str | list[int]]:
    allowed = "text, token ids, or a list of either"
    if isinstance(value, str):
        return [value]
    if value in (None, []):
        raise missing("prompt", allowed)
    if isinstance(value, list):
        if all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            return [list(value)]
        if all(isinstance(one, str) for one in value):
            return list(value)
        if all(isinstance(one, list) and one and all(type(token) is int for token in one) for one in value):
            return [list(one) for one in value]
    raise invalid_value("prompt", value, allowed)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise invalid_value("stop", value, f"a string, or up to {_MOST_STOPS} of them")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _LONGEST_STOP:
            raise invalid_value("stop", stop, f"strings of 1 to {_LONGEST_STOP} characters")
    return tuple(stops)


def _stream_options(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict) or not set(value) <= {"include_usage", "include_obfuscation"}:
        raise invalid_value("stream_options", value, '{"include_usage": true}')
    wanted = dict(value)
    if _flag(wanted, "include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation")
    return _flag(wanted, "include_usage") and stream


def _speculative(value: Any) -> tuple[str, bool]:
    if value in (AUTO, OFF):
        return value, False
    if isinstance(value, dict) and set(value) <= {"tree", "trace"}:
        tree, trace = value.get("tree", AUTO), value.get("trace", False)
        if isinstance(tree, str) and isinstance(trace, bool):
            return (OFF if tree == "none" else tree), trace
    raise invalid_value("speculative", value, _SPECULATIVE)


def _prediction(value: Any) -> str | None:
    match value:
        case None:
            return None
        case {"type": "content", "content": content, **rest} if not rest:
            return text_of(content, "prediction.content") or None
        case _:
            raise invalid_value("prediction", value, '{"type": "content", "content": "the text that you expect"}')


def _grammar(left: dict[str, Any]) -> Grammar | None:
    """Read a grammar, which one of three parameters may hold."""
    found: dict[str, Grammar] = {}
    for name in (REGEX, LARK):
        text = _text(left, name)
        if text == "":
            raise invalid_value(name, text, "a non-empty string; leave it out for no grammar")
        if text is not None:
            found[name] = Grammar(name, text)
    response = left.pop("response_format", None)
    match response:
        case None:
            pass
        case {"type": "text", **rest} if not rest:
            pass
        case {"type": "json_object", **rest} if not rest:
            found["response_format"] = Grammar.json_object()
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema, **about}, **rest} if (
            not rest and set(about) <= _ABOUT_SCHEMAS
        ):
            found["response_format"] = Grammar.json_schema(schema)
        case _:
            allowed = '{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}}'
            raise invalid_value("response_format", response, allowed)
    if len(found) > 1:
        raise RequestError("conflicting_parameters", param=list(found)[-1], names=" and ".join(found))
    return next(iter(found.values()), None)


def _sampling(left: dict[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {}
    for name in _NUMBERS:
        if name in left:
            given[name] = _number(name, left.pop(name), "numbers")
    if (top_k := _whole(left, "top_k", -1, 2**31, None)) is not None:
        given["top_k"] = max(top_k, 0)  # other servers take -1 for "all"
    given["min_tokens"] = _whole(left, "min_tokens", 0, _MOST_TOKENS, 0)
    given["ignore_eos"] = _flag(left, "ignore_eos")
    given["stop_token_ids"] = left.pop("stop_token_ids", ())
    given["logit_bias"] = _bias(left.pop("logit_bias", {}))
    try:
        return SamplingParams(**given)
    except UsageError as error:
        raise from_library(error, sampling_name(error)) from None


def _check_ends(params: SamplingParams, max_new_tokens: int | None, constrained: bool) -> None:
    """Refuse parameters with which a text could not end."""
    if params.min_tokens > (_MOST_TOKENS if max_new_tokens is None else max_new_tokens):
        raise invalid_value("min_tokens", params.min_tokens, f"at most max_tokens, which is {max_new_tokens}")
    if constrained and (params.min_tokens or params.ignore_eos):
        name = "min_tokens" if params.min_tokens else "ignore_eos"
        raise RequestError("conflicting_parameters", param=name, names=f"{name} and a grammar")


def sampling_name(error: UsageError) -> str | None:
    """Return the sampling parameter that an error of the library begins with, if any."""
    return next((name for name in SamplingParams.__dataclass_fields__ if str(error).startswith(name)), None)


def _bias(value: Any) -> dict[int, float]:
    allowed = f'up to {_MOST_BIASED} token ids with numbers, such as {{"5": -1.5}}'
    if not isinstance(value, dict) or len(value) > _MOST_BIASED:
        raise invalid_value("logit_bias", value, allowed)
    bias = {}
    for token, number in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= _MOST_DIGITS):
            raise invalid_value("logit_bias", {token: number}, allowed)
        bias[int(token)] = float(_number("logit_bias", number, allowed))
    return bias


_SHARED_NAMES = {
    "model", "n", "seed", "stop", "stream", "stream_options", "speculative", "response_format", "grammar", "regex",
    "prediction", "cache_salt", "top_k", "logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", *_NUMBERS,
}  # fmt: skip
CHAT_NAMES = {
    "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs",
    "tools", "tool_choice", "parallel_tool_calls", *_SHARED_NAMES,
}  # fmt: skip
COMPLETION_NAMES = {"prompt", "max_tokens", "logprobs", "echo", *_SHARED_NAMES}
