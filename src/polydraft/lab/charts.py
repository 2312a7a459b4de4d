"""Charts as SVG files: curves and columns over named categories, scatter plots, and lines over a numeric axis.

Figures with 95 % intervals (`Estimate`) get error bars. Styles are written as plain attributes, because not every renderer
reads style sheets.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, pairwise

from polydraft.lab import svg
from polydraft.lab.estimate import bounds
from polydraft.lab.svg import Box, escape

_INK, _MUTED, _LINE, _PAPER = "#15202b", "#4d5b6a", "#d3dae2", "#ffffff"
_COLOURS = ("#0b5cad", "#955800", "#1b7340", "#8a2d7d", "#b3261e", "#4d5b6a", "#00707a")
"""Colours of series, which also differ in dashes and filling."""
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "4 2", "12 4", "1 4")
_OPACITIES = (".85", ".55", ".35")

_LOOKS: dict[str, dict[str, str]] = {
    "tick": {"fill": _MUTED},
    "name": {"fill": _INK},
    "heading": {"fill": _INK, "font-weight": "600"},
    "paper": {"fill": _PAPER},
    "grid": {"stroke": _LINE},
    "base": {"stroke": _INK, "stroke-width": "1.5"},
    "error": {"stroke": _INK, "stroke-width": "1.2"},
    "curve": {"stroke-width": "1.8"},
    "best": {"stroke-width": "5", "stroke-opacity": ".35"},
    "thin": {"stroke-width": "1"},
}
for _number, (_colour, _dash) in enumerate(zip(_COLOURS, _DASHES, strict=True)):
    _LOOKS |= {
        f"kind-{_number}": {"stroke": _colour},
        f"dash-{_number}": {"stroke-dasharray": _dash},
        f"curve-{_number}": {"stroke": _colour, "stroke-width": "2.2", "stroke-dasharray": _dash},
        f"error-{_number}": {"stroke": _colour, "stroke-width": "1.2"},
        f"dot-{_number}": {"fill": _PAPER if _number % 2 else _colour, "stroke": _colour, "stroke-width": "2"},
        f"column-{_number}": {"fill": _colour, "fill-opacity": _OPACITIES[_number % len(_OPACITIES)]},
    }

_COLUMNS_SIDE_BY_SIDE = 3
_LEFT, _RIGHT = 58.0, 708.0
"""Ends of the plotting area, and of a legend above it."""
_ROW = 19.0
"""Height of a line of a legend."""
_CAP = 3.0
"""Half the length of the stroke at the end of an error bar."""
_DODGE = 5.0
"""Pixels between the points of two curves in one column, so that their error bars do not hide each other."""
_TURN, _SLOPE = -40.0, 0.64
"""Names that do not fit side by side are turned by this many degrees, and are then this much as high as they are long."""

Series = Mapping[str, Sequence[float | None]]
"""Figures by name, one per column; None if missing."""


@dataclass(frozen=True)
class Chart:
    """A chart of a reproduction."""

    file: str
    """Name of its file, beside the tables."""
    caption: str
    content: str
    """A whole SVG file."""


@dataclass(frozen=True)
class Curve:
    """The acceptance of a scheme, or the optimum of a way of drawing, over a numeric axis."""

    name: str
    kind: str
    """How drafts are drawn; curves of one kind share a colour."""
    points: Sequence[tuple[float, float]]
    """x and y; y may have an interval."""
    best: bool = False
    """Whether it is an optimum, which is drawn as a broad band behind the others."""


@dataclass(frozen=True)
class _Plane:
    """The plotting area of a chart: a linear scale in both directions, with margins for names."""

    across: svg.Scale
    up: svg.Scale
    width: float = 720.0
    height: float = 320.0
    left: float = _LEFT
    right: float = _RIGHT
    top: float = 44.0
    bottom: float = 252.0

    @classmethod
    def below(cls, names: Sequence[str], across: svg.Scale, up: svg.Scale, room: float = 0.0) -> "_Plane":
        """Return the area below a legend of these names; `room` adds space below the axis."""
        header = 30.0 + _ROW * len(_legend_rows(names))
        return cls(across, up, height=header + 260 + room, top=header, bottom=header + 208)

    def x(self, value: float) -> float:
        return self.left + self.across.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.up.fraction(value) * (self.bottom - self.top)

    def frame(self, names: Mapping[float, str], across: str, up: str, turn: float = 0.0) -> list[str]:
        """Draw the background, the grid, names below the axis, and the titles of both axes."""
        shapes = [svg.rect(0, 0, self.width, self.height, "paper")]
        for tick in self.up.ticks(4):
            y = self.y(tick)
            shapes += [
                svg.line(self.left, y, self.right, y, "grid"),
                svg.text(self.left - 8, y + 4, svg.tick_text(tick), "end"),
            ]
        anchor = "end" if turn else "middle"
        shapes += [svg.text(self.x(value), self.bottom + 17, name, anchor, "name", turn=turn) for value, name in names.items()]
        shapes.append(svg.line(self.left, self.bottom, self.right, self.bottom, "base"))
        middle = (self.left + self.right) / 2
        return [*shapes, svg.text(middle, self.height - 8, across), svg.text(8, 18, up, "start", "name")]

    def bar(self, x: float, value: float, kind: str) -> list[str]:
        """Draw a figure's interval, if it has one, as a vertical error bar."""
        ends = bounds(value)
        if ends is None or ends[0] == ends[1]:
            return []
        low, high = map(self.y, ends)
        return [
            svg.line(x, low, x, high, kind),
            *(svg.line(x - _CAP, end, x + _CAP, end, kind) for end in (low, high)),
        ]

    def file(self, shapes: Sequence[str], label: str) -> str:
        """Return a whole SVG file."""
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        font = 'font-family="DejaVu Sans, Verdana, Helvetica, sans-serif" font-size="12"'
        painted = re.sub(r'class="([^"]*)"', lambda match: f"{match[0]}{_attributes(match[1])}", "\n".join(shapes))
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">\n<title>{escape(label)}</title>\n'
        return f"{head}{painted}\n</svg>\n"


