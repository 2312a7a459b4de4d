"""`polydraft tune`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.options import GroupedCommand, Threads, json_option, numbers, options_of, prepare
from polydraft.cli.terminal import PhaseProgress, announce_start, figures_table, output_console
from polydraft.errors import FailureError
from polydraft.output import check_file
from polydraft.tune import TuneOptions

if TYPE_CHECKING:
    from rich.table import Table

    from polydraft.tune.tuning import Result


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[float, ...]:
    kind, example = (int, "1,8,32") if parameter.name == "batch_sizes" else (float, "0,1")
    return numbers(parameter.opts[0], text, kind, example)


_LIST: dict[str, Any] = {"type": str, "multiple": False, "callback": _numbers, "show_default": True}


@click.command("tune", cls=GroupedCommand)
@options_of(
    TuneOptions,
    skip=("device_map",),
    source={"flag": "--prompts"},
    temperatures={"flag": "--temperature", "metavar": "T,T,...", "default": "0", **_LIST},
    batch_sizes={"flag": "--batch-size", "metavar": "N,N,...", "default": "1,8", **_LIST},
)
@options_of(Threads)
@click.option("--out", type=click.Path(path_type=Path), help="File for the profile  [default: a file in the cache folder].")
@json_option
def command(out: Path | None, as_json: bool, **options: Any) -> None:
    """Find the fastest drafting settings for this machine, and keep them.

    Decodes your prompts in turns with a short list of trees and without drafts, and repeatedly drops the slower half of the
    trees. The best one is saved in a profile, or plain decoding if no tree is clearly faster. From then on load, generate,
    chat, serve and batch use it, until the machine, the models or the version change.
    """
    announce_start()
    threads = options.pop("threads")
    settings = TuneOptions(**options)
    if out is not None:
        check_file(out)
    from polydraft.tune.tuning import Tuning

    prepare(threads)
    with PhaseProgress() as progress:
        tuning = Tuning(settings, progress)
        picks = tuning.run()
    file = out or tuning.file
    try:
        tuning.profile(picks).write(file)
    except OSError as error:
        raise FailureError(
            f"cannot write the profile {file} ({error.strerror or error}); choose another --out, or set POLYDRAFT_CACHE"
        ) from None
    if as_json:
        results = [dataclasses.asdict(one) for one in tuning.results]
        click.echo(json.dumps({"results": results, "profile": str(file)}))
        return
    console = output_console()
    for pick in picks:
        click.echo(f"{settings.target} with draft {tuning.draft_name}, T={pick.temperature:g}, batch size {pick.batch}")
        console.print(_table([one for one in tuning.results if (one.temperature, one.batch) == (pick.temperature, pick.batch)]))
    click.echo(f"saved the settings marked * in {file}")


def _table(results: Sequence["Result"]) -> "Table":
    """Return a table with a row per candidate."""
    table = figures_table("setting", ("tokens/s", "tokens/pass", "speed-up (95 %)", "timed"))
    for one in results:
        speedup = f"{one.speedup:.2f}" + ("" if one is results[0] else f" ({one.low:.2f}-{one.high:.2f})")
        rates = f"{one.tokens_per_second:.1f}", f"{one.tokens_per_pass:.2f}"
        table.add_row(("* " if one.picked else "  ") + one.name, *rates, speedup, f"{one.laps}x")
    return table
