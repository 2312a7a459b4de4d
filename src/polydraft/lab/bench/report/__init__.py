"""`report.html`: one page, no requests, made from `results.json` (docs/bench-results.md)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polydraft.lab.bench import BASELINE
from polydraft.lab.bench.report import _charts, _sections, values
from polydraft.output import write_text

__all__ = ["render", "write_report"]

_HEADS = {
    "figures": ("All figures", "One row per method; a pass is one forward pass of the target."),
    "speed": (
        "Speed-up",
        "Speed-up over plain decoding; the whisker is the 95\N{NO-BREAK SPACE}% interval, the vertical line is 1×.",
    ),
    "acceptance": (
        "Acceptance by depth",
        "How often a candidate is accepted at each depth, given that everything above it was; other methods in grey.",
    ),
    "passes": (
        "Tokens per pass",
        "Share of target passes by the number of tokens they yielded; plain decoding always yields 1.",
    ),
    "time": ("Where the time goes", "Milliseconds per token, with prefill spread over all tokens."),
    "cost": (
        "What drafting costs",
        "On the dashed line, a pass would cost as much as in plain decoding; the drop below it is the price of drafting and of "
        "wider passes. Filled: no other method is as good on both axes.",
    ),
    "trees": ("Draft trees", "The root, on the left, is the last known token; numbers count the candidates per level."),
    "tokens": ("Token view", "Who proposed each token of a text. The target checked every one of them."),
    "measurement": ("How it was measured", "Everything you need to repeat it."),
}
"""Title and first sentence of each section, by anchor."""
_QUEUED = '<p class="lead">On a GPU, a part counts only the time to queue its work; waiting for all of it counts as verify.</p>'


def _section(anchor: str, body: str) -> str:
    title, lead = _HEADS[anchor]
    return f'<section id="{anchor}"><h2>{title}</h2><p class="lead">{lead}</p>{body}</section>'


def _speedups(results: Mapping[str, Any]) -> str:
    """One chart for all prompts, one per category, on one scale."""
    methods = {name: figures for name, figures in results["methods"].items() if name != BASELINE}
    scale = _charts.speedup_scale(methods)
    charts = [_charts.speedup_chart("All prompts", methods, scale)]
    for category in values.categories_of(results):
        rows = {name: part for name, figures in methods.items() if (part := (figures.get("categories") or {}).get(category))}
        counts = [int(n) for row in rows.values() if (n := values.finite(row.get("prompts"))) is not None]
        note = f"{max(counts)} prompt{'' if max(counts) == 1 else 's'}" if counts else ""
        charts.append(_charts.speedup_chart(category, rows, scale, note))
    return f'{charts[0]}<div class="pairs">{"".join(charts[1:])}</div>'


def render(results: dict[str, Any]) -> str:
    """Return the report as one HTML page that needs nothing else.

    Parameters
    ----------
    results : dict
        What `results.json` holds, schema 1.

    Returns
    -------
    str
        A page without any reference to the outside. All text from `results` is escaped.
    """
    methods = results["methods"]
    settings = results.get("settings") or {}
    bodies = {
        "figures": _sections.headline_table(methods),
        "speed": _speedups(results),
        "acceptance": _charts.acceptance_panels(methods),
        "passes": _charts.length_panels(methods),
        "time": ("" if str(settings.get("device") or "cpu").startswith("cpu") else _QUEUED) + _charts.time_chart(methods),
        "cost": _charts.pareto_plot(methods),
        "trees": _charts.tree_panels(results.get("trees") or {}),
        "tokens": _sections.token_view(results),
        "measurement": _sections.provenance(results),
    }
    links = "".join(f'<li><a href="#{anchor}">{anchor.capitalize()}</a></li>' for anchor in bodies)
    title = f"polydraft bench: {settings.get('target') or '–'}, {settings.get('draft') or '–'}"
    sections = "".join(_section(anchor, body) for anchor, body in bodies.items())
    body = f"""{_sections.header(results)}
<nav aria-label="Sections"><ul>{links}</ul></nav>
{sections}"""
    return _sections.page(title, body, before='<a class="skip" href="#figures">Skip to the figures</a>\n', script="script.js")


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
