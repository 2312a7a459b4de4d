"""What a GGUF file says of itself before its weights: read in a moment, so that files that cannot be used are refused at once.

The reader of the package `gguf` makes an array of every token and merge, which takes a minute for a large vocabulary.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft.errors import FailureError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of the kinds of values that have a fixed size, by the number that a file has for them."""
_STRING, _ARRAY = 8, 9
_DEEPEST = 4
"""Arrays of arrays that anybody has written."""
_MOST_DIMENSIONS = 8
_ALIGNMENT = 32
"""Of weights, where a file does not say."""


@dataclass(frozen=True)
class GgufHeader:
    """What stands before the weights."""

    fields: dict[str, Any]
    """Numbers, texts, and lists of these."""
    num_weights: int
    num_bytes: int
    """Of a file that has all of its weights."""

    @property
    def vocabulary(self) -> dict[str, int]:
        """Tokens and their ids; empty where the file has no tokenizer."""
        tokens = self.fields.get("tokenizer.ggml.tokens")
        return {token: number for number, token in enumerate(tokens)} if isinstance(tokens, list) else {}


def read_header(source: Path) -> GgufHeader:
    """Read the header of a GGUF file whose weights are all there.

    Raises
    ------
    FailureError
        If it is no such file, ends too early, or is of a kind that is not known.
    """
    size = source.stat().st_size
    with source.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise FailureError(f"{source} is no GGUF file; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Reader(data, len(_MAGIC)).header()
            except EOFError:
                raise FailureError(f"{source} is cut short, its header is not whole; download it again") from None
            except (ValueError, KeyError, OverflowError, MemoryError, RecursionError) as error:
                reason = str(error) or type(error).__name__
                raise FailureError(f"{source} is damaged or of a newer kind ({reason}); download it again") from None
    if size < header.num_bytes:
        raise FailureError(f"{source} is cut short, {size} of {header.num_bytes} bytes are there; download it again")
    return header


class _Reader:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap, start: int) -> None:
        self._data, self._at, self._size, self._order = data, start, len(data), "<"

    def header(self) -> GgufHeader:
        """Read all there is before the weights."""
        version = self._number("I")
        if version & 0xFFFF == 0:  # of a machine with the other order of bytes
            self._order, self._at = ">", self._at - 4
            version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            fields[name] = self._value(self._number("I"), 0)
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        end = max((start + offset + num_bytes for _, offset, num_bytes in tensors), default=start)
        return GgufHeader(fields, sum(count for count, _, _ in tensors), end)

    def _tensor(self) -> tuple[int, int, int]:
        """Return how many weights a tensor has, where they begin behind the header, and how many bytes they take."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text()
        dimensions = self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        count = math.prod(self._number("Q") for _ in range(dimensions))
        in_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("I"))]
        return count, self._number("Q"), count // in_block * block_bytes

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth == _DEEPEST:
            raise ValueError(f"a value is of kind {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            return list(self._numbers(_NUMBERS[inner], count))
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _text(self) -> str:
        length = self._number("Q")
        if length > self._size - self._at:
            raise EOFError
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(kind) * count
        if size > self._size - self._at:
            raise EOFError
        self._at += size
        return struct.unpack_from(f"{self._order}{count}{kind}", self._data, self._at - size)
