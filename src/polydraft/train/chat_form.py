"""The fixed parts of a chat template, as tokens."""

from dataclasses import dataclass
from typing import Any

_USER, _ANSWER, _SECOND = "polydraftuserturn", "polydraftanswer", "polydraftsecondturn"


@dataclass(frozen=True)
class ChatForm:
    """What stands before the user's turn, between it and the answer, and between an answer and the next turn."""

    opening: list[int]
    to_answer: list[int]
    to_user: list[int]


def chat_form(tokenizer: Any) -> ChatForm | None:
    """Read the form off a rendered conversation; None where there is no template, or one that hides its turns."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _SECOND},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if any(text.count(mark) != 1 for mark in (_USER, _ANSWER, _SECOND)):
        return None
    opening, rest = text.split(_USER)
    to_answer, rest = rest.split(_ANSWER)
    to_user, _ = rest.split(_SECOND)
    parts = [list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (opening, to_answer, to_user)]
    return ChatForm(*parts) if all(parts) else None
