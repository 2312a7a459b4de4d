"""The page of `polydraft bench serve`: a table and a chart, no requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from polydraft.lab import svg
from polydraft.lab.bench.report import _charts, _sections, values
from polydraft.lab.svg import escape

_TIMES = {"first_token": "First token", "between_parts": "Between parts", "whole": "Whole answer"}


def render_load(found: Mapping[str, Any]) -> str:
    """Return what `bench serve` measured as one HTML page.

    Parameters
    ----------
    found : mapping
        What its JSON file holds: ``options`` and ``arms``.
    """
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
    head = "".join(f'<th role="columnheader" scope="col">{label}</th>' for label in ("Arm", *labels))
    rows = []
    for arm in arms:
        cells = [values.number(arm[name], 2) for name in ("tokens_per_second", "requests_per_second", "goodput")]
        cells += [" / ".join(f"{one:.3f}" for one in arm[f"{name}_seconds"].values()) for name in _TIMES]
        cells.append(f"{arm['errors']} of {arm['requests']}" + (f": {escape(arm['first_error'])}" if arm["errors"] else ""))
        drawn = "".join(
            f'<td role="cell" data-label="{label}"><span>{cell}</span></td>' for label, cell in zip(labels, cells, strict=True)
        )
        rows.append(f'<tr role="row"><th role="rowheader" scope="row"><code>{escape(arm["arm"])}</code></th>{drawn}</tr>')
    return f"""<table role="table" class="headline"><thead role="rowgroup"><tr role="row">{head}</tr></thead>
<tbody role="rowgroup">{"".join(rows)}</tbody></table>"""
