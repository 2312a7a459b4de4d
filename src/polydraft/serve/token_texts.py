"""Single tokens as text and bytes, for log-probabilities."""

import re
from functools import cached_property
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""How tokenizers that fall back to bytes spell them."""


class TokenTexts:
    """What single tokens of a tokenizer stand for.

    Parameters
    ----------
    tokenizer : Hugging Face tokenizer
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text, with a replacement character for parts of one, and its bytes."""
        if token not in self._known:
            text = self._text(token)
            self._known[token] = text, self._bytes(token, text)
        return self._known[token]

    def _text(self, token: int) -> str:
        """Decode it behind another token: many tokenizers drop a space before the first one, which tells some tokens apart."""
        before, both = self._decoded(self._before), self._decoded([*self._before, token])
        return both[len(before) :] if both.startswith(before) else self._decoded([token])

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _before(self) -> list[int]:
        return list(self._tokenizer("a", add_special_tokens=False)["input_ids"])

    def _bytes(self, token: int, text: str) -> list[int]:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if self._is_byte_level and piece not in self._special:
            found = [_BYTE_OF.get(character) for character in piece or ""]
            if None not in found:
                return [byte for byte in found if byte is not None]
        if self._falls_back and (match := _BYTE.fullmatch(piece or "")):
            return [int(match[1], 16)]
        return list(text.encode("utf-8", "replace"))

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(self._tokenizer.all_special_tokens)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether pieces are spelled in one character per byte."""
        return "ByteLevel" in self._decoder

    @cached_property
    def _falls_back(self) -> bool:
        """Whether there are pieces of single bytes."""
        return "ByteFallback" in self._decoder

    @cached_property
    def _decoder(self) -> str:
        return str(getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", ""))


def _spelling() -> dict[str, int]:
    """Return which character stands for which byte in byte-level tokenizers: printable ones for themselves."""
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _spelling()
