"""Write the table as CSV, and sweeps as charts: the paper's figures 1 and 2, acceptance by temperature or number of drafts."""

import csv
import io
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from polydraft.lab.analyze.comparison import Row
from polydraft.lab.charts import Curve, line_chart
from polydraft.output import cannot_write, write_text

_REMEDY = "free some space or choose another --out, and run again"


class Sweep(StrEnum):
    """What varies along the horizontal axis of a chart."""

    TEMPERATURE = "temperature"
    DRAFTS = "drafts"

    @property
    def across(self) -> str:
        """Title of the axis."""
        return {"temperature": "temperature T", "drafts": "drafts n"}[self]

    def place(self, row: Row) -> float:
        """Return a row's position on the axis."""
        return row.temperature if self is Sweep.TEMPERATURE else row.drafts

    def other(self, row: Row) -> str:
        """Return what is constant in a row's chart, for the file name."""
        return f"drafts-{row.drafts}" if self is Sweep.TEMPERATURE else f"temperature-{row.temperature:g}"


def write_files(rows: Sequence[Row], out: Path, sweep: Sweep | None, *, paper_bound: bool) -> list[Path]:
    """Write the rows as CSV and, for a sweep, charts; return the files written."""
    name = "table.csv" if sweep is None else f"sweep-{sweep}.csv"
    contents = {name: to_csv(rows, paper_bound=paper_bound), **({} if sweep is None else figures(sweep, rows))}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from None
    for file, content in contents.items():
        write_text(out / file, content, remedy=_REMEDY)
    return [out / file for file in contents]


def to_csv(rows: Sequence[Row], *, paper_bound: bool) -> str:
    """Return one line per row; missing figures are empty."""
    records = [row.as_dict(paper_bound=paper_bound) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else ["scheme"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def figures(sweep: Sweep, rows: Sequence[Row]) -> dict[str, str]:
    """Draw one chart for each value of what does not vary; return their contents by file name."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(sweep.other(row), []).append(row)
    return {
        f"sweep-{sweep}-{name}.svg": line_chart(
            curves(sweep, group), across=sweep.across, up=f"acceptance rate α, {name.replace('-', ' ')}"
        )
        for name, group in groups.items()
    }


def curves(sweep: Sweep, rows: Sequence[Row]) -> list[Curve]:
    """Return a curve for each scheme and each optimum, grouped by how drafts are drawn."""
    kinds: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        kinds.setdefault(row.drawing or "other", {}).setdefault(row.scheme, []).append(row)
    result = []
    for kind, schemes in kinds.items():
        best = {sweep.place(row): row.optimum.value for group in schemes.values() for row in group if row.optimum is not None}
        if best:
            result.append(Curve(f"α* {kind}", kind, sorted(best.items()), best=True))
        result += [
            Curve(name, kind, [(sweep.place(row), row.acceptance.estimate) for row in group]) for name, group in schemes.items()
        ]
    return result
