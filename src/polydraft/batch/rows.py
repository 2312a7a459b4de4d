"""A file of prompts of any size, read row by row, and the options of a batch."""

import gzip
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, cast

from polydraft.errors import UsageError, check_ranges
from polydraft.prompts import in_array, names_json, record_in

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batch."""

    slots: int = 8
    """Texts to generate at the same time."""
    slot_tokens: int = 2048
    """Most tokens per text, including its prompt; all slots reserve memory for this many."""
    chunk_tokens: int = 1024
    """Prompt tokens to read between two rounds of the texts that are already being written."""
    max_row_bytes: int = 2**20
    """Largest row, in bytes; larger ones are reported and skipped."""

    def __post_init__(self) -> None:
        texts = (("slots", 1, 4096), ("slot_tokens", 16, 2**20), ("chunk_tokens", 8, 2**20))
        check_ranges(self, (*texts, ("max_row_bytes", 16, 2**30)))


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Workers."""

    ray: bool = False
    """Share the rows among Ray Data workers, on the cluster that this machine belongs to or on this machine alone."""
    workers: int = 1
    """With --ray: number of processes, each with its own copy of the model."""
    worker_cpus: float = 1.0
    """With --ray: CPUs, and so threads, per worker."""
    worker_gpus: float = 0.0
    """With --ray: GPUs per worker."""

    def __post_init__(self) -> None:
        check_ranges(self, (("workers", 1, 10**4), ("worker_cpus", 0.01, 10**4), ("worker_gpus", 0, 10**3)))
        if not self.ray and any(getattr(self, one.name) != one.default for one in fields(self)):
            raise UsageError("--workers, --worker-cpus and --worker-gpus work only with --ray; add it, or leave them out")


@dataclass(frozen=True)
class Row:
    """A line of the file: its number, counted from 1, and its record, or why it cannot be used."""

    number: int
    record: Mapping[str, Any]
    error: str | None = None


class PromptFile:
    """A file of prompts, read a line at a time: JSON lines in any format of `polydraft.prompts`, or plain text.

    A record with `messages` is a conversation. Empty lines are counted, but are not rows.

    Parameters
    ----------
    path : Path
        Possibly gzipped.
    max_row_bytes : int
        Longer lines are bad rows, and are never in memory as a whole.
    """

    def __init__(self, path: Path, max_row_bytes: int) -> None:
        self.path, self._most = path, max_row_bytes
        digest, self.lines, first = hashlib.sha256(), 0, b""
        with self._opened() as file:
            while part := self._read(file, 2**20):
                digest.update(part)
                self.lines += part.count(b"\n")
                first = first if first.strip() else part[:4096].lstrip()
                last = part
            self.lines += bool(first) and not last.endswith(b"\n")
        self.digest = digest.hexdigest()[:32]
        if not first:
            raise UsageError(f"{path} holds no prompts; give one per line, as text or as JSON")
        opening = first.decode("utf-8-sig", "replace").lstrip()
        if in_array(opening):
            raise UsageError(f"{path} holds a JSON array, but batch reads one row per line; convert it with: jq -c '.[]'")
        self._json = opening.startswith("{") or names_json(path.name)

    def _opened(self) -> IO[bytes]:
        try:
            with self.path.open("rb") as file:
                packed = file.read(2) == _GZIP
            return cast(IO[bytes], gzip.open(self.path)) if packed else self.path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read {self.path} ({error.strerror}); give a file of prompts, one per line") from None

    def _read(self, file: IO[bytes], size: int) -> bytes:
        try:
            return file.read(size)
        except (OSError, EOFError) as error:
            raise UsageError(f"cannot read {self.path} ({error}); give a whole file of prompts, one per line") from None

    def rows(self, after: int = 0) -> Iterator[Row]:
        """Yield the rows after a line."""
        with self._opened() as file:
            for number in itertools.count(1):
                line = file.readline(self._most + 2)
                if not line:
                    return
                too_long = len(line) > self._most + line.endswith(b"\n")
                while too_long and not line.endswith(b"\n") and line:
                    line = file.readline(2**20)
                if number > after and (too_long or line.strip()):
                    yield self._row(number, None if too_long else line)

    def _row(self, number: int, line: bytes | None) -> Row:
        if line is None:
            return Row(number, {}, f"more than {self._most} bytes; shorten it, or raise --max-row-bytes")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            record = record_in(text, self._json, f"line {number}", str(self.path))
        except UnicodeDecodeError:
            return Row(number, {}, "not UTF-8; convert it with iconv")
        except UsageError as error:
            return Row(number, {}, str(error))
        return Row(number, record) if isinstance(record, dict) else Row(number, {}, "not a JSON object")
