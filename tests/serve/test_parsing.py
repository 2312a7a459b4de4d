"""Answers taken apart: every form, wherever its text is cut, whole or broken."""

import json
import random
import sys
from itertools import pairwise

import pytest

from polydraft.serve.forms import ChatForms
from polydraft.serve.parsing import ARGUMENTS, CALL, CONTENT, REASONING, FormParser
from polydraft.serve.tools import Tools, parser_of

HERMES = "<tools>{{ tools }}</tools> answer with <tool_call> {% if '</think>' %}{% endif %}"
LLAMA = '<|start_header_id|>system<|end_header_id|> Respond with {"name": function name, "parameters": {...}}'
MISTRAL = "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]"
TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL + "[ARGS]",
    "gemma-4": "<|turn>model\n <|tool_call>call:",
    "functiongemma": "<start_of_turn>model\n <start_function_call>",
    "qwen-coder": "<|im_start|>assistant\n <tool_call>\n<function=",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = Tools(functions={name: {"name": name, "description": "", "parameters": SCHEMA} for name in ("weather", "time")})


class Templated:
    """As much of a tokenizer as matters here."""

    def __init__(self, template, response_template=None):
        self.chat_template, self.response_template = template, response_template


def parser(form, prompt="", tools=TOOLS):
    return parser_of(ChatForms.of(Templated(TEMPLATES[form])), tools, prompt)


def cut(text, places):
    ends = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def events(reader, pieces):
    """Everything that a parser tells, with neighbours of one kind joined."""
    found = []
    for number, text in enumerate(pieces):
        for piece in reader.add(text, last=number == len(pieces) - 1):
            if found and piece.kind != CALL and found[-1][::2] == (piece.kind, piece.call):
                found[-1] = (piece.kind, found[-1][1] + piece.text, piece.call)
            else:
                found.append((piece.kind, piece.text, piece.call))
    return found, reader.calls


def call(number, name, arguments):
    return [(CALL, name, number), (ARGUMENTS, arguments, number)]


PARIS, ROME = '{"city": "Paris"}', '{"city": "R}\\"o{me é"}'
BOTH = [*call(0, "weather", PARIS), *call(1, "time", ROME)]
HERMES_PARIS = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
HERMES_ROME = f'<tool_call>{{ "name":"time","arguments":{ROME} }}</tool_call>'
GOOD = [
    ("hermes", "", f"{HERMES_PARIS}\n{HERMES_ROME}", BOTH),
    ("hermes", "", f"Sure.\n{HERMES_PARIS}\n\ndone ", [(CONTENT, "Sure.", -1), *BOTH[:2], (CONTENT, "done ", -1)]),
    ("hermes", "", f"<think>\nwell <tool_call>\n</think>\n\n{HERMES_PARIS}", [(REASONING, "well <tool_call>", -1), *BOTH[:2]]),
    ("hermes", "a<think>\n", f"so\n</think>\n{HERMES_PARIS}", [(REASONING, "so", -1), *BOTH[:2]]),
    ("hermes", "", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', BOTH[:2]),
    ("llama", "", f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "time", "parameters": {ROME}}}', BOTH),
    ("llama", "", f'\n<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', BOTH[:2]),
    ("llama", "", f'So <|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', [(CONTENT, "So", -1), *BOTH[:2]]),
    (
        "mistral",
        "",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "time", "arguments": {ROME}}}]',
        BOTH,
    ),
    ("mistral", "", f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}, "id": "abcdefghi"}}] ', BOTH[:2]),
    ("mistral-args", "", f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{ROME}", BOTH),
    (
        "gemma-4",
        "<|turn>model\n",
        '<|channel>thought\nhm<channel|><|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
        [(REASONING, "hm", -1), *BOTH[:2]],
    ),
    (
        "functiongemma",
        "<start_of_turn>model\n",
        "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>",
        BOTH[:2],
    ),
    (
        "qwen-coder",
        "<|im_start|>assistant\n<think>\n",
        "ok</think>\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        [(REASONING, "ok", -1), *call(0, "weather", '{"city": "Paris", "days": 3}')],
    ),
]
"""Form, prompt, text, and what it says."""
DEEP = "[" * 1500 + "]" * 1500
"""Python does not read so many levels, unless somebody has raised its limit."""
BROKEN = [
    ("hermes", "", "a <tool_call> b", [(CONTENT, "a <tool_call> b", -1)]),
    ("hermes", "", '<tool_call>{"name": "weather"}</tool_call>', None),
    ("hermes", "", '<tool_call>{"name": "unheard", "arguments": {}}</tool_call>', None),
    ("hermes", "", '<tool_call>\n{"name": "weat', None),
    ("hermes", "", '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>', None),
    ("hermes", "", "<tool_call>" + "[" * 3000 + "</tool_call>", None),
    ("hermes", "", "<tool_call><tool_call>", None),
    ("hermes", "", '<tool_call>{"name": "weather", "arguments": {"city": "Pa', call(0, "weather", '{"city": "Pa')),
    (
        "hermes",
        "",
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"\n</tool_call> hm',
        [*call(0, "weather", '{"city": "Paris"\n'), (CONTENT, "</tool_call> hm", -1)],
    ),
    ("hermes", "", "<think> never closed", [(REASONING, "never closed", -1)]),
    ("llama", "", '{"answer": 42}', None),
    ("llama", "", '  {"name": "Ada", "parameters": {}}', None),
    ("llama", "", '<|python_tag|>weather.call(city="Paris")', None),
    ("mistral", "", "[TOOL_CALLS] nothing", None),
    ("mistral-args", "", "[TOOL_CALLS]unheard[ARGS]{}", None),
    ("gemma-4", "", "<|tool_call>call:weather{city:}<tool_call|>!", [(CONTENT, "{city:}!", -1)]),
    ("gemma-4", "", "a<|tool_call>call:unheard{}<tool_call|>", [(CONTENT, "a{}", -1)]),
    ("gemma-4", "", f"<|tool_call>call:weather{{city:{DEEP}}}<tool_call|>!", [(CONTENT, f"{{city:{DEEP}}}!", -1)]),
]
"""The same; None where all of it is content."""
CUTS = GOOD + BROKEN


