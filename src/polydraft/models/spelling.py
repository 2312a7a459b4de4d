"""The bytes that a tokenizer's tokens spell, so that tokens of different tokenizers can be compared."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from polydraft.errors import UsageError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEP = re.compile(r'"type":\s*"(\w+)"')


@dataclass(frozen=True)
class Spelling:
    """The bytes of each token of a vocabulary.

    Byte-level vocabularies write tokens in an alphabet with a letter per byte (a space is Ġ). SentencePiece writes them as text
    with ▁ for spaces, and single bytes as <0x0A>.
    """

    bytes_of: dict[int, bytes]
    """Bytes of all tokens; special ones spell their names."""
    special: dict[str, int]
    """Tokens that are not text, such as end-of-text tokens, by name."""
    stand_ins: frozenset[int]
    """Tokens for single bytes, which SentencePiece uses only for characters without a token."""

    def tokens(self) -> dict[bytes, int]:
        """Return the token that tokenizers use for each byte string, without special tokens."""
        found: dict[bytes, int] = {}
        special = set(self.special.values())
        for token, spelled in self.bytes_of.items():
            if spelled and token not in special and (spelled not in found or found[spelled] in self.stand_ins):
                found[spelled] = token
        return found


def spelling_of(tokenizer: Any, name: str) -> Spelling:
    """Return what the tokens of a model's tokenizer spell; refuse tokenizers of unknown kinds."""
    byte_level = is_byte_level(tokenizer)
    if not byte_level and not {"ByteFallback", "Metaspace"} & _decoders(tokenizer):
        raise UsageError(
            f"the tokenizer of {name!r} is neither byte-level nor SentencePiece's, so its tokens cannot be compared; "
            "use a draft with the target's tokenizer"
        )
    added = tokenizer.added_tokens_decoder
    bytes_of = {
        number: added[number].content.encode() if number in added else spelled(token, byte_level)
        for token, number in tokenizer.get_vocab().items()
    }
    stand_ins = {number for token, number in tokenizer.get_vocab().items() if not byte_level and is_single_byte(token)}
    special = {entry.content: number for number, entry in added.items() if entry.special}
    return Spelling(bytes_of, special, frozenset(stand_ins))


def is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are written with one character per byte."""
    return "ByteLevel" in _decoders(tokenizer)


def falls_back(tokenizer: Any) -> bool:
    """Whether there are tokens for single bytes, written <0x0A>."""
    return "ByteFallback" in _decoders(tokenizer)


def _decoders(tokenizer: Any) -> set[str]:
    """Return the types of the tokenizer's decoders."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return set() if decoder is None else set(_STEP.findall(decoder.__getstate__().decode()))


def is_single_byte(token: str) -> bool:
    """Whether a token is written as a byte, such as <0x0A>."""
    return _BYTE.fullmatch(token) is not None


def spelled(token: str, byte_level: bool) -> bytes:
    """Return the bytes of a token that is not special."""
    if byte_level:
        numbers = [_numbers().get(letter) for letter in token]
        return token.encode() if None in numbers else bytes(number for number in numbers if number is not None)
    byte = _BYTE.fullmatch(token)
    return token.replace("▁", " ").encode() if byte is None else bytes([int(byte[1], 16)])


@cache
def _numbers() -> dict[str, int]:
    return {letter: number for number, letter in enumerate(byte_letters())}


@cache
def byte_letters() -> tuple[str, ...]:
    """Return the character that stands for each byte in a byte-level vocabulary."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in printed else chr(next(others)) for byte in range(256))


def shared_tokens(ours: Spelling, theirs: Spelling, our_ends: Collection[int], their_ends: Collection[int]) -> dict[int, int]:
    """Map our tokens to theirs: those that spell the same, and special ones with the same name.

    If none of our end-of-text tokens is mapped, our first one is mapped to their first one.
    """
    known = theirs.tokens()
    found = {token: known[spelled] for spelled, token in ours.tokens().items() if spelled in known}
    found |= {token: theirs.special[name] for name, token in ours.special.items() if name in theirs.special}
    if our_ends and their_ends and found.keys().isdisjoint(our_ends):
        end = next(iter(their_ends))
        found = {token: other for token, other in found.items() if other != end} | {next(iter(our_ends)): end}
    return dict(sorted(found.items()))
