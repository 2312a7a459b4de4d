"""Bars in rows: speed-ups with their intervals, and where the time goes."""

from collections.abc import Mapping
from typing import Any

from polydraft import svg
from polydraft.bench.report import values
from polydraft.svg import escape

PARTS = {"prefill": "P", "draft": "D", "target": "T", "verify": "V", "commit": "C", "other": "O"}
"""Parts of a generation's time, each with the letter that marks it beside its colour."""
_ROW = 26.0
_LETTER_SHARE = 0.09  # on a phone a bar is about 300 px wide; a narrower part has no room for its letter

Figures = Mapping[str, Any]


def _row(label: str, drawing: str, value: str) -> str:
    return f'<div class="row"><span class="row-label">{label}</span>{drawing}<span class="row-value">{value}</span></div>'


def _axis(scale: svg.Scale, unit: str) -> str:
    ticks = scale.ticks()
    words = [svg.text(scale.x(tick), 14, svg.tick_text(tick) + unit, svg.end_anchor(scale.fraction(tick))) for tick in ticks]
    return f'<div class="row axis" aria-hidden="true"><span></span>{svg.fluid(18, words)}<span></span></div>'


def _grid(scale: svg.Scale) -> list[str]:
    return [svg.line(scale.x(tick), 0, scale.x(tick), _ROW, "grid") for tick in scale.ticks()]


def speedup_scale(methods: Mapping[str, Figures]) -> svg.Scale:
    """One scale for all categories, from nought to the highest interval."""
    everything = [part for figures in methods.values() for part in (figures, *(figures.get("categories") or {}).values())]
    found = [values.finite(part.get(key)) for part in everything for key in ("speedup", "speedup_high")]
    return svg.Scale(0, 1.04 * max([1.2, *(value for value in found if value is not None)]))


def speedup_bar(figures: Figures, scale: svg.Scale) -> str:
    """One bar from nought, the interval across its end, a line where the baseline stands."""
    shapes = _grid(scale)
    value, bounds = values.finite(figures.get("speedup")), values.interval(figures)
    middle = _ROW / 2
    if value is not None:
        shapes.append(svg.rect(0, 5, scale.x(value), _ROW - 10, f"bar {values.speedup_verdict(figures)}"))
    shapes.append(svg.line(scale.x(1), 0, scale.x(1), _ROW, "one"))
    if bounds:
        low, high = scale.x(bounds[0]), scale.x(bounds[1])
        shapes += [svg.line(low, middle, high, middle, kind) for kind in ("halo", "whisker")]
        shapes += [svg.line(end, middle - 5, end, middle + 5, "whisker") for end in (low, high)]
    return svg.fluid(_ROW, shapes)


def speedup_chart(title: str, rows: Mapping[str, Figures], scale: svg.Scale, note: str = "") -> str:
    """Speed-ups of all methods on one set of prompts."""
    drawn = "".join(
        _row(f"<code>{escape(name)}</code>", speedup_bar(figures, scale), values.speedup(figures))
        for name, figures in rows.items()
    )
    return (
        f'<section class="card"><h3>{escape(title)} <span class="muted">{note}</span></h3>{drawn}{_axis(scale, "×")}</section>'
    )


def time_parts(figures: Figures) -> dict[str, float] | None:
    """Milliseconds a token of each part, what no part accounts for included; None where they are not known."""
    seconds, tokens = figures.get("seconds"), values.finite(figures.get("tokens"))
    if not seconds or not tokens:
        return None
    parts = {name: values.finite(seconds.get(name)) or 0.0 for name in PARTS if name != "other"}
    total = values.finite(seconds.get("total")) or sum(parts.values())
    parts["other"] = max(0.0, total - sum(parts.values()))
    return {name: 1000 * value / tokens for name, value in parts.items()}


def _time_bar(parts: Mapping[str, float], scale: svg.Scale) -> str:
    shapes, start = _grid(scale), 0.0
    for name, value in parts.items():
        end = start + value
        if value > 0:
            shapes.append(svg.rect(scale.x(start), 4, scale.width(start, end), _ROW - 8, f"part part-{name}"))
        if scale.fraction(end) - scale.fraction(start) > _LETTER_SHARE:
            shapes.append(svg.text(scale.x((start + end) / 2), _ROW / 2 + 4, PARTS[name], kind="letter"))
        start = end
    return svg.fluid(_ROW, shapes)


def time_chart(methods: Mapping[str, Figures]) -> str:
    """Milliseconds a token, split by part, one row a method."""
    known = {name: parts for name, figures in methods.items() if (parts := time_parts(figures))}
    if not known:
        return '<p class="muted">No method tells how its time was spent.</p>'
    scale = svg.Scale(0, 1.02 * max(1e-9, *(sum(parts.values()) for parts in known.values())))
    rows = []
    for name, parts in known.items():
        total = sum(parts.values()) or 1.0
        shares = " · ".join(
            f"{part}\N{NO-BREAK SPACE}{values.percent(value / total)}"
            for part, value in parts.items()
            if value / total >= 0.005
        )
        value = f'<strong>{total:.1f} ms</strong><span class="shares">{shares}</span>'
        rows.append(_row(f"<code>{escape(name)}</code>", _time_bar(parts, scale), value))
    legend = "".join(f'<li><span class="swatch part-{part}">{letter}</span> {part}</li>' for part, letter in PARTS.items())
    note = values.missing_note(name for name in methods if name not in known)
    return f'<ul class="legend">{legend}</ul><div class="card wide-value">{"".join(rows)}{_axis(scale, " ms")}</div>{note}'
