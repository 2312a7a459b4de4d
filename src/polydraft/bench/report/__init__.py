"""`report.html`: one page, no requests, made from `results.json` (docs/bench-results.md)."""

from pathlib import Path
from typing import Any

from polydraft.bench.report.page import render
from polydraft.output import write_text

__all__ = ["render", "write_report"]


def write_report(results: dict[str, Any], path: Path) -> None:
    """Write the page for one benchmark.

    Parameters
    ----------
    results : dict
        What `results.json` holds, schema 1.
    path : Path
        The file to write; its folder must exist.
    """
    write_text(path, render(results))
