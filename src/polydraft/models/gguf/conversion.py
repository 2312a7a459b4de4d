"""Converting the weights of a GGUF file: each is dequantised, rounded to the number format in use, and written."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polydraft.models.gguf.architecture import Architecture, Weight
from polydraft.models.gguf.header import EMBEDDING, OUTPUT, GgufTensor
from polydraft.models.gguf.shards import Shard, Slot, planned
from polydraft.models.quantised import PADDING, rounded
from polydraft.output import written_whole

_TABLE_WEIGHTS = 2**22
"""Weights of an embedding table or output head to convert at a time."""
_PLAIN = ("F32", "F16", "BF16")
"""Formats of plain numbers, which are not quantised."""
BLOCKS, SCALES = ".blocks.", ".scales"
"""Parts of tensor names: before the format of a table that keeps the file's own blocks, and the suffix of int8 scales."""


class Conversion:
    """Converts a file's weights to a number format.

    With int8, linear layers are rounded as in `polydraft.models.quantised`, the embedding table keeps the file's own blocks,
    and everything else is in float32.

    Parameters
    ----------
    dtype : torch.dtype
        Number format: float32, float16, bfloat16 or int8.
    shard_bytes : int
        Size above which a new file is started.
    """

    def __init__(self, source: Path, architecture: Architecture, dtype: torch.dtype, shard_bytes: int) -> None:
        self._source, self._architecture = source, architecture
        self._int8 = dtype == torch.int8
        self._dtype = torch.float32 if self._int8 else dtype
        self._made: dict[str, Weight] = {}
        """The weight that each tensor is made of. Scales are not listed: they are written with their weight."""
        self.shards = planned(self._slots(), shard_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(shard.num_bytes for shard in self.shards)

    def _slots(self) -> Iterator[Slot]:
        architecture = self._architecture
        for weight in architecture.weights:
            if self._int8 and weight.is_linear:
                yield from self._int8_slots(weight, weight.name)
            elif self._int8 and self._keeps_blocks(weight):
                (table,) = weight.sources
                name = f"{architecture.embedding}{BLOCKS}{table.type}"
                self._made[name] = weight
                yield Slot(name, torch.uint8, (table.shape[0], table.num_bytes // table.shape[0]))
            else:
                self._made[weight.name] = weight
                yield Slot(weight.name, self._dtype, weight.shape)
            if self._int8 and architecture.tied and weight.name == f"{architecture.embedding}.weight":
                yield from self._int8_slots(weight, f"{architecture.head}.weight")

    def _int8_slots(self, weight: Weight, name: str) -> Iterator[Slot]:
        rows, columns = weight.shape
        self._made[name] = weight
        yield Slot(name, torch.int8, (rows, columns + -columns % PADDING))
        yield Slot(_scales(name), torch.float32, (rows,))

    def _keeps_blocks(self, weight: Weight) -> bool:
        """Whether a weight is a quantised embedding table, which is only used to look up rows."""
        name = self._architecture.embedding
        table = self._architecture.model.get_submodule(name)
        is_table = weight.name == f"{name}.weight" and type(table) is nn.Embedding
        return is_table and len(weight.sources) == 1 and weight.sources[0].type not in _PLAIN

    def write(self, shard: Shard, folder: Path, advance: Callable[[int], None]) -> None:
        """Write a file, completely or not at all.

        Parameters
        ----------
        advance : callable
            Called with the number of bytes just written.
        """
        workers = max(min(os.cpu_count() or 1, torch.get_num_threads()), 1)
        with written_whole(folder / shard.file) as unfinished, unfinished.open("wb", buffering=0) as file:
            file.write(shard.head)
            file.truncate(shard.num_bytes)
            with self._source.open("rb") as source, ThreadPoolExecutor(workers) as pool:
                tasks = [
                    pool.submit(part, source.fileno(), file.fileno())
                    for slot in shard.slots
                    for part in self._parts(slot, shard)
                ]
                try:
                    for task in as_completed(tasks):
                        advance(task.result())
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    def _parts(self, slot: Slot, shard: Shard) -> Iterator[Callable[[int, int], int]]:
        """Yield functions that convert a tensor, or some of its rows, from one open file into another."""
        weight = self._made.get(slot.name)
        if weight is None:  # scales are written with their weight
            return
        if slot.dtype == torch.uint8 or weight.sources[0].name not in (EMBEDDING, OUTPUT):
            yield partial(self._convert, weight, slot, shard)
            return
        rows, columns = weight.shape
        step = max(_TABLE_WEIGHTS // columns, 1)
        for start in range(0, rows, step):
            yield partial(_convert_rows, weight, slot, shard, range(start, min(start + step, rows)))

    def _convert(self, weight: Weight, slot: Slot, shard: Shard, source: int, file: int) -> int:
        """Write a whole tensor; return how many bytes were written."""
        if slot.dtype == torch.uint8:  # the file's own blocks
            return _put(file, shard.offsets[slot.name], torch.from_numpy(_blocks(source, weight.sources[0])))
        values = [dequantised(_blocks(source, tensor), tensor) for tensor in weight.sources]
        return _store(self._architecture.restored(weight, values), slot, shard, 0, file)


def _convert_rows(weight: Weight, slot: Slot, shard: Shard, rows: range, source: int, file: int) -> int:
    """Write some rows of an embedding table or output head; return how many bytes were written."""
    (table,) = weight.sources
    values = dequantised(_blocks(source, table, rows.start, rows.stop), table)
    return _store(torch.from_numpy(values), slot, shard, rows.start, file)


def _store(values: Tensor, slot: Slot, shard: Shard, first_row: int, file: int) -> int:
    """Write rows of a tensor in its format, starting at `first_row`; return how many bytes were written."""
    at = shard.offsets[slot.name] + first_row * (slot.num_bytes // slot.shape[0])
    if slot.dtype != torch.int8:
        return _put(file, at, values.to(slot.dtype))
    data_FX, scales_F = rounded(values)
    return _put(file, at, data_FX) + _put(file, shard.offsets[_scales(slot.name)] + first_row * 4, scales_F)


def dequantised(blocks: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
    """Dequantise some rows of a tensor."""
    import gguf

    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[tensor.type])
    return np.ascontiguousarray(values.reshape(*blocks.shape[:1], *tensor.shape[1:]), dtype=np.float32)


def _blocks(source: int, tensor: GgufTensor, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
    """Read some rows of a tensor from an open file, as bytes."""
    rows = tensor.shape[0]
    row_bytes = tensor.num_bytes // rows
    end = rows if end is None else end
    wanted = (end - start) * row_bytes
    content = bytearray()
    while len(content) < wanted:  # systems read at most 2 GB at a time
        part = os.pread(source, wanted - len(content), tensor.start + start * row_bytes + len(content))
        if not part:
            raise OSError(f"{tensor.name} ends too early")
        content += part
    return np.frombuffer(content, np.uint8).reshape(end - start, row_bytes)


def _put(file: int, at: int, tensor: Tensor) -> int:
    """Write a tensor at an offset of an open file; return its size in bytes."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], at + done)
    return done


def _scales(name: str) -> str:
    return name.removesuffix(".weight") + SCALES
