"""Texts and bytes of single tokens, for log-probabilities."""

from collections.abc import Sequence
from typing import Any

from polydraft.models.spelling import falls_back, is_byte_level, is_single_byte, spelled


class TokenTexts:
    """Look up texts and bytes of a Hugging Face tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._byte_level, self._falls_back = is_byte_level(tokenizer), falls_back(tokenizer)
        self._special = frozenset(tokenizer.all_special_tokens)
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text, with replacement characters for incomplete UTF-8, and its bytes."""
        if token not in self._known:
            text = self._text(token)
            self._known[token] = text, self._bytes(token, text)
        return self._known[token]

    def length(self, token: int) -> int:
        """Count the characters that begin in a token; a character split over several tokens belongs to the first of them."""
        return sum(byte & 0xC0 != 0x80 for byte in self(token)[1])

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of several tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _text(self, token: int) -> str:
        """Decode a token after another one: many tokenizers drop a leading space, and different tokens would look the same."""
        before, both = self.decoded(self._before), self.decoded([*self._before, token])
        return both[len(before) :] if both.startswith(before) else self.decoded([token])

    def _bytes(self, token: int, text: str) -> list[int]:
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if self._byte_level and piece not in self._special:
            return list(spelled(piece, True))
        if self._falls_back and is_single_byte(piece):
            return list(spelled(piece, False))
        return list(text.encode("utf-8", "replace"))
