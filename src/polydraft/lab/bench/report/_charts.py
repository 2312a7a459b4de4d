"""The charts of the report: rows of bars, panels per method, speed against tokens per pass, and draft trees."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from polydraft.lab import svg
from polydraft.lab.bench import BASELINE
from polydraft.lab.bench.report import values
from polydraft.lab.svg import escape
from polydraft.trees import Topology

Figures = Mapping[str, Any]

PARTS = {"prefill": "P", "draft": "D", "target": "T", "verify": "V", "commit": "C", "other": "O"}
"""Parts of a generation's time; each is marked by a colour and by this letter."""
_ROW = 26.0
_LETTER_SHARE = 0.09  # on a phone a bar is about 300 px wide; a narrower part has no room for its letter
_PANEL_WIDTH, _PANEL_HEIGHT = 320.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 308.0, 18.0, 158.0
_LABELLED = 8  # with more points there is no room for a figure at each
_PLANE_HEIGHT, _PLANE_FOOT, _PLANE_HEAD = 380.0, 44.0, 26.0
_NOMINAL_WIDTH = 320.0  # labels are placed for a phone; wider pages have more room
_OFFSETS = ((10, 4, "start"), (-10, 4, "end"), (0, -10, "middle"), (0, 19, "middle"), (10, -10, "start"), (10, 18, "start"))
_TREE_TOP, _TREE_MARGIN = 26.0, 14.0
_TALLEST = 360.0  # trees with hundreds of leaves are drawn finer, not taller


def _row(label: str, drawing: str, value: str) -> str:
    return f'<div class="row"><span class="row-label">{label}</span>{drawing}<span class="row-value">{value}</span></div>'


def _axis(scale: svg.Scale, unit: str) -> str:
    ticks = scale.ticks()
    words = [svg.text(scale.x(tick), 14, svg.tick_text(tick) + unit, svg.end_anchor(scale.fraction(tick))) for tick in ticks]
    return f'<div class="row axis" aria-hidden="true"><span></span>{svg.fluid(18, words)}<span></span></div>'


def _grid(scale: svg.Scale) -> list[str]:
    return [svg.line(scale.x(tick), 0, scale.x(tick), _ROW, "grid") for tick in scale.ticks()]


def bars(figures: Mapping[str, float], scale: svg.Scale) -> str:
    """Draw one bar from zero per name."""
    drawn = "".join(
        _row(
            f"<code>{escape(name)}</code>",
            svg.fluid(_ROW, [*_grid(scale), svg.rect(0, 5, scale.x(value), _ROW - 10, "bar noise")]),
            f"<strong>{values.number(value, 1)}</strong>",
        )
        for name, value in figures.items()
    )
    return f'<div class="card">{drawn}{_axis(scale, "")}</div>'


def speedup_scale(methods: Mapping[str, Figures]) -> svg.Scale:
    """Return one scale for all categories, from zero to the highest interval."""
    everything = [part for figures in methods.values() for part in (figures, *(figures.get("categories") or {}).values())]
    found = [values.finite(part.get(key)) for part in everything for key in ("speedup", "speedup_high")]
    return svg.Scale(0, 1.04 * max([1.2, *(value for value in found if value is not None)]))


def speedup_bar(figures: Figures, scale: svg.Scale) -> str:
    """Draw a speed-up as a bar from zero, with its interval and a line at the baseline."""
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
    """Draw the speed-ups of all methods on one set of prompts."""
    drawn = "".join(
        _row(f"<code>{escape(name)}</code>", speedup_bar(figures, scale), values.speedup(figures))
        for name, figures in rows.items()
    )
    return (
        f'<section class="card"><h3>{escape(title)} <span class="muted">{note}</span></h3>{drawn}{_axis(scale, "×")}</section>'
    )


def time_parts(figures: Figures) -> dict[str, float] | None:
    """Return milliseconds per token by part, with the rest as "other"; None if unknown."""
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
    """Draw milliseconds per token, split into parts, one row per method."""
    known = {name: parts for name, figures in methods.items() if (parts := time_parts(figures))}
    if not known:
        return '<p class="muted">No method reports how its time was spent.</p>'
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


