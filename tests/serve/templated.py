"""A model that knows marks of calls as tokens, and the chat templates that servers of it have."""

import copy
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from conftest import byte_tokenizer
from families import FAMILIES
from polydraft.engine import Decoder
from polydraft.loading import load

HERMES = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call></>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{% if message.role == 'tool' %} of {{ message.name }}{% endif %}</>{% endfor %}<assistant>"
)
TEMPLATES = {
    "hermes": HERMES,
    "thinking": HERMES + "<think>\n{# </think> #}",
    "llama": HERMES.replace("<tool_call>", '<|start_header_id|>"parameters": '),
    "mistral": HERMES.replace("<tool_call>", "[TOOL_CALLS]"),
    "mistral-args": HERMES.replace("<tool_call>", "[TOOL_CALLS][ARGS]"),
    "gemma-4": HERMES.replace("<tool_call>", "<|tool_call>call:"),
    "deaf": HERMES.replace("{% if tools %}", "{% if false %}"),
    "unknown": HERMES.replace("<tool_call>", "(tool)"),
}
WORDS = [
    '\n{"name": "weather", "arguments": {"ci', '[{"name": "weather", "arguments": {"ci',
    '{"name": "weather", "parameters": {"ci', 'ty": "Paris"}}\n', "well ", "</think>",
]  # fmt: skip
SPECIAL = ["<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</tool_call>", "<unused>"]
PARTS = {
    "hermes": ["<tool_call>", WORDS[0], WORDS[3], "</tool_call>"],
    "llama": ["<|python_tag|>", WORDS[2], WORDS[3], ";", "<end>"],
    "mistral": ["[TOOL_CALLS]", WORDS[1], WORDS[3], "]"],
    "thinking": ["</think>", "<tool_call>", WORDS[0], WORDS[3], "well "],
}
"""What texts are made of, by a large bias: any order of it comes up, a call now and then."""
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}}


def marking_decoder(folder: Path) -> Decoder:
    """Return a model that knows marks as tokens of their own, special ones and others, and words that calls are made of."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in WORDS])
    options = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 1024}
    model = FAMILIES.get("llama").build(**options)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load(str(folder), draft="early-exit:1", tree="3x2x1", dtype="float32")


def with_template(decoder: Decoder, name: str) -> Decoder:
    """Return a decoder whose tokenizer has one of these templates."""
    tokenizer = copy.deepcopy(decoder.tokenizer)
    tokenizer.chat_template = TEMPLATES[name]
    return decoder.replace(tokenizer=tokenizer)


def leaning(server: Any, words: list[str], by: float = 100.0) -> dict[int, float]:
    """Return a bias towards tokens."""
    tokenizer = server.service.decoder.tokenizer
    return {tokenizer.convert_tokens_to_ids(word): by for word in words}
