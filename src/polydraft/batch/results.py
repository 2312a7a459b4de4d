"""Results in the order of their rows, in a file that may be cut off anywhere and gone on with."""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from polydraft.errors import FailureError, UsageError
from polydraft.output import check_same, read_settings, write_text

_FREE = {"slots", "slot_tokens", "chunk_tokens"}
"""What may be another when a run goes on: it changes speed, not results, but for texts that do not fit."""


@dataclass(kw_only=True)
class Totals:
    """What has come of all rows so far, those of earlier runs included."""

    rows: int = 0
    bad: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    resting_passes: int = 0
    """Those of them in which drafting rested."""
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


class Results(Protocol):
    """Where results go, in the order of the rows."""

    totals: Totals
    last: int
    """Number of the last row that there is a result of."""

    def write(self, results: list[dict[str, Any]]) -> None:
        """Add results."""

    def close(self, *, quietly: bool = False) -> None:
        """Write down what has come of it, and let it go; `quietly` after something else has gone wrong."""


class Nowhere:
    """Results of a process that computes slices of a model for another one, which writes."""

    def __init__(self) -> None:
        self.totals, self.last = Totals(), 0

    def write(self, results: list[dict[str, Any]]) -> None:
        """Drop results."""

    def close(self, *, quietly: bool = False) -> None:
        """Do nothing."""


class ResultFile:
    """Results as JSON lines, in the order of the rows; it may be cut off anywhere, and gone on with.

    Parameters
    ----------
    path : Path
    settings : mapping
        What results depend on; kept beside the file, so that a run goes on with the same only.
    resume : bool
        Go on behind the last whole line.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self._beside = path, path.with_name(f"{path.name}.run.json")
        self._settings = json.loads(json.dumps(settings))
        self.totals, self.last = Totals(), 0
        """What the file holds, and the number of its last row."""
        there = path.is_file() and path.stat().st_size > 0
        if there and not resume:
            raise UsageError(f"{path} already exists; pass --resume to continue it, or choose another --out")
        if there:
            if not self._beside.exists():
                raise UsageError(f"{self._beside}, the settings that {path} was started with, is missing; choose another --out")
            check_same(read_settings(self._beside).get("settings", {}), self._settings, path, _FREE)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot write to {path} ({error.strerror}); choose another --out") from None
        try:
            self._lock()
            if there:
                os.truncate(path, self._whole())
            self._note()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Refuse to write where another process writes; the lock goes with its process."""
        with suppress(ImportError):  # not on every system
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is writing to {self.path}; wait for it, or choose another --out") from None

    def _whole(self) -> int:
        """Read what is there, and return how many bytes of it are whole results; a last line may be torn."""
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

    def _note(self, totals: Totals | None = None) -> None:
        content: dict[str, Any] = {"settings": self._settings}
        if totals is not None:
            content["totals"] = {**asdict(totals), "tokens_per_second": round(totals.tokens_per_second, 2)}
        write_text(self._beside, json.dumps(content, indent=1) + "\n", remedy="make room there, or choose another --out")

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
        """Write down what has come of it, and let the file go; `quietly` after something else has gone wrong."""
        with suppress(FailureError) if quietly else nullcontext():
            self._note(self.totals)
        self._file.close()