def curves(series: Series, columns: Sequence[str], *, across: str, up: str, base: float = 0.0) -> str:
    """Draw a curve per series that has figures, at most seven, over common columns; the vertical axis starts at `base`.

    `across` and `up` are the titles of the axes.
    """
    series = {name: values for name, values in series.items() if any(value is not None for value in values)}
    high = base + 1.12 * (_highest(series, least=base + 0.1) - base)
    plane = _Plane.below([*series], svg.Scale(-0.5, len(columns) - 0.5), svg.Scale(base, high))
    shapes = [*plane.frame(dict(enumerate(columns)), across, up), *_legend([*series], "curve")]
    for number, values in enumerate(series.values()):
        shift = _DODGE * (number - (len(series) - 1) / 2)
        known = [None if value is None else (plane.x(column) + shift, value) for column, value in enumerate(values)]
        places = [None if one is None else (one[0], plane.y(one[1])) for one in known]
        for one in filter(None, known):
            shapes += plane.bar(*one, f"error-{number}")
        shapes += [svg.line(*one, *other, f"curve-{number}") for one, other in pairwise(places) if one and other]
        shapes += [svg.circle(*place, 4, f"dot-{number}") for place in places if place]
    return plane.file(shapes, _alt_text(series, columns, up))


def grouped_columns(series: Series, groups: Mapping[str, Sequence[str]], *, base: float, across: str, up: str) -> str:
    """Draw a column per figure in named groups, with up to three series side by side; columns stand on `base`.

    Groups map a name, which may be empty, to the names of their columns; names that would collide are turned. Figures come in
    the order of the groups.
    """
    assert len(series) <= _COLUMNS_SIDE_BY_SIDE
    names = [name for group in groups.values() for name in group]
    longest = max(map(svg.text_width, names), default=0.0)
    step = (_RIGHT - _LEFT) / max(1, len(names))
    width = 0.8 * step / max(1, len(series))
    turned, upright = longest > step - 4, width < svg.text_width("0.00")
    room = (_SLOPE * longest if turned else 0.0) + 16
    highest = _highest(series, least=base)
    up_scale = svg.Scale(base, highest + (0.2 if upright else 0.12) * max(highest - base, 0.1))
    plane = _Plane.below([*series], svg.Scale(-0.5, len(names) - 0.5), up_scale, room)
    frame = plane.frame(dict(enumerate(names)), across, up, turn=_TURN if turned else 0.0)
    shapes = [*frame, *_legend([*series], "column")]
    for number, values in enumerate(series.values()):
        for column, value in enumerate(values):
            if value is not None:
                x, y = plane.x(column) - 0.4 * step + number * width, plane.y(value)
                shapes.append(svg.rect(x, y, width, plane.bottom - y, f"column-{number}"))
                shapes += plane.bar(x + width / 2, value, "error")
                over = plane.y((bounds(value) or (value, value))[1]) - 4
                if upright:
                    shapes.append(svg.text(x + width / 2 + 4, over, f"{value:.2f}", "start", turn=-90))
                else:
                    shapes.append(svg.text(x + width / 2, over, f"{value:.2f}"))
    start, below = 0, plane.bottom + 20 + room
    for name, group in groups.items():
        if name:
            shapes.append(svg.text(plane.x(start + (len(group) - 1) / 2), below, name, kind="name"))
        start += len(group)
        if start < len(names):
            shapes.append(svg.line(plane.x(start - 0.5), plane.top, plane.x(start - 0.5), below + 4, "grid"))
    return plane.file(shapes, _alt_text(series, names, up))


