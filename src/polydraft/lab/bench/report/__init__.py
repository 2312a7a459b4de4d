"""Self-contained HTML pages: `report.html` (docs/bench-results.md), and the page of `polydraft bench serve`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polydraft.lab import svg
from polydraft.lab.bench import BASELINE
from polydraft.lab.bench.report import _charts, _sections, values
from polydraft.lab.svg import escape
from polydraft.output import write_text

__all__ = ["render", "render_load", "write_report"]

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
        "On the dashed line, a pass costs as much as in plain decoding; the distance below it is the price of drafting and of "
        "wider passes. Filled: no other method is as good on both axes.",
    ),
    "trees": ("Draft trees", "The root, on the left, is the last known token; numbers count the candidates per level."),
    "tokens": ("Token view", "Who proposed each token of a text. The target checked all of them."),
    "measurement": ("How it was measured", "Everything you need to repeat it."),
}
"""Title and first sentence of each section, by anchor."""
_QUEUED = '<p class="lead">On a GPU, a part counts only the time to queue its work; waiting for all of it counts as verify.</p>'

_TIMES = {"first_token": "First token", "between_parts": "Between parts", "whole": "Whole answer"}


def _section(anchor: str, body: str) -> str:
    title, lead = _HEADS[anchor]
    return f'<section id="{anchor}"><h2>{title}</h2><p class="lead">{lead}</p>{body}</section>'


def _speedups(results: Mapping[str, Any]) -> str:
    """Draw one chart for all prompts and one per category, on one scale."""
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
    """Return the report of a `results.json`, schema 1, as one HTML page without external links; all text is escaped."""
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
    """Write the page of a benchmark, given its `results.json`, into a folder that exists."""
    write_text(path, render(results))


def render_load(found: Mapping[str, Any]) -> str:
    """Return the page of `bench serve`, given the ``options`` and ``arms`` of its JSON file."""
    arms = found["arms"]
    body = f"""<h1>polydraft bench serve</h1>
<section><h2>Throughput</h2><p class="lead">Tokens per second of all answers together.</p>{_throughput(arms)}</section>
<section><h2>All figures</h2><p class="lead">Seconds are p50 / p95 / p99. Goodput counts answers within both limits.</p>
{_table(arms)}</section>
<section><h2>How it was measured</h2><p class="lead">Arms ran one after the other, on the same prompts and arrivals.</p>
{_sections.facts_table("Settings", found["options"])}</section>"""
    return _sections.page("polydraft bench serve", body)


def _throughput(arms: Sequence[Mapping[str, Any]]) -> str:
    scale = svg.Scale(0, 1.04 * max(1e-9, *(arm["tokens_per_second"] for arm in arms)))
    return _charts.bars({arm["arm"]: arm["tokens_per_second"] for arm in arms}, scale)


def _table(arms: Sequence[Mapping[str, Any]]) -> str:
    labels = ("Tokens/s", "Answers/s", "Goodput/s", *_TIMES.values(), "Errors")
    rows = []
    for arm in arms:
        cells = [values.number(arm[name], 2) for name in ("tokens_per_second", "requests_per_second", "goodput")]
        cells += [" / ".join(f"{one:.3f}" for one in arm[f"{name}_seconds"].values()) for name in _TIMES]
        cells.append(f"{arm['errors']} of {arm['requests']}" + (f": {escape(arm['first_error'])}" if arm["errors"] else ""))
        rows.append(_sections.table_row(arm["arm"], dict(zip(labels, cells, strict=True))))
    return _sections.table(("Arm", *labels), rows)
