"""The table of `polydraft analyze` on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from polydraft.analyze import Analysis, Row
from polydraft.analyze.analysis import SampleSize
from polydraft.analyze.comparison import drawing_of
from polydraft.schemes import SCHEMES

_ORDER = ("independent", "distinct", "greedy", "hybrid", "top", "other")


def analysis_table(analysis: Analysis, rows: Sequence[Row], size: SampleSize) -> Table:
    """Return the table of one temperature, a section for each number of drafts; a dash where a scheme takes fewer."""
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


def _cells(row: Row, paper_bound: bool) -> list[str]:
    cells = [_figure(row.acceptance, row.standard_error), _figure(row.optimum), _figure(row.gap, row.gap_standard_error)]
    return [*cells, _figure(row.paper_bound)] if paper_bound else cells


def _figure(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "-"
    # Rounding leaves some 1e-17 on either side of nothing.
    written = f"{value if abs(value) >= 5e-5 else 0.0:.4f}"
    return written if error is None else f"{written} ±{error:.4f}"
