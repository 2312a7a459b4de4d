"""`polydraft analyze`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Group
from rich.table import Table

from polydraft.cli.options import json_option, numbers, options_of, prepare
from polydraft.cli.terminal import PhaseProgress, announce_start, output_console
from polydraft.errors import UsageError
from polydraft.lab.analyze.settings import AnalyzeSettings
from polydraft.options import PairOptions

if TYPE_CHECKING:
    from polydraft.lab.analyze.analysis import Analysis, SampleSize
    from polydraft.lab.analyze.comparison import Row

_DEFAULTS = {
    None: ("0.6,1.0", "2,4,8"),
    "temperature": ("0.1,0.25,0.5,0.75,1.0,1.25,1.5", "3"),
    "drafts": ("0.7", "1,2,3,4,6,8"),
}
"""Default temperatures and numbers of drafts, by --sweep; sweeps fix the other one as the paper does."""
_LIST: dict[str, Any] = {"type": str, "multiple": False, "default": None, "show_default": False}
_KEPT_BYTES = 2**31
"""Limit for distributions in the user's cache folder; in --out all are kept."""
_ORDER = ("independent", "distinct", "greedy", "hybrid", "top", "other")


@click.command("analyze")
@options_of(PairOptions)
@options_of(
    AnalyzeSettings,
    skip=("target", "draft", "categories"),
    source={"flag": "--prompts"},
    temperatures={"flag": "--temperature", "metavar": "T,T,...", **_LIST},
    drafts={"metavar": "N,N,...", **_LIST},
    schemes={"metavar": "NAME,...", **_LIST},
)
@click.option("--sweep", type=click.Choice(["temperature", "drafts"]), help="Plot α over many temperatures or drafts.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Folder for tables, plots and collected distributions."
)
@json_option
def command(out: Path | None, sweep: str | None, as_json: bool, **options: Any) -> None:
    """Compare what each scheme accepts with the most that any verifier could accept from drafts drawn the same way.

    The target answers prompts, and both models' distributions are collected at random positions of the answers. From these the
    command computes the acceptance α of each scheme with n drafts, the optimum α* for its way of drawing, and the gap between
    them (Table 1 of "Towards Optimal Multi-Draft Speculative Decoding"; --sweep draws its Figures 1 and 2). Errors are standard
    errors over prompts. The distributions stay in --out or in the cache folder, so that analyzing more schemes needs no models.
    """
    if sweep is not None and out is None:
        raise UsageError("--sweep needs --out; name a folder for the plots")
    announce_start()
    from polydraft.lab.analyze.analysis import Analysis, DistributionStore
    from polydraft.lab.analyze.files import Sweep, write_files
    from polydraft.output import cache_root, check_folder

    settings = _settings(sweep, options)
    if out is not None:
        check_folder(out, resume=True)
    prepare(settings.threads)
    store = DistributionStore(out / "cache") if out else DistributionStore(cache_root() / "distributions", _KEPT_BYTES)
    with PhaseProgress() as progress:
        analysis = Analysis(settings, store, progress)
        rows = list(analysis.rows())
    written = write_files(rows, out, Sweep(sweep) if sweep else None, paper_bound=settings.paper_bound) if out else []
    if as_json:
        click.echo(json.dumps(_report(analysis, rows)))
        return
    output_console().print(Group(*(_table(analysis, rows, size) for size in analysis.sizes)))
    if written:
        click.echo(f"{', '.join(map(str, written))} written")


def _settings(sweep: str | None, options: dict[str, Any]) -> AnalyzeSettings:
    """Read the lists, and check everything that needs no model."""
    temperatures, drafts = _DEFAULTS[sweep]
    options["temperatures"] = numbers("--temperature", options["temperatures"] or temperatures, float, "0.6,1.0")
    options["drafts"] = numbers("--drafts", options["drafts"] or drafts, int, "2,4,8")
    schemes = (options.pop("schemes") or "all").replace(",", " ").split()
    return AnalyzeSettings(schemes=() if schemes in ([], ["all"]) else tuple(schemes), **options)


def _report(analysis: "Analysis", rows: list["Row"]) -> dict[str, Any]:
    from polydraft.devices import dtype_name

    settings, pair = analysis.settings, analysis.pair
    models = {"draft": pair.draft_name, "device": str(pair.device), "dtype": dtype_name(pair.dtype)}
    return {
        "rows": [row.as_dict(paper_bound=settings.paper_bound) for row in rows],
        "samples": [asdict(size) for size in analysis.sizes],
        "settings": {**asdict(settings), **models},
    }


def _table(analysis: "Analysis", rows: Sequence["Row"], size: "SampleSize") -> Table:
    """Return the table of one temperature, with a section per number of drafts; dashes if a scheme cannot take that many."""
    from polydraft.lab.analyze.comparison import drawing_of
    from polydraft.verify import SCHEMES

    settings, pair = analysis.settings, analysis.pair
    title = (
        f"{pair.target_name}, draft {pair.draft_name}, T={size.temperature:g}\n"
        f"{size.positions} positions of answers to {size.prompts} prompts; ± one standard error over prompts"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("drafts", "drawn", "scheme"):
        table.add_column(heading, no_wrap=True)
    headings = ["accepted α", "optimum α*", "gap α* − α"] + (["paper's α*"] if settings.paper_bound else [])
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    found = {(row.scheme, row.drafts): row for row in rows if row.temperature == size.temperature}
    drawn = {name: drawing_of(SCHEMES.get(name)()) for name in settings.scheme_names}
    kinds = {name: "other" if drawing is None else drawing.name for name, drawing in drawn.items()}
    for count in settings.drafts:
        table.add_section()
        before = None
        for name in sorted(settings.scheme_names, key=lambda name: _ORDER.index(kinds[name])):
            row = found.get((name, count))
            cells = ["-"] * len(headings) if row is None else _cells(row, settings.paper_bound)
            table.add_row("" if before else str(count), "" if kinds[name] == before else kinds[name], name, *cells)
            before = kinds[name]
    return table


def _cells(row: "Row", paper_bound: bool) -> list[str]:
    means = (row.acceptance, row.optimum, row.gap, *([row.paper_bound] if paper_bound else []))
    return ["-" if mean is None else _figure(mean.value, mean.standard_error) for mean in means]


def _figure(value: float, error: float | None) -> str:
    return f"{value:z.4f}" if error is None else f"{value:z.4f} ±{error:.4f}"  # z: no minus sign on a figure that rounds to 0
