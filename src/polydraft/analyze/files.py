"""The table as files."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from polydraft.analyze.row import Row
from polydraft.analyze.sweep import Sweep, figures
from polydraft.errors import UsageError
from polydraft.output import write_text

_REMEDY = "free some space or choose another --out, and run again"


def write_files(rows: Sequence[Row], out: Path, sweep: Sweep | None, *, paper_bound: bool) -> list[Path]:
    """Write the rows as CSV and, of a sweep, the figures; return what was written."""
    name = "table.csv" if sweep is None else f"sweep-{sweep}.csv"
    contents = {name: to_csv(rows, paper_bound=paper_bound), **({} if sweep is None else figures(sweep, rows))}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error.strerror}); choose another --out") from None
    for file, content in contents.items():
        write_text(out / file, content, remedy=_REMEDY)
    return [out / file for file in contents]


def to_csv(rows: Sequence[Row], *, paper_bound: bool) -> str:
    """Write one line a row, empty where there is no figure."""
    records = [row.as_dict(paper_bound=paper_bound) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else ["scheme"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
