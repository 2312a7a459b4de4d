"""`polydraft analyze`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polydraft.cli.machine import DEVICE, DTYPE, THREADS, set_threads
from polydraft.errors import UsageError

if TYPE_CHECKING:
    from polydraft.analyze import Analysis, AnalyzeSettings, LawStore, Row

_USUAL = {
    None: ("0.6,1.0", "2,4,8"),
    "temperature": ("0.1,0.25,0.5,0.75,1.0,1.25,1.5", "3"),
    "drafts": ("0.7", "1,2,3,4,6,8"),
}
"""What --sweep looks at, temperatures and drafts, unless told otherwise; 3 drafts and 0.7 are the paper's own."""
_KEPT_BYTES = 2**31
"""Of laws in the user's cache folder; in --out all are kept."""


@click.command("analyze", short_help="Compare what schemes accept with the most that could be accepted.")
@click.option("--target", default="smollm2", show_default=True, help="smollm2 (bundled), a folder, or a hub name.")
@click.option("--draft", default="auto", show_default=True, help="Draft: a folder, a hub name, early-exit:k, or auto.")
@click.option("--prompts", "source", default="builtin", show_default=True, help="builtin, a file, or hf:NAME[:SPLIT].")
@click.option("--limit", type=int, default=32, show_default=True, help="Use so many prompts, spread over the categories.")
@click.option("--raw", is_flag=True, help="Use prompts as they are, without the chat template.")
@click.option("--temperature", default=None, metavar="T,T,...", help="Temperatures  [default: 0.6,1.0].")
@click.option("--draft-temperature", type=float, default=None, help="Temperature of the draft  [default: the target's].")
@click.option("--drafts", default=None, metavar="N,N,...", help="Numbers of drafts  [default: 2,4,8].")
@click.option("--schemes", default="all", show_default=True, metavar="NAME,...", help="Schemes; 'polydraft info' lists them.")
@click.option("--sweep", type=click.Choice(["temperature", "drafts"]), help="Plot α over many temperatures or drafts.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="Most tokens of each answer.")
@click.option("--positions", type=int, default=256, show_default=True, help="Positions of the answers to look at, at random.")
@click.option("--batch-size", type=int, default=16, show_default=True, help="Prompts answered side by side.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same answers and positions.")
@click.option("--paper-bound", is_flag=True, help="Show beside α* what the paper prints for it.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder for tables, plots and collected laws.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@DEVICE
@DTYPE
@THREADS
def command(out: Path | None, sweep: str | None, as_json: bool, **options: Any) -> None:
    """Compare what every scheme accepts with the most that any verifier could accept of drafts drawn in the same way.

    The target answers prompts; at positions of the answers both models' laws are collected, and from these the acceptance α of
    each scheme with n drafts, the optimum α* for its way of drawing, and the gap between them are computed (Table 1 of
    "Towards Optimal Multi-Draft Speculative Decoding"; --sweep draws its Figures 1 and 2). Errors are standard errors over
    prompts. Laws are kept, in --out or in the cache folder, so that asking for another scheme runs no model.
    """
    from polydraft.analyze import Analysis
    from polydraft.analyze.files import Sweep, write_files
    from polydraft.cli.options import arrange_messages
    from polydraft.cli.progress import PhaseProgress
    from polydraft.output import check_folder

    if sweep is not None and out is None:
        raise UsageError("--sweep needs --out; name a folder for the plots")
    settings = _settings(sweep, options)
    if out is not None:
        check_folder(out, resume=True)
    arrange_messages()
    with PhaseProgress() as progress:
        analysis = Analysis(settings, _store(out), progress)
        rows = list(analysis.rows())
    written = []
    if out is not None:
        written = write_files(rows, out, Sweep(sweep) if sweep else None, paper_bound=settings.paper_bound)
    if as_json:
        click.echo(json.dumps(_report(analysis, rows)))
        return
    _show(analysis, rows)
    if written:
        click.echo(f"{', '.join(map(str, written))} written")


def _settings(sweep: str | None, options: dict[str, Any]) -> "AnalyzeSettings":
    """Read the lists and check everything that can be checked without a model."""
    from polydraft.analyze import AnalyzeSettings

    temperatures, drafts = _USUAL[sweep]
    options["temperatures"] = _numbers("--temperature", options.pop("temperature") or temperatures, float)
    options["drafts"] = _numbers("--drafts", options.pop("drafts") or drafts, int)
    schemes = options.pop("schemes").replace(",", " ").split()
    settings = AnalyzeSettings(schemes=() if schemes in ([], ["all"]) else tuple(schemes), **options)
    set_threads(settings.threads)
    return settings


def _numbers(option: str, text: str, kind: type[float] | type[int]) -> tuple[Any, ...]:
    try:
        numbers = tuple(dict.fromkeys(kind(part) for part in text.replace(",", " ").split()))
    except ValueError:
        numbers = ()
    if not numbers:
        what, example = ("whole numbers", "2,4,8") if kind is int else ("numbers", "0.6,1.0")
        raise UsageError(f"{option} {text!r} is not a list of {what}; write them with commas, such as {example}")
    return numbers


def _store(out: Path | None) -> "LawStore":
    from polydraft.analyze import LawStore
    from polydraft.models.bundled import cache_root

    return LawStore(cache_root() / "laws", most_bytes=_KEPT_BYTES) if out is None else LawStore(out / "cache")


def _report(analysis: "Analysis", rows: list["Row"]) -> dict[str, Any]:
    from dataclasses import asdict

    settings, pair = analysis.settings, analysis.pair
    models = {"draft": pair.draft_name, "device": str(pair.device), "dtype": str(pair.dtype).removeprefix("torch.")}
    return {
        "rows": [row.as_dict(paper_bound=settings.paper_bound) for row in rows],
        "samples": [asdict(size) for size in analysis.sizes],
        "settings": {**asdict(settings), **models},
    }


def _show(analysis: "Analysis", rows: list["Row"]) -> None:
    """Print a table for each temperature."""
    from rich.console import Group

    from polydraft.cli.analyze_table import analysis_table
    from polydraft.cli.render import output_console

    tables = [analysis_table(analysis, rows, size) for size in analysis.sizes]
    output_console().print(Group(*tables))
