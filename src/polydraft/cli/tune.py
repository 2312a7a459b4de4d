"""`polydraft tune`."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import GroupedCommand, Threads, in_range, options_of, prepare
from polydraft.cli.terminal import PhaseProgress, announce_start, output_console
from polydraft.errors import FailureError, UsageError
from polydraft.output import check_file
from polydraft.tune.options import TuneOptions

if TYPE_CHECKING:
    from rich.table import Table

    from polydraft.profile import Pick
    from polydraft.tune.tuning import Choice, Tuning


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[float, ...]:
    """Read a list of numbers."""
    kind = int if parameter.name == "batches" else float
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.replace(",", " ").split()))
    except ValueError:
        example = "1,8,32" if kind is int else "0,1"
        raise UsageError(
            f"{parameter.opts[0]} {text!r} is not a list of numbers; separate them with commas, such as {example}"
        ) from None


_LIST: dict[str, Any] = {"type": str, "multiple": False, "callback": _numbers, "show_default": True}


@click.command("tune", cls=GroupedCommand)
@options_of(
    TuneOptions,
    skip=("device_map",),
    source={"flag": "--prompts"},
    temperatures={"flag": "--temperature", "metavar": "T,T,...", "default": "0", **_LIST},
    batches={"metavar": "N,N,...", "default": "1,2,4,8,16,32", **_LIST},
    predict={"metavar": "GPU"},
)
@options_of(Threads, threads={"callback": in_range})
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="File for the profile  [default: a file in the cache folder]."
)
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="File for an SVG chart of the table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
def command(out: Path | None, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Find out how much drafting speeds up this machine, with which settings, and keep the best ones for later.

    Probes measure how often the draft's candidates are accepted on your prompts, and how long rounds take on this machine. From
    both, tune predicts the speed-up of every choice at every batch size, then runs the best few. From then on, load, generate,
    serve and batch use the best settings automatically, until the machine, the models or the version change. --predict GPU
    predicts for a GPU that you don't have here, and keeps nothing.
    """
    threads = options.pop("threads")
    announce_start()
    settings = TuneOptions(device_map=None, **options)
    if settings.predict is not None and out is not None:
        raise UsageError(f"--predict {settings.predict} is for other hardware and writes no profile; leave out --out")
    for file in (out, plot):
        if file is not None:
            check_file(file)
    from polydraft.tune.tuning import Tuning

    prepare(threads)
    with PhaseProgress() as progress:
        tuning = Tuning(settings, progress)
        picks = tuning.run()
    kept = _keep(tuning, picks, out) if settings.predict is None else None
    if plot is not None:
        from polydraft.output import write_text

        write_text(plot, _chart(tuning), remedy="choose another --plot")
    if as_json:
        rows = [{**dataclasses.asdict(one), "name": one.name} for one in tuning.choices]
        report = {"choices": rows, "picks": [dataclasses.asdict(one) for one in picks], "figures": tuning.figures}
        click.echo(json.dumps({**report, "profile": None if kept is None else str(kept)}))
        return
    console = output_console()
    for temperature in dict.fromkeys(one.temperature for one in tuning.choices):
        click.echo(_title(tuning, temperature))
        console.print(_table(tuning, temperature))
        click.echo(_verdict([one for one in picks if one.temperature == temperature]))
    if difference := _difference(tuning.choices):
        click.echo(difference)
    if kept is not None:
        click.echo(f"kept in {kept}")


def _keep(tuning: "Tuning", picks: Sequence["Pick"], out: Path | None) -> Path:
    file = out or tuning.file
    try:
        tuning.profile(picks).write(file)
    except OSError as error:
        raise FailureError(
            f"cannot keep the profile in {file} ({error.strerror or error}); choose another --out, or set POLYDRAFT_CACHE"
        ) from None
    return file


def _title(tuning: "Tuning", temperature: float) -> str:
    options = tuning.options
    where = f"on {options.predict}, reckoned" if options.predict else "here"
    size = f" as {options.size}" if options.size else ""
    return f"{options.target}{size} with {tuning.draft_name}, T={temperature:g}: expected speed-up {where}, by texts at a time"


def _table(tuning: "Tuning", temperature: float) -> "Table":
    """Return one row per choice, one column per batch."""
    from rich import box
    from rich.table import Table

    options = tuning.options
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("kind", no_wrap=True)
    table.add_column("choice", overflow="fold")
    for heading in ("tokens/pass", "nodes", *map(str, options.batches)):
        table.add_column(heading, justify="right", no_wrap=True)
    own = [one for one in tuning.choices if one.temperature == temperature]
    ran = any(one.measured for one in own)
    if ran:
        table.add_column(f"ran at {options.checked_batch}", justify="right", no_wrap=True)
    best = {batch: max(one.expected[batch] for one in own) for batch in options.batches}
    before = ""
    for one in own:
        cells = [
            f"{one.expected[batch]:.2f}" + ("*" if one.expected[batch] == best[batch] else " ") for batch in options.batches
        ]
        measured = [f"{value:.2f}" for value in one.measured.values()] or [""]
        table.add_row(
            "" if one.kind == before else one.kind,
            one.name,
            f"{one.tokens:.2f}",
            f"{one.nodes:.0f}",
            *cells,
            *(measured if ran else []),
        )
        before = one.kind
    return table


def _chart(tuning: "Tuning") -> str:
    """Draw expected speed-ups over the batch, of the first temperature."""
    from polydraft.lab.charts import Curve, Point, line_chart

    batches = tuning.options.batches
    places = {batch: math.log2(batch) for batch in batches}
    own = [one for one in tuning.choices if one.temperature == tuning.choices[0].temperature]
    curves = [
        Curve(one.name, one.kind, [Point(places[batch], one.expected[batch]) for batch in batches], best=one.kind == "plain")
        for one in own
    ]
    names = {place: str(batch) for batch, place in places.items()}
    return line_chart(curves, across="texts at a time", up="expected speed-up over plain decoding", most=math.inf, names=names)


def _verdict(picks: Sequence["Pick"]) -> str:
    """Say which setting to use for which batch, and whether drafting pays at all."""
    said = []
    for one in picks:
        factor = one.expected if one.measured is None else one.measured
        name = " ".join(word for word in (one.drafter, one.tree) if word not in ("auto", "none")) or "plain decoding"
        said.append(f"{one.batch}: {name} ({factor:.2f}x)")
    return "best: " + ", ".join(said)


def _difference(choices: Sequence["Choice"]) -> str:
    """Say how far off predictions were."""
    errors = [
        abs(value / one.expected[batch] - 1) for one in choices for batch, value in one.measured.items() if one.kind != "plain"
    ]
    if not errors:
        return ""
    return f"expected and measured differ by {100 * statistics.median(errors):.0f} % (median of {len(errors)})"