def scatter(groups: Mapping[str, Sequence[tuple[str, float, float]]], *, across: str, up: str) -> str:
    """Draw named points, `(name, x, y)`, in up to seven groups, each with its Pareto front.

    Larger is better on both axes. Pass costs as negative x: the axis then shows their absolute values, falling to the right.
    """
    groups = {name: group for name, group in groups.items() if group}
    points = [point for group in groups.values() for point in group]
    plane = _Plane.below([*groups], svg.Scale(*_ends([x for _, x, _ in points])), svg.Scale(*_ends([y for _, _, y in points])))
    falls = bool(points) and all(x <= 0 for _, x, _ in points)
    ticks = {tick: svg.tick_text(abs(tick) if falls else tick) for tick in plane.across.ticks(6)}
    shapes = [*plane.frame(ticks, across, up), *_legend([*groups], "curve")]
    taken = [Box.around(plane.x(x), plane.y(y), 6) for _, x, y in points]
    for number, group in enumerate(groups.values()):
        front = sorted((x, y) for _, x, y in group if not any(a >= x and b >= y and (a, b) != (x, y) for _, a, b in group))
        for one, other in pairwise((plane.x(x), plane.y(y)) for x, y in front):
            shapes.append(svg.line(*one, *other, f"curve-{number}"))
            taken += Box.along(*one, *other)
    for number, group in enumerate(groups.values()):
        for name, x, y in group:
            left, top = plane.x(x), plane.y(y)
            shapes += plane.bar(left, y, f"error-{number}")
            if ends := bounds(x):
                shapes.append(svg.line(plane.x(ends[0]), top, plane.x(ends[1]), top, f"error-{number}"))
            shapes += [svg.circle(left, top, 4.5, f"dot-{number}"), *_label(plane, name, left, top, taken)]
    texts = [f"{name}: {abs(x) if falls else x:.2f}, {y:.2f}" for name, x, y in points]
    return plane.file(shapes, f"{up} against {across}. {'; '.join(texts)}")


def _label(plane: _Plane, name: str, x: float, y: float, taken: list[Box]) -> list[str]:
    """Write a name beside its point, or where there is room, joined to the point by a line."""
    inside = Box(plane.left, plane.top - 14, plane.right + 4, plane.bottom)
    near = [(0, -9, "middle"), (0, 19, "middle"), (9, 4, "start"), (-9, 4, "end")]
    far = [
        (side * distance, rise, "start" if side > 0 else "end")
        for distance in (10, 22, 40, 64, 96, 128)
        for rise in (-14, 22, -28, 36, -42, 50, -56, 64, -70, 78)
        for side in (1, -1)
    ]
    for right, down, anchor in (*near, *far):
        box = Box.of_text(x + right, y + down, name, anchor)
        if inside.holds(box) and not any(box.meets(other) for other in taken):
            break
    else:
        right, down, anchor = near[0]
    taken.append(Box.of_text(x + right, y + down, name, anchor))
    leader = [svg.line(x, y, x + right, y + down - 4, "grid")] if abs(down) > 20 or abs(right) > 9 else []
    return [*leader, svg.text(x + right, y + down, name, anchor)]