def figure(name: str, drawing: str, caption: str) -> str:
    """Frame a drawing, with its method as heading and a caption."""
    return f'<figure class="card"><h3><code>{escape(name)}</code></h3>{drawing}<figcaption>{caption}</figcaption></figure>'


def _y(fraction: float) -> float:
    return _BOTTOM - fraction * (_BOTTOM - _TOP)


def _x(index: int, count: int) -> float:
    """Return the middle of one of `count` equal columns."""
    return _LEFT + (_RIGHT - _LEFT) * (index + 0.5) / count


def _frame(top: float, columns: int, below: str) -> list[str]:
    """Draw the grid in per cent up to `top`, and the numbers of the columns from 1."""
    shapes = []
    for tick in svg.Scale(0, top).ticks(4):
        y = _y(tick / top)
        shapes += [svg.line(_LEFT, y, _RIGHT, y, "grid"), svg.text(_LEFT - 6, y + 4, f"{100 * tick:.0f} %", "end")]
    every = 1 + (columns - 1) // 12
    shapes += [svg.text(_x(i, columns), _BOTTOM + 15, str(1 + i)) for i in range(0, columns, every)]
    return [*shapes, svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 30, below, kind="axis-name")]


def _curve(points: Sequence[float | None], columns: int, kind: str) -> list[str]:
    """Draw straight lines between neighbouring known points."""
    places = [None if point is None else (_x(i, columns), _y(min(1.0, point))) for i, point in enumerate(points)]
    return [svg.line(*a, *b, kind) for a, b in pairwise(places) if a and b]


def acceptance_panels(methods: Mapping[str, Figures]) -> str:
    """Draw a panel per method: its acceptance at each depth, with the other methods in grey behind."""
    curves = {name: [values.finite(v) for v in figures.get("acceptance_by_depth") or []] for name, figures in methods.items()}
    curves = {name: curve for name, curve in curves.items() if curve}
    columns = max([1, *map(len, curves.values())])
    panels = []
    for name, curve in curves.items():
        shapes = _frame(1.0, columns, "depth in the draft")
        for other, points in curves.items():
            if other != name:
                shapes += _curve(points, columns, "behind")
        shapes += _curve(curve, columns, "curve")
        for i, point in enumerate(curve):
            if point is not None:
                shapes.append(svg.circle(_x(i, columns), _y(min(1.0, point)), 4, "dot"))
                if columns <= _LABELLED:
                    shapes.append(svg.text(_x(i, columns), _y(min(1.0, point)) - 8, f"{100 * point:.0f}", kind="figure-label"))
        description = ", ".join(f"depth {i}: {100 * p:.0f} %" for i, p in enumerate(curve, 1) if p is not None)
        overall = values.percent(methods[name].get("acceptance_rate"))
        drawing = svg.panel(_PANEL_WIDTH, _PANEL_HEIGHT, shapes, f"Acceptance by depth of {name}: {description}")
        panels.append(figure(name, drawing, f"{overall} over all depths"))
    return _panels(panels, [name for name in methods if name not in curves and name != BASELINE])


def _shares(figures: Figures) -> list[float]:
    """Return the shares of passes that yielded 1, 2, … tokens."""
    counts = {int(length): values.finite(count) or 0.0 for length, count in (figures.get("block_lengths") or {}).items()}
    total = sum(counts.values())
    return [counts.get(length, 0.0) / total for length in range(1, max(counts) + 1)] if total else []


def length_panels(methods: Mapping[str, Figures]) -> str:
    """Draw a histogram per method: how many tokens its passes yielded."""
    found = {name: shares for name, figures in methods.items() if name != BASELINE and (shares := _shares(figures))}
    columns = max([1, *map(len, found.values())])
    top = max([0.1, *(max(shares) for shares in found.values())]) * 1.08
    panels = []
    for name, shares in found.items():
        shapes = _frame(top, columns, "tokens per pass")
        width = 0.72 * (_RIGHT - _LEFT) / columns
        for i, share in enumerate(shares):
            if share > 0:
                y = _y(share / top)
                shapes.append(svg.rect(_x(i, columns) - width / 2, y, width, _BOTTOM - y, "column"))
                if columns <= _LABELLED:
                    written = f"{100 * share:.0f}" if share >= 0.005 else "<1"
                    shapes.append(svg.text(_x(i, columns), y - 4, written, kind="figure-label"))
        description = ", ".join(f"{i}: {100 * share:.1f} %" for i, share in enumerate(shares, 1) if share)
        passes = sum(methods[name]["block_lengths"].values())
        mean = values.number(methods[name].get("tokens_per_pass"))
        drawing = svg.panel(_PANEL_WIDTH, _PANEL_HEIGHT, shapes, f"Tokens per pass of {name}: {description}")
        panels.append(figure(name, drawing, f"{mean} tokens per pass, {passes:,.0f} passes"))
    return _panels(panels, [name for name in methods if name not in found and name != BASELINE])


