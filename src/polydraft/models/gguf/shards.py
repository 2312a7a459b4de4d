"""Safetensors files laid out so that a model can run directly from the memory-mapped file.

Matrices that are used side by side (queries, keys and values; gate and up) are adjacent in the file. All tensors of a file are
views of one mapping: nothing is read before it is used, and nothing is held twice.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"}
"""Names of number formats in safetensors files."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 64
"""Alignment of the first tensor: a cache line."""
_LAYER = re.compile(r"(.*?\.\d+)\.")
SHARD_BYTES = 256 * 2**20
"""Size above which a new file is started."""


@dataclass(frozen=True)
class Slot:
    """A tensor to be stored."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Shard:
    """A file to be written."""

    file: str
    slots: tuple[Slot, ...]

    @cached_property
    def head(self) -> bytes:
        """The file's content before the tensors."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for slot in self.slots:
            end = at + slot.num_bytes
            entries[slot.name] = {"dtype": _NAMES[slot.dtype], "shape": slot.shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each tensor in the file."""
        found, at = {}, len(self.head)
        for slot in self.slots:
            found[slot.name] = at
            at += slot.num_bytes
        return found

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(slot.num_bytes for slot in self.slots)


def planned(slots: Iterable[Slot], most: int) -> list[Shard]:
    """Distribute tensors over files in order: layers are never divided, large tables get a file of their own."""
    groups: dict[str, list[Slot]] = {}
    for slot in slots:
        found = _LAYER.match(slot.name)
        groups.setdefault(found[1] if found else slot.name.rpartition(".")[0], []).append(slot)
    parts: list[list[Slot]] = []
    for group in groups.values():
        size = sum(slot.num_bytes for slot in (parts[-1] if parts else ()))
        if not parts or size + sum(slot.num_bytes for slot in group) > most:
            parts.append([])
        parts[-1] += sorted(group, key=_rank)
    # Bytes come last: their number may be odd, so that tensors after them could not be mapped.
    files = [tuple(sorted(part, key=lambda slot: slot.dtype == torch.uint8)) for part in parts]
    return [Shard(f"model-{number:05}-of-{len(files):05}.safetensors", slots) for number, slots in enumerate(files, 1)]


def _rank(slot: Slot) -> int:
    """Return a sort key that makes tensors of the same kind adjacent within a layer."""
    if len(slot.shape) > 1:
        return 0
    return 2 if slot.name.endswith(".bias") else 3 if slot.name.endswith(".weight") else 1


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index that tells other programs which file each tensor is in."""
    where = {slot.name: shard.file for shard in shards for slot in shard.slots}
    size = sum(slot.num_bytes for shard in shards for slot in shard.slots)
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def mapped(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file as views of one private mapping: writing to them does not change the file."""
    whole = torch.from_file(str(file), shared=False, size=os.path.getsize(file), dtype=torch.uint8)
    length = int.from_bytes(bytes(whole[:8].tolist()), "little")
    entries = json.loads(bytes(whole[8 : 8 + length].numpy()))
    for name, entry in entries.items():
        if name != "__metadata__":
            start, end = (8 + length + at for at in entry["data_offsets"])
            yield name, whole[start:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
