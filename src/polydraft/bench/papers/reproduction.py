"""A paper measured again, as files: tables in Markdown, figures in SVG."""

from pathlib import Path
from typing import Any

from polydraft.bench.papers.paper import Paper, to_markdown
from polydraft.output import write_text

FILE = "reproduction.md"


def folder_name(temperature: float) -> str:
    """Return the folder of the benchmark at one temperature, within the reproduction's."""
    return f"temperature-{temperature:g}"


def write_reproduction(paper: Paper, results: dict[float, dict[str, Any]], out: Path) -> str:
    """Write `reproduction.md` and its drawings.

    Parameters
    ----------
    paper : Paper
    results : dict
        Temperature to what `results.json` holds.
    out : Path
        Exists.

    Returns
    -------
    str
        The text of `reproduction.md`.
    """
    comparisons = paper.tables({temperature: one["methods"] for temperature, one in results.items()})
    for drawing in (drawing for comparison in comparisons for drawing in comparison.drawings):
        write_text(out / drawing.file, drawing.content)
    text = to_markdown(paper, comparisons, next(iter(results.values()))["settings"])
    write_text(out / FILE, text)
    return text