def _panels(panels: Sequence[str], missing: Sequence[str]) -> str:
    return f'<div class="panels">{"".join(panels)}</div>{values.missing_note(missing)}'


@dataclass(frozen=True)
class Point:
    """One method in the plot of speed against tokens per pass; `number` is its row in the table of figures."""

    number: int
    method: str
    tokens_per_pass: float
    tokens_per_second: float

    def beaten_by(self, other: "Point") -> bool:
        """Whether another method is as good on both axes and better on one."""
        mine, theirs = (self.tokens_per_pass, self.tokens_per_second), (other.tokens_per_pass, other.tokens_per_second)
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


def points_of(methods: Mapping[str, Figures]) -> list[Point]:
    """Return the methods whose speed and tokens per pass are known."""
    found = []
    for index, (name, figures) in enumerate(methods.items(), 1):
        per_pass, speed = values.finite(figures.get("tokens_per_pass")), values.finite(figures.get("tokens_per_second"))
        if per_pass is not None and speed is not None:
            found.append(Point(index, name, per_pass, speed))
    return found


def _labels(points: list[Point], x: svg.Scale, y: svg.Scale) -> list[str]:
    """Draw each point's number on the side where it covers the fewest points and labels."""
    spots = [(x.fraction(p.tokens_per_pass) * _NOMINAL_WIDTH, _height(y, p.tokens_per_second)) for p in points]
    taken = list(spots)
    labels = []
    for point, (left, top) in zip(points, spots, strict=True):

        def crowd(offset: tuple[int, int, str], left: float = left, top: float = top) -> int:
            return sum(abs(left + 1.2 * offset[0] - a) < 14 and abs(top + offset[1] - 4 - b) < 13 for a, b in taken)

        dx, dy, anchor = min(_OFFSETS, key=crowd)
        taken.append((left + 1.2 * dx, top + dy - 4))
        labels.append(svg.text(x.x(point.tokens_per_pass), top + dy, str(point.number), anchor, "point-label", dx))
    return labels


def _height(y: svg.Scale, value: float) -> float:
    return _PLANE_HEAD + (1 - y.fraction(value)) * (_PLANE_HEIGHT - _PLANE_FOOT - _PLANE_HEAD)


def pareto_plot(methods: Mapping[str, Figures]) -> str:
    """Draw methods as points, filled if no other is as good on both axes, and the line on which drafting costs nothing."""
    points = points_of(methods)
    if not points:
        return '<p class="muted">No method reports both figures.</p>'
    x = svg.Scale(0.5, 1.1 * max(2.0, *(p.tokens_per_pass for p in points), 2.0))
    y = svg.Scale(0, 1.12 * max(1e-9, *(p.tokens_per_second for p in points), 1e-9))
    shapes, foot = [], _PLANE_HEIGHT - _PLANE_FOOT
    for tick in y.ticks():
        level = _height(y, tick)
        shapes.append(svg.line("0%", level, "100%", level, "grid"))
        shapes.append(svg.text("0%", level - 4, svg.tick_text(tick) + (" tokens/s" if tick == y.ticks()[-1] else ""), "start"))
    for tick in x.ticks():
        anchor = svg.end_anchor(x.fraction(tick))
        shapes += [
            svg.line(x.x(tick), foot, x.x(tick), foot + 5, "one"),
            svg.text(x.x(tick), foot + 18, svg.tick_text(tick), anchor),
        ]
    shapes.append(svg.text("50%", _PLANE_HEIGHT - 8, "tokens per target pass", kind="axis-name"))
    shapes += _free_line(methods, x, y)
    best = {p.number for p in points if not any(p.beaten_by(other) for other in points)}
    for p in points:
        kind = "point best" if p.number in best else "point"
        shapes.append(svg.circle(x.x(p.tokens_per_pass), _height(y, p.tokens_per_second), 6, kind))
    description = "; ".join(
        f"{p.method}: {p.tokens_per_pass:.2f} tokens per pass, {p.tokens_per_second:.1f} tokens/s" for p in points
    )
    drawing = svg.fluid(_PLANE_HEIGHT, [*shapes, *_labels(points, x, y)], f"Tokens/s against tokens per pass. {description}")
    rows = "".join(
        f'<li value="{p.number}"><code>{escape(p.method)}</code> <span class="muted">{p.tokens_per_pass:.2f} per pass, '
        f"{p.tokens_per_second:.1f}/s</span>{' <span class=badge>not beaten</span>' if p.number in best else ''}</li>"
        for p in points
    )
    drawn = {p.method for p in points}
    note = values.missing_note(name for name in methods if name not in drawn)
    return f'<div class="card pareto"><div>{drawing}</div><div><ol>{rows}</ol>{note}</div></div>'