def line_chart(curves: Sequence[Curve], *, across: str, up: str) -> str:
    """Draw curves over a common numeric axis, with a legend in the same order; figures are at most 1.

    Curves of one kind share a colour, differ by dashes, and must be adjacent.
    """
    points = [point for curve in curves for point in curve.points]
    columns = sorted({x for x, _ in points})
    first, last = (columns[0], columns[-1]) if columns else (0.0, 1.0)
    margin = 0.04 * (last - first) or 0.5
    heights = [y for _, y in points] or [0.0, 1.0]
    room = 0.06 * max(max(heights) - min(heights), 0.05)
    kinds = len({curve.kind for curve in curves})
    height = max(380.0, 48 + _ROW * (len(curves) + kinds + 1))
    plane = _Plane(
        svg.Scale(first - margin, last + margin),
        svg.Scale(max(0.0, min(heights) - room), min(1.0, max(heights) + room)),
        width=860.0,
        height=height,
        right=610.0,
        bottom=height - 56,
    )
    shapes = plane.frame({value: svg.tick_text(value) for value in columns}, across, up)
    legend, left, y = list[str](), plane.right + 30, plane.top
    for number, (kind, members) in enumerate(groupby(curves, key=lambda curve: curve.kind)):
        legend.append(svg.text(left, y + 4, kind, "start", "heading"))
        y += _ROW
        dashes, colour = cycle(range(len(_DASHES))), f"kind-{min(number, len(_COLOURS) - 1)}"
        # Draw bands first, so that curves lie on top of them.
        for curve in sorted(members, key=lambda curve: not curve.best):
            look = f"best {colour}" if curve.best else f"curve {colour} dash-{next(dashes)}"
            shapes += _strokes(plane, curve, look, f"thin {colour}")
            legend += [svg.line(left, y, left + 34, y, look), svg.text(left + 42, y + 4, curve.name, "start", "name")]
            y += _ROW
    texts = [f"{curve.name}: " + ", ".join(f"{x:g} {y:.3f}" for x, y in curve.points) for curve in curves]
    return plane.file([*shapes, *legend], f"{up} against {across}. {'; '.join(texts)}")


def _strokes(plane: _Plane, curve: Curve, look: str, error: str) -> list[str]:
    """Draw a curve with its error bars."""
    points = sorted(curve.points, key=lambda point: point[0])
    places = [(plane.x(x), plane.y(y)) for x, y in points]
    shapes = [svg.line(*one, *other, look) for one, other in pairwise(places)]
    if len(places) == 1:  # a single point becomes a short stroke
        ((x, y),) = places
        shapes.append(svg.line(x - 8, y, x + 8, y, look))
    return [*shapes, *(shape for x, y in points for shape in plane.bar(plane.x(x), y, error))]


def _ends(figures: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: some room around the figures, but not across 0 if they all lie on one side of it."""
    every = [end for figure in figures for end in (figure, *(bounds(figure) or ()))]
    low, high = min(every, default=0.0), max(every, default=1.0)
    room = 0.12 * (high - low) or 0.5
    return max(low - room, 0.0) if low >= 0 else low - room, min(high + room, 0.0) if high <= 0 else high + room


def _highest(series: Series, least: float) -> float:
    """Return the largest figure, error bars included, but at least `least`."""
    known = [value for values in series.values() for value in values if value is not None]
    return max([least, *known, *(ends[1] for ends in map(bounds, known) if ends)])


def _legend_rows(names: Sequence[str]) -> list[list[tuple[int, str, float]]]:
    """Return the rows of a legend: number, name and x of each series. A single series needs no legend."""
    rows: list[list[tuple[int, str, float]]] = []
    x = _RIGHT
    for number, name in enumerate(names if len(names) > 1 else ()):
        width = 50.0 + svg.text_width(name)
        if x + width > _RIGHT:
            rows.append([])
            x = _LEFT
        rows[-1].append((number, name, x))
        x += width
    return rows


def _legend(names: Sequence[str], kind: str) -> list[str]:
    assert len(names) <= len(_COLOURS)
    shapes: list[str] = []
    for row, entries in enumerate(_legend_rows(names)):
        y = 37 + _ROW * row
        for number, name, x in entries:
            mark = svg.rect(x, y - 6, 26, 12, f"{kind}-{number}")
            if kind == "curve":
                mark = svg.line(x, y, x + 26, y, f"curve-{number}") + "\n" + svg.circle(x + 13, y, 4, f"dot-{number}")
            shapes += [mark, svg.text(x + 32, y + 4, name, "start", "name")]
    return shapes


def _attributes(classes: str) -> str:
    """Return the attributes that a shape's classes stand for."""
    look = {key: value for name in classes.split() for key, value in _LOOKS[name].items()}
    return "".join(f' {key}="{value}"' for key, value in look.items())


def _alt_text(series: Series, names: Sequence[str], up: str) -> str:
    """Return all figures as text, for screen readers."""
    texts = [
        f"{name}: "
        + ", ".join(f"{column} {value:.2f}" for column, value in zip(names, values, strict=True) if value is not None)
        for name, values in series.items()
    ]
    return f"{up}. {'; '.join(texts)}"
