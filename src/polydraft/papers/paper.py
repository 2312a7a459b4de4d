"""A paper: what it claims, where its algorithms live, and its experiments as runs and tables made from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polydraft.output import write_text
from polydraft.papers._charts import Drawing
from polydraft.registry import Registry

Results = dict[float, dict[str, Any]]
"""Temperature to the `methods` part of `results.json`."""


@dataclass(frozen=True)
class Comparison:
    """One table or figure: what we measured, and beside it what was published."""

    title: str
    columns: Sequence[str]
    ours: Sequence[Sequence[str]]
    published_note: str
    """With which models and machine."""
    published_columns: Sequence[str]
    published: Sequence[Sequence[str]]
    remark: str = ""
    """What our figures say of the paper's claim."""
    drawings: Sequence[Drawing] = ()
    """Our figures as the paper draws its own."""


@dataclass(frozen=True)
class Paper:
    """What a paper claims, where its algorithms live, what to run, and the tables to make of it."""

    title: str
    claim: str
    """In our words."""
    algorithms: Mapping[str, str]
    """What the paper proposes or compares with, and where it lives here, as a dotted name."""
    runs: dict[float, tuple[str, ...]]
    """Temperature to the methods measured at it."""
    tables: Callable[[Results], list[Comparison]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the benchmark that the paper fixes besides."""
    lossy: str = ""
    """Which of its rules change the law of the text, if any, and what is lossless in their place."""


PAPERS: Registry[Paper] = Registry("paper")
FILE = "reproduction.md"


def to_markdown(paper: Paper, comparisons: Sequence[Comparison], settings: dict[str, Any]) -> str:
    """Write all comparisons; ours and the paper's never share a table."""
    lines = [
        f"# {paper.title}: measured again",
        "",
        f"Ours: target {settings['target']}, draft {settings['draft']}, {settings['dtype']} on {settings['device']}, "
        f"{settings['prompts']['count']} prompts ({settings['prompts']['source']}), {settings['max_new_tokens']} new tokens. "
        "The paper's own figures come from other models and machines: compare the pattern, not the numbers.",
    ]
    for comparison in comparisons:
        lines += ["", f"## {comparison.title}", "", "**Ours**", "", *_table(comparison.columns, comparison.ours)]
        lines += [line for one in comparison.drawings for line in ("", f"![{one.caption}]({one.file})")]
        lines += ["", f"**Published** ({comparison.published_note})", ""]
        lines += _table(comparison.published_columns, comparison.published)
        if comparison.remark:
            lines += ["", comparison.remark]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def text_of(value: float | None, unit: str = "", digits: int = 2) -> str:
    """Write a figure for a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


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
