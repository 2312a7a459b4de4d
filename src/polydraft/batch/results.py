"""Results in the order of their rows, in a file that can be resumed wherever it was cut off."""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polydraft.errors import FailureError, UsageError
from polydraft.output import check_same, read_settings, write_text

_FREE = {"slots", "slot_tokens", "chunk_tokens"}
"""Settings that a resumed run may change: they change speed, and results only for texts that do not fit."""


@dataclass(kw_only=True)
class Totals:
    """Totals of all rows so far, including those of earlier runs."""

    rows: int = 0
    bad: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    resting_passes: int = 0
    """Passes in which drafting rested."""
    rested_because: str | None = None
    seconds: float = 0.0
    """Of this run."""
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
        """Return all of it for JSON."""
        return {**asdict(self), "tokens_per_second": round(self.tokens_per_second, 2)}


class Results:
    """Results that are dropped, in tensor-parallel followers: the leader writes them."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.last = 0
        """Number of the last row that has a result."""

    def write(self, results: list[dict[str, Any]]) -> None:
        """Add results, in the order of the rows."""

    def close(self, *, quietly: bool = False) -> None:
        """Finish; `quietly` after something else has failed."""


class ResultFile(Results):
    """Results as JSON lines.

    Parameters
    ----------
    path : Path
    settings : mapping
        What results depend on. They are kept next to the file; a resumed run must have the same.
    resume : bool
        Continue after the last complete line.
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
            raise UsageError(f"cannot write to {path} ({error.strerror}); choose another --out") from None
        try:
            self._lock()
            if exists:
                os.truncate(path, self._read())
            self._write_settings()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Refuse a file that another process writes to; the lock ends with its process."""
        with suppress(ImportError):  # not on every system
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is writing to {self.path}; wait for it, or choose another --out") from None

    def _read(self) -> int:
        """Count the results that are there; return how many bytes they take, without an incomplete last line."""
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
        """Add results."""
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
        """Write the totals and close the file; `quietly` after something else has failed."""
        with suppress(FailureError) if quietly else nullcontext():
            self._write_settings(totals=self.totals.figures())
        self._file.close()