@pytest.fixture(autouse=True)
def usual_limit():
    """Compilers raise the limit of the process in which other tests run."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(("form", "prompt", "text", "expected"), CUTS, ids=[f"{one[0]}-{n}" for n, one in enumerate(CUTS)])
def test_every_cut_of_every_form(form, prompt, text, expected):
    expected = [(CONTENT, text, -1)] if expected is None else expected
    whole = events(parser(form, prompt), [text])
    assert whole[0] == expected
    assert whole[1] == (any(kind == CALL for kind, *_ in expected) and (form, prompt, text, expected) in GOOD)
    short = len(text) <= 500  # long ones take a template parser a tenth of a second per cut
    for place in range(0, len(text) + 1, 1 if short else len(text) // 40):
        assert events(parser(form, prompt), cut(text, [place])) == whole, place
    assert events(parser(form, prompt), list(text)) == whole
    generator = random.Random(1)
    for _ in range(30 if short else 4):
        places = generator.sample(range(len(text)), generator.randrange(len(text)))
        assert events(parser(form, prompt), cut(text, places)) == whole


def test_arguments_are_told_while_they_are_written():
    reader = parser("hermes")
    told = [reader.add(text) for text in ('<tool_call>\n{"name": "weather', '", "arguments": {"ci', 'ty": ')]
    assert [[(one.kind, one.text) for one in step] for step in told] == [
        [], [(CALL, "weather"), (ARGUMENTS, '{"ci')], [(ARGUMENTS, 'ty": ')]
    ]  # fmt: skip


def test_one_call_where_calls_are_not_parallel():
    alone = Tools(functions=TOOLS.functions, parallel=False)
    for form, prompt, text, expected in GOOD:
        if expected is BOTH:
            assert events(parser(form, prompt, alone), list(text)) == (BOTH[:2], True)


def test_without_tools_calls_are_content():
    assert events(parser("hermes", tools=None), [f"<think>a</think>{HERMES_PARIS}"])[0] == [
        (REASONING, "a", -1), (CONTENT, HERMES_PARIS, -1)
    ]  # fmt: skip
    assert events(FormParser(None), ["  plain ", "text \n"])[0] == [(CONTENT, "  plain text \n", -1)]


def test_a_tokenizers_own_response_template_counts_first():
    own = {
        "start_anchor": "<go>",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {"open": "(", "close": ")", "content": "json", "repeats": True,
                           "transform": {"type": "function", "function": "{content}"}},
        },
    }  # fmt: skip
    reader = parser_of(ChatForms.of(Templated(HERMES, own)), TOOLS, "x<go>")
    text = 'Hm (3) ({"name": "weather", "arguments": {"city": "Paris"}})({'
    assert events(reader, list(text)) == ([(CONTENT, "Hm 3", -1), *BOTH[:2], (CONTENT, "{", -1)], True)


ALPHABET = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<tool", "[TOOL", "<",
    '{"name": "weather", "arguments": ', '{"name": "time", "parameters": ', '{"name"', ": ", '"weather"', "weather",
    '"id": "a"', '{"city": ', '"Paris"', '"', "\\", "{", "}", "[", "]", ",", ";", " ", "\n", "/", "é", "日本", "🙂", "7",
    "true", "word ",
]  # fmt: skip


def random_stream(generator):
    """Tokens: of markers, braces and words, and of whole calls, some of them with a token lost or doubled."""
    tokens = []
    for _ in range(generator.randrange(1, 9)):
        if generator.random() < 0.5:
            tokens += generator.choices(ALPHABET, k=generator.randrange(1, 7))
        else:
            text = generator.choice(GOOD[:11])[2]
            tokens += cut(text, generator.sample(range(len(text)), min(len(text), 12)))
            if generator.random() < 0.5:
                tokens[generator.randrange(len(tokens))] *= generator.choice([0, 2])
    return tokens


def rounds(generator, tokens):
    """Join tokens as rounds do that emit several."""
    joined = []
    while tokens:
        count = generator.randrange(1, 8)
        joined, tokens = [*joined, "".join(tokens[:count])], tokens[count:]
    return joined


def differences(count, make=parser):
    """Count random streams of which one token a step and several a step tell different events."""
    generator, different, calls = random.Random(5), 0, 0
    for number in range(count):
        form = ("hermes", "llama", "mistral", "mistral-args")[number % 4]
        tokens = random_stream(generator)
        prompt = generator.choice(["", "<think>"])
        alone = events(make(form, prompt), tokens)
        different += alone != events(make(form, prompt), rounds(generator, tokens))
        if make is parser:
            assert all(json.loads(text) is not None for kind, text, _ in alone[0] if alone[1] and kind == ARGUMENTS)
        calls += alone[1]
    assert calls > count // 20 or make is not parser
    return different


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_events_of_random_streams_do_not_depend_on_how_many_tokens_a_step_has(count):
    assert differences(count) == 0


def test_half_a_surrogate_pair_can_be_sent():
    text = '<tool_call>{"arguments": {"city": "\\ud800"}, "name": "weather"}</tool_call>'
    assert events(parser("hermes"), [text]) == (call(0, "weather", '{"city": "\\ud800"}'), True)


def test_parsers_that_cut_wrongly_are_found(monkeypatch):
    def hasty(reader):
        """Make a parser forget what it holds back."""

        def add(text, last=False):
            found = type(reader).add(reader, text, last)
            reader._buffer = ""
            return found

        reader.add = add
        return reader

    assert differences(400, lambda *given: hasty(parser(*given))) > 10
    monkeypatch.setattr("polydraft.serve.parsing._partial_marker", lambda text, marker: 0)  # holds nothing back
    assert differences(400, lambda *given: parser(*given)) > 10


def test_templates_of_transformers_too(monkeypatch):
    generator = random.Random(3)
    marks = [
        "<|tool_call>",
        "call:weather{",
        'city:<|"|>',
        "Paris",
        '<|"|>}',
        "<tool_call|>",
        "<|channel>thought\n",
        "<channel|>",
        " ",
    ]
    for _ in range(300):
        tokens = generator.choices(marks, k=12)
        assert events(parser("gemma-4"), tokens) == events(parser("gemma-4"), rounds(generator, tokens))
