"""The terminal: read standard input, print tokens and figures, show progress."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from polydraft.errors import UsageError, duration

if TYPE_CHECKING:
    from polydraft.beam.stream import BeamStream
    from polydraft.engine import Stats, Stream, TokenEvent

DRAFTED_STYLE = "green"
LOADING = "polydraft.models.loading"
"""Name of the logger that reports which models are being loaded."""
_SILENCE_SECONDS = 5.0
"""Time between two lines of progress if standard error is not a terminal."""


def standard_input() -> TextIO:
    """Return standard input; refuse if it is closed."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; pass the text as an argument, or pipe it in")
    return sys.stdin


def read_all() -> str:
    """Return all of standard input."""
    try:
        return standard_input().read()
    except UnicodeDecodeError as error:
        raise not_text(error) from None


def read_line() -> str | None:
    """Return the next line, or None at the end."""
    source = standard_input()
    if not hasattr(source, "buffer"):
        return source.readline() or None
    # Decode line by line: the text stream decodes many at a time, so a bad line would spoil good ones before it.
    try:
        line: str = source.buffer.readline().decode(source.encoding)
    except UnicodeDecodeError as error:
        raise not_text(error) from None
    return line or None


def not_text(error: UnicodeDecodeError) -> UsageError:
    """Return the error for input that cannot be decoded."""
    where = f"at byte {error.start}"
    return UsageError(f"standard input is not valid {error.encoding} ({where}); give it in UTF-8")


class PhaseProgress:
    """Progress by phase: bars on a terminal; elsewhere a line when a phase begins, and then every few seconds."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description:>20}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=console, disable=self._plain,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}
        self._begun: dict[str, tuple[int, float]] = {}
        """By phase: how many steps were already done when it began, and the time then."""
        self._said = 0.0

    def __enter__(self) -> "PhaseProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of a phase's `total` steps are done, with a note."""
        now, begins = time.monotonic(), phase not in self._tasks
        if begins:
            self._tasks[phase] = self._bar.add_task(phase, total=total, note=note)
            self._begun[phase] = done, now
        self._bar.update(self._tasks[phase], completed=done, total=total, note=note)
        # Always show the end of a phase if it has a note.
        if self._plain and (begins or now - self._said > _SILENCE_SECONDS or (note and done == total)):
            self._said = now
            click.echo(f"{phase} {done}/{total}{self._left(phase, done, total, now)}  {note}".rstrip(), err=True)

    def _left(self, phase: str, done: int, total: int, now: float) -> str:
        """Return how much longer a phase will take, if that can be estimated."""
        first, since = self._begun[phase]
        if not first < done < total:
            return ""
        return f", about {duration((now - since) / (done - first) * (total - done))} left"


def announce_start() -> None:
    """Report that a command has started, because importing torch takes seconds, and log which models it loads.

    Print nothing if torch is already imported: then the command runs inside another program.
    """
    if "torch" not in sys.modules:
        click.echo("loading torch and transformers ...", err=True)
        logger = logging.getLogger(LOADING)
        logger.setLevel(logging.INFO)
        click.get_current_context().call_on_close(lambda: logger.setLevel(logging.WARNING))


def output_console() -> Console:
    """Return a console for standard output; in a pipe its width fits our tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def figures_table(label: str, headings: Sequence[str], title: str | None = None) -> Table:
    """Return an empty table: a column of names, then figures, right-aligned and never wrapped."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(label, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    return table


class TokenPrinter:
    """Prints a stream of tokens: on a terminal with drafted ones in colour, in a pipe as plain text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        if console.is_terminal:
            legend = Text("drafted tokens are ", style="dim").append("green", style=DRAFTED_STYLE)
            console.print(legend.append(", the target's own plain", style="dim"))

    def print(self, event: "TokenEvent") -> None:
        """Print the text that one token adds."""
        style = DRAFTED_STYLE if event.source != "target" else ""
        if self._console.is_terminal:
            self._console.print(Text(event.text, style=style), end="", soft_wrap=True)
        else:
            self._console.file.write(event.text)
        self._console.file.flush()

    def finish(self) -> None:
        """End the line."""
        self._console.file.write("\n")
        self._console.file.flush()


def play(stream: "Stream | BeamStream", printer: TokenPrinter | None) -> None:
    """Run a stream to its end, printing tokens as they arrive; Ctrl-C closes the stream."""
    try:
        for event in stream:
            if printer is not None:
                printer.print(event)
    except KeyboardInterrupt:
        stream.close()
        raise
    finally:
        if printer is not None:
            printer.finish()


def summary_line(stats: "Stats") -> str:
    """Return the figures of one run in a line, and a second line on why drafting paused, if it did."""
    return (
        f"{stats.new_tokens} tokens in {stats.decode_seconds:.2f} s, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.tokens_per_pass:.2f} tokens per target pass"
        + (f", first token after {stats.first_token_seconds:.2f} s" if stats.first_token_seconds is not None else "")
        + (f", acceptance {stats.acceptance_rate:.2f}" if stats.offers_by_depth else "")
        + (f"; from {sources}" if (sources := sources_text(stats.tokens_by_source)) else "")
        + (f"\n{line}" if (line := stats.rest_line) else "")
    )


def sources_text(tokens_by_source: Mapping[str, int], unit: str = "") -> str:
    """Return how many tokens each source proposed, as text; empty if all come from the draft."""
    counts = {source: count for source, count in tokens_by_source.items() if count}
    if counts.keys() <= {"model", "head"}:
        return ""
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{source} {count}{unit}" for source, count in ordered)
