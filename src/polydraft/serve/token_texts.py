"""Single tokens as text and bytes, for log-probabilities."""

from functools import cached_property
from typing import Any


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
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._known[token] = text, self._bytes(token, text)
        return self._known[token]

    def _bytes(self, token: int, text: str) -> list[int]:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if self._is_byte_level and piece not in self._special:
            found = [_BYTE_OF.get(character) for character in piece or ""]
            if None not in found:
                return [byte for byte in found if byte is not None]
        return list(text.encode("utf-8", "replace"))

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(self._tokenizer.all_special_tokens)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether pieces are spelled in one character per byte."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in str(getattr(backend, "decoder", ""))


def _spelling() -> dict[str, int]:
    """Return which character stands for which byte in byte-level tokenizers: printable ones for themselves."""
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _spelling()
