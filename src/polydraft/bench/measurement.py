"""One measured generation, and the file they are kept in."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polydraft.atomic import written_whole
from polydraft.errors import FailureError
from polydraft.output import cannot_write, check_folder, check_same, read_settings


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one method did with one prompt, once."""

    method: str
    prompt: str
    """Id of the prompt."""
    category: str
    repeat: int
    seconds: float
    first_token_seconds: float | None
    token_ids: list[int]
    sources: list[str]
    passes: list[int] | None
    """Target pass of each token; None where unknown."""
    stats: dict[str, Any] | None
    """The engine's own figures, where it has some."""
    peak_bytes: int | None
    joules: float | None
    error: str | None = None
    log_likelihood: float | None = None
    """The target's log-probability of the text, where it was asked for."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells measurements apart."""
        return self.method, self.prompt, self.repeat


def read_measurements(path: Path) -> Iterator[Measurement]:
    """Read a `runs.jsonl`; a line cut off by a kill is left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield Measurement(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue


class Journal:
    """Measurements on disk, one JSON line each, appended as they are made: what a killed run leaves is whole lines.

    Parameters
    ----------
    folder : Path
    settings : dict
        What the run was asked for; a journal goes on only with the same.
    resume : bool
        Go on with what is there, instead of refusing to touch it.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], resume: bool) -> None:
        self._path = folder / "runs.jsonl"
        settings_path = folder / "settings.json"
        try:
            check_folder(folder, resume=resume)
            folder.mkdir(parents=True, exist_ok=True)
            if resume and settings_path.exists():
                # More methods or repeats may be added; anything else would mix what cannot be compared.
                check_same(read_settings(settings_path), settings, folder, free={"methods", "repeat"})
            with written_whole(settings_path) as partial:
                partial.write_text(json.dumps(settings, indent=1))
            self._path.touch()
            if (written := self._path.read_bytes()) and not written.endswith(b"\n"):
                self._append("\n")  # a kill tore the last line: leave it alone
        except OSError as error:
            raise cannot_write(folder, error) from None

    def __iter__(self) -> Iterator[Measurement]:
        """Read what is there."""
        return read_measurements(self._path)

    def add(self, measurement: Measurement) -> None:
        """Append one measurement."""
        try:
            self._append(json.dumps(asdict(measurement)) + "\n")
        except OSError as error:
            raise FailureError(f"cannot write to {self._path} ({error.strerror}); what was measured so far is kept") from None

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
