"""Options and files of a batch: prompts, read row by row, and results, which a later run can continue."""

import gzip
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, cast

from polydraft.errors import FailureError, UsageError, check_ranges
from polydraft.output import cannot_write, check_same, read_settings, write_text
from polydraft.prompt_records import GZIP_MAGIC, in_array, names_json, record_in

_FREE = {"slots", "slot_tokens", "chunk_tokens"}
"""Settings that a resumed run may change: they affect speed, and the results only of texts that do not fit."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batch."""

    slots: int = 8
    """Texts to generate at the same time."""
    slot_tokens: int = 2048
    """Most tokens per text, including its prompt; on a GPU, every slot reserves memory for this many."""
    chunk_tokens: int = 1024
    """Most prompt tokens to read between two rounds of the texts that are already being written."""
    max_row_bytes: int = 2**20
    """Largest row, in bytes; larger ones are reported and skipped."""

    def __post_init__(self) -> None:
        texts = (("slots", 1, 4096), ("slot_tokens", 16, 2**20), ("chunk_tokens", 8, 2**20))
        check_ranges(self, (*texts, ("max_row_bytes", 16, 2**30)))


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Workers."""

    ray: bool = False
    """Share the rows among Ray Data workers, on this machine's Ray cluster or on this machine alone."""
    workers: int = 1
    """With --ray: number of processes, each with its own copy of the model."""
    worker_cpus: float = 1.0
    """With --ray: CPUs per worker, which computes with as many threads."""
    worker_gpus: float = 0.0
    """With --ray: GPUs per worker."""

    def __post_init__(self) -> None:
        check_ranges(self, (("workers", 1, 10**4), ("worker_cpus", 0.01, 10**4), ("worker_gpus", 0, 10**3)))
        if not self.ray and any(getattr(self, one.name) != one.default for one in fields(self)):
            raise UsageError("--workers, --worker-cpus and --worker-gpus work only with --ray; add it, or leave them out")


@dataclass(frozen=True)
class Row:
    """A line of the file: its number, counted from 1, and its record, or what is wrong with it."""

    number: int
    record: Mapping[str, Any]
    error: str | None = None


class PromptFile:
    """A file of prompts, possibly gzipped, read line by line: JSON lines in any format of `polydraft.prompts`, or plain text.

    A record with `messages` is a conversation. Empty lines count as lines, but are not rows. Lines longer than `max_row_bytes`
    are bad rows, and are never loaded whole.
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
                packed = file.read(2) == GZIP_MAGIC
            return cast(IO[bytes], gzip.open(self.path)) if packed else self.path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read {self.path} ({error.strerror}); give a file of prompts, one per line") from None

    def _read(self, file: IO[bytes], size: int) -> bytes:
        try:
            return file.read(size)
        except (OSError, EOFError) as error:
            raise UsageError(f"cannot read {self.path} ({error}); give a complete file of prompts, one per line") from None

    def rows(self, after: int = 0) -> Iterator[Row]:
        """Yield the rows after line `after`."""
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


@dataclass(kw_only=True)
class Totals:
    """Totals of all rows so far, including those of earlier runs."""

    rows: int = 0
    bad: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    resting_passes: int = 0
    """Passes without drafting, because it did not pay."""
    rested_because: str | None = None
    seconds: float = 0.0
    """Duration of this run."""
    earlier_tokens: int = 0
    """New tokens of earlier runs."""

    def count(self, result: Mapping[str, Any]) -> None:
        """Add a result."""
        self.rows += 1
        self.bad += "error" in result
        for name in ("prompt_tokens", "new_tokens", "passes", "resting_passes"):
            setattr(self, name, getattr(self, name) + result.get(name, 0))
        self.rested_because = result.get("rested_because", self.rested_because)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of this run, per second."""
        return (self.new_tokens - self.earlier_tokens) / self.seconds if self.seconds > 0 else 0.0

    def figures(self) -> dict[str, Any]:
        """Return all totals for JSON."""
        return {**asdict(self), "tokens_per_second": round(self.tokens_per_second, 2)}


class Results:
    """Results that are not written: tensor-parallel followers leave that to the leader."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.last = 0
        """Number of the last row that has a result."""

    def write(self, results: list[dict[str, Any]]) -> None:
        """Take the next results, in the order of the rows."""

    def close(self, *, quietly: bool = False) -> None:
        """Finish; `quietly` if another error is being raised already."""


class ResultFile(Results):
    """Results as JSON lines, with the settings that they depend on in a file beside them.

    A resumed run continues after the last complete line, and must have the same settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        super().__init__()
        self.path, self._settings_path = path, path.with_name(f"{path.name}.run.json")
        self._settings = json.loads(json.dumps(settings))
        exists = path.is_file() and path.stat().st_size > 0
        if exists and not resume:
            raise UsageError(f"{path} already exists; pass --resume to continue it, or choose another --out")
        if exists:
            if not self._settings_path.exists():
                raise UsageError(
                    f"{self._settings_path}, the settings that {path} was started with, is missing; choose another --out"
                )
            check_same(read_settings(self._settings_path).get("settings", {}), self._settings, path, _FREE)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(path, error) from None
        try:
            self._lock()
            if exists:
                os.truncate(path, self._read())
            self._write_settings()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Refuse a file that another process is writing to. The lock ends with the process."""
        with suppress(ImportError):  # fcntl is not on every system
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is writing to {self.path}; wait for it, or choose another --out") from None

    def _read(self) -> int:
        """Count the results in the file, and return its size in bytes without an incomplete last line."""
        length = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    result = json.loads(line)
                    row = result["row"]
                    if not line.endswith(b"\n") or row <= self.last:
                        raise ValueError
                except (ValueError, KeyError, TypeError):
                    if line.endswith(b"\n"):
                        raise FailureError(
                            f"line {number} of {self.path} is not a result; restore it, or choose another --out"
                        ) from None
                    break
                self.last = row
                self.totals.count(result)
                length += len(line)
        self.totals.earlier_tokens = self.totals.new_tokens
        return length

    def _write_settings(self, **more: Any) -> None:
        content = {"settings": self._settings, **more}
        write_text(self._settings_path, json.dumps(content, indent=1) + "\n", remedy="make room there, or choose another --out")

    def write(self, results: list[dict[str, Any]]) -> None:
        """Append results to the file."""
        for result in results:
            self.totals.count(result)
        rest = memoryview(b"".join(json.dumps(one, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for one in results))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise FailureError(
                f"cannot write to {self.path} ({error.strerror}); finished rows are safe: free some space, then add --resume"
            ) from None

    def close(self, *, quietly: bool = False) -> None:
        """Write the totals and close the file; `quietly` if another error is being raised already."""
        with suppress(FailureError) if quietly else nullcontext():
            self._write_settings(totals=self.totals.figures())
        self._file.close()
