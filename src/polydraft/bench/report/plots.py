"""Small multiples (acceptance by depth, tokens a pass) and the plot of speed against tokens a pass."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from polydraft import svg
from polydraft.bench.report import values
from polydraft.bench.schema import BASELINE
from polydraft.svg import escape

_WIDTH, _HEIGHT = 320.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 308.0, 18.0, 158.0
_LABELLED = 8  # more points than this leave no room for a figure at each

Figures = Mapping[str, Any]
Curve = Sequence[float | None]


def figure(name: str, drawing: str, caption: str) -> str:
    """Frame a panel, headed by its method."""
    return f'<figure class="card"><h3><code>{escape(name)}</code></h3>{drawing}<figcaption>{caption}</figcaption></figure>'


def _y(fraction: float) -> float:
    return _BOTTOM - fraction * (_BOTTOM - _TOP)


def _x(index: int, count: int) -> float:
    """Middle of one of `count` equal columns."""
    return _LEFT + (_RIGHT - _LEFT) * (index + 0.5) / count


def _frame(top: float, columns: int, first: int, below: str) -> list[str]:
    shapes = []
    for tick in svg.Scale(0, top).ticks(4):
        y = _y(tick / top)
        shapes += [svg.line(_LEFT, y, _RIGHT, y, "grid"), svg.text(_LEFT - 6, y + 4, f"{100 * tick:.0f} %", "end")]
    every = 1 + (columns - 1) // 12
    shapes += [svg.text(_x(i, columns), _BOTTOM + 15, str(first + i)) for i in range(0, columns, every)]
    return [*shapes, svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 30, below, kind="axis-name")]


def _curve(points: Curve, columns: int, kind: str) -> list[str]:
    """Straight pieces between neighbouring known points."""
    places = [None if point is None else (_x(i, columns), _y(min(1.0, point))) for i, point in enumerate(points)]
    return [svg.line(*a, *b, kind) for a, b in pairwise(places) if a and b]


def acceptance_panels(methods: Mapping[str, Figures]) -> str:
    """One panel a method: its acceptance at each depth, the other methods' in grey behind it."""
    curves = {name: [values.finite(v) for v in figures.get("acceptance_by_depth") or []] for name, figures in methods.items()}
    curves = {name: curve for name, curve in curves.items() if curve}
    columns = max([1, *map(len, curves.values())])
    panels = []
    for name, curve in curves.items():
        shapes = _frame(1.0, columns, 1, "depth in the draft")
        for other, points in curves.items():
            if other != name:
                shapes += _curve(points, columns, "behind")
        shapes += _curve(curve, columns, "curve")
        for i, point in enumerate(curve):
            if point is not None:
                shapes.append(svg.circle(_x(i, columns), _y(min(1.0, point)), 4, "dot"))
                if columns <= _LABELLED:
                    shapes.append(svg.text(_x(i, columns), _y(min(1.0, point)) - 8, f"{100 * point:.0f}", kind="figure-label"))
        said = ", ".join(f"depth {i}: {100 * p:.0f} %" for i, p in enumerate(curve, 1) if p is not None)
        overall = values.percent(methods[name].get("acceptance_rate"))
        drawing = svg.panel(_WIDTH, _HEIGHT, shapes, f"Acceptance by depth of {name}: {said}")
        panels.append(figure(name, drawing, f"{overall} over all depths"))
    return _panels(panels, [name for name in methods if name not in curves and name != BASELINE])


def _shares(figures: Figures) -> list[float]:
    """Share of passes that yielded 1, 2, … tokens."""
    counts = {int(length): values.finite(count) or 0.0 for length, count in (figures.get("block_lengths") or {}).items()}
    total = sum(counts.values())
    return [counts.get(length, 0.0) / total for length in range(1, max(counts) + 1)] if total else []


def length_panels(methods: Mapping[str, Figures]) -> str:
    """One histogram a method: how many tokens its passes yielded."""
    found = {name: shares for name, figures in methods.items() if name != BASELINE and (shares := _shares(figures))}
    columns = max([1, *map(len, found.values())])
    top = max([0.1, *(max(shares) for shares in found.values())]) * 1.08
    panels = []
    for name, shares in found.items():
        shapes = _frame(top, columns, 1, "tokens from one pass")
        width = 0.72 * (_RIGHT - _LEFT) / columns
        for i, share in enumerate(shares):
            if share > 0:
                y = _y(share / top)
                shapes.append(svg.rect(_x(i, columns) - width / 2, y, width, _BOTTOM - y, "column"))
                if columns <= _LABELLED:
                    written = f"{100 * share:.0f}" if share >= 0.005 else "<1"
                    shapes.append(svg.text(_x(i, columns), y - 4, written, kind="figure-label"))
        said = ", ".join(f"{i}: {100 * share:.1f} %" for i, share in enumerate(shares, 1) if share)
        passes = sum(methods[name]["block_lengths"].values())
        mean = values.number(methods[name].get("tokens_per_pass"))
        drawing = svg.panel(_WIDTH, _HEIGHT, shapes, f"Tokens a pass of {name}: {said}")
        panels.append(figure(name, drawing, f"{mean} tokens a pass, {passes:,.0f} passes"))
    return _panels(panels, [name for name in methods if name not in found and name != BASELINE])


def _panels(panels: Sequence[str], missing: Sequence[str]) -> str:
    return f'<div class="panels">{"".join(panels)}</div>{values.missing_note(missing)}'
