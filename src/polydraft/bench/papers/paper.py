"""A paper as a set of runs and of tables made from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.bench.papers.drawing import Drawing
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
    """What to run, and the tables to make of it."""

    title: str
    runs: dict[float, tuple[str, ...]]
    """Temperature to the methods measured at it."""
    tables: Callable[[Results], list[Comparison]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the benchmark that the paper fixes besides."""


PAPERS: Registry[Paper] = Registry("paper")


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
