"""How far long work has come, on standard error."""

import time
from typing import Any

import click

_SILENCE_SECONDS = 5.0
"""Between two lines where there is no terminal."""


class PhaseProgress:
    """A bar for each phase on a terminal; a line now and then elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description:>20}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=console, disable=self._plain,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}
        self._said = time.monotonic()

    def __enter__(self) -> "PhaseProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps of a phase are done, and what there is to say of it."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total, note=note)
        self._bar.update(self._tasks[phase], completed=done, note=note)
        # An end that has something to say is always told.
        if self._plain and (time.monotonic() - self._said > _SILENCE_SECONDS or (note and done == total)):
            self._said = time.monotonic()
            click.echo(f"{phase} {done}/{total}  {note}".rstrip(), err=True)