def _free_line(methods: Mapping[str, Figures], x: svg.Scale, y: svg.Scale) -> list[str]:
    """Draw the line on which a pass costs as much as in plain decoding."""
    speed = values.finite(methods.get(BASELINE, {}).get("tokens_per_second"))
    if not speed:
        return []
    end = min(x.high, y.high / speed)
    return [svg.line(x.x(x.low), _height(y, speed * x.low), x.x(end), _height(y, speed * end), "free")]


def rows_of(tree: Topology) -> list[float]:
    """Return the row of each node: leaves in order, every other node in the middle of its children."""
    order, stack = [], [0]
    while stack:  # depth first, so that branches do not cross
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(tree.children[node]))
    rows, leaves = [0.0] * tree.num_nodes, 0
    for node in order:
        if not tree.children[node]:
            rows[node], leaves = float(leaves), leaves + 1
    for node in reversed(order):
        if children := tree.children[node]:
            rows[node] = (rows[children[0]] + rows[children[-1]]) / 2
    return rows


def tree_drawing(name: str, tree: Topology) -> str:
    """Draw one tree with the number of candidates above each level."""
    depths, rows = tree.depths, rows_of(tree)
    leaves, deepest = int(max(rows)) + 1, tree.depth
    gap = min(18.0, _TALLEST / leaves)
    radius = max(1.0, min(4.5, 0.38 * gap))
    height = _TREE_TOP + 2 * _TREE_MARGIN + gap * (leaves - 1)
    step = (_PANEL_WIDTH - 2 * _TREE_MARGIN) / max(1, deepest)

    def spot(node: int) -> tuple[float, float]:
        return _TREE_MARGIN + step * depths[node], _TREE_TOP + _TREE_MARGIN + gap * rows[node]

    counts = [len(level) for level in tree.levels[1:]]
    shapes = [svg.text(_TREE_MARGIN + step * level, 14, str(count), kind="tick") for level, count in enumerate(counts, 1)]
    shapes += [svg.line(*spot(tree.parents[node]), *spot(node), "branch") for node in range(1, tree.num_nodes)]
    shapes += [svg.circle(*spot(node), radius, "node") for node in range(1, tree.num_nodes)]
    shapes.append(svg.circle(*spot(0), max(radius, 4.5), "root"))
    candidates = tree.num_nodes - 1
    caption = (
        f"{candidates} candidate{'' if candidates == 1 else 's'}, {deepest} deep, {leaves} path{'' if leaves == 1 else 's'}"
    )
    drawing = svg.panel(_PANEL_WIDTH, height, shapes, f"Draft tree of {name}: {caption}; candidates per level: {counts}")
    return figure(name, drawing, caption)


def tree_panels(trees: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw all trees side by side."""
    drawn = [tree_drawing(name, Topology(tuple(tree["parents"]))) for name, tree in trees.items() if tree.get("parents")]
    return f'<div class="panels">{"".join(drawn)}</div>' if drawn else '<p class="muted">No method has a fixed tree.</p>'
