"""A fast reader of GGUF headers, which precede the weights, so that files that cannot be used are refused at once.

The reader of the package `gguf` makes an array for every token and merge, which takes a minute for a large vocabulary.
"""

import importlib.util
import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from polydraft.errors import FailureError, UsageError, first_line

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of values of fixed size, by the number of their type in a file."""
_STRING, _ARRAY = 8, 9
_DEEPEST = 4
"""How deep arrays may be nested."""
_MOST_DIMENSIONS = 8
_ALIGNMENT = 32
"""Default alignment of weights."""
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
"""Names of the embedding table and of the output head, if that has its own weight."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is, and in which format."""

    name: str
    shape: tuple[int, ...]
    """In numbers, not bytes; rows first, as in torch."""
    type: str
    """Name of its format, such as Q4_K."""
    start: int
    """Offset of its bytes in the file."""
    num_bytes: int

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The content of a file before its weights."""

    fields: dict[str, Any]
    """Numbers, strings, and lists of these."""
    tensors: dict[str, GgufTensor]
    num_bytes: int
    """Size of the complete file."""

    @property
    def architecture(self) -> str:
        """Name of the model's architecture."""
        return str(self.fields.get("general.architecture"))

    @property
    def num_weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(tensor.num_weights for tensor in self.tensors.values())

    @property
    def tokens(self) -> list[str]:
        """Tokens by id; empty if the file has no tokenizer."""
        tokens = self.fields.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, list) else []


def read_header(source: Path) -> GgufHeader:
    """Read the header of a complete GGUF file.

    Raises
    ------
    FailureError
        If it is not a GGUF file, is cut short, or is of an unknown version.
    UsageError
        If its weights are in a format that cannot be read.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"reading {source.name} needs the package gguf; get it with: pip install 'polydraft[gguf]'")
    size = source.stat().st_size
    with source.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise FailureError(f"{source} is not a GGUF file; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _Reader(data, len(_MAGIC)).header(source)
            except UsageError:
                raise
            except EOFError:
                raise FailureError(f"{source} is cut short, its header is incomplete; download it again") from None
            except (ValueError, KeyError, OverflowError, MemoryError, RecursionError) as error:
                raise FailureError(f"{source} is damaged or of a newer kind ({first_line(error)}); download it again") from None
    if size < header.num_bytes:
        missing = header.num_bytes - size
        raise FailureError(
            f"{source} is cut short, {size} of {header.num_bytes} bytes are there, {missing} are missing; download it again"
        )
    _check_tables(source, header)
    return header


def vocabulary_of(source: Path) -> dict[str, int]:
    """Return the tokens in a GGUF file's header; the converted tokenizer may spell a few of them differently."""
    return {token: number for number, token in enumerate(read_header(source).tokens)}


def _check_tables(source: Path, header: GgufHeader) -> None:
    """Refuse an embedding table or output head whose rows do not match the number of tokens."""
    for name in (EMBEDDING, OUTPUT):
        table = header.tensors.get(name)
        if header.tokens and table is not None and table.shape[0] != len(header.tokens):
            raise FailureError(
                f"{source.name} has {len(header.tokens)} tokens, but {table.shape[0]} rows in {name}: they do not belong "
                "together; download or convert it again"
            )


class _Reader:
    """Reads values sequentially from a mapped file."""

    def __init__(self, data: mmap.mmap, start: int) -> None:
        self._data, self._at, self._size = data, start, len(data)

    def header(self, source: Path) -> GgufHeader:
        """Read everything before the weights."""
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ValueError("it has the byte order of another kind of machine")
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
        placed: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in tensors:
            try:
                title, in_block, block_bytes = _format(kind)
            except NotImplementedError as error:
                raise UsageError(
                    f"tensor {name} of {source.name} is in a format that cannot be read ({error}); use a file in another one, "
                    "such as Q4_K_M or Q8_0"
                ) from None
            if shape and shape[-1] % in_block:
                raise ValueError(f"rows of tensor {name} are not whole blocks")
            num_bytes = math.prod(shape) // in_block * block_bytes
            placed[name] = GgufTensor(name, shape, title, start + offset, num_bytes)
        end = max((tensor.start + tensor.num_bytes for tensor in placed.values()), default=start)
        return GgufHeader(fields, placed, end)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape, number of its format, and offset after the header."""
        name = self._text()
        dimensions = self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed(self._numbers("Q", dimensions)))
        return name, shape, self._number("I"), self._number("Q")

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
        if inner == _STRING:
            return self._texts(count)
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """Read many strings, such as a vocabulary or its merges."""
        data, at, size = self._data, self._at, self._size
        length_of = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                raise EOFError
            start = at + 8
            at = start + length_of(data, at)[0]
            if at > size:
                raise EOFError
            texts.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return texts

    def _text(self) -> str:
        return self._texts(1)[0]

    def _number(self, kind: str) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(kind) * count
        if size > self._size - self._at:
            raise EOFError
        self._at += size
        return struct.unpack_from(f"<{count}{kind}", self._data, self._at - size)


@lru_cache
def _format(kind: int) -> tuple[str, int, int]:
    """Return the name of a format, its numbers per block and its bytes per block.

    Raises
    ------
    NotImplementedError
        If it cannot be read, with its name as the message.
    """
    import gguf
    import numpy as np

    try:
        found = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise NotImplementedError(f"number {kind}") from None
    in_block, block_bytes = gguf.GGML_QUANT_SIZES[found]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), found)
    except NotImplementedError:
        raise NotImplementedError(found.name) from None
    return found.name, in_block, block_bytes
