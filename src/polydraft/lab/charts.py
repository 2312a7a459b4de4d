"""Charts as SVG files of their own: curves and columns over named places, points in a plane, lines over numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, pairwise

from polydraft.lab import svg
from polydraft.lab.svg import escape

# A file has no page around it to take colours from; series differ by dashes and filling too.
_STYLE = """
svg { --ink: #15202b; --muted: #4d5b6a; --line: #d3dae2; --one: #0b5cad; --two: #955800; --three: #1b7340; --four: #8a2d7d;
  --five: #b3261e; --six: #4d5b6a; --paper: #ffffff; font-family: system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e7ecf1; --muted: #a5b2bf; --line: #303b47; --one: #6bb0f5; --two: #f0b35e; --three: #69d28f; --four: #e08fd4;
    --five: #ff8a80; --six: #a5b2bf; --paper: #0e1318; } }
text { font-size: 12px; fill: var(--muted); } .name { fill: var(--ink); } .paper { fill: var(--paper); }
.grid { stroke: var(--line); } .base { stroke: var(--ink); stroke-width: 1.5; }
.curve-0 { stroke: var(--one); stroke-width: 2.5; } .dot-0 { fill: var(--one); }
.column-0 { fill: var(--one); fill-opacity: .85; }
.curve-1 { stroke: var(--two); stroke-width: 2.5; stroke-dasharray: 7 5; }
.dot-1 { fill: var(--paper); stroke: var(--two); stroke-width: 2.5; } .column-1 { fill: var(--two); fill-opacity: .6; }
.curve-2 { stroke: var(--three); stroke-width: 2.5; stroke-dasharray: 2 3; } .dot-2 { fill: var(--three); }
.curve-3 { stroke: var(--four); stroke-width: 2.5; stroke-dasharray: 12 4; }
.dot-3 { fill: var(--paper); stroke: var(--four); stroke-width: 2.5; }
.curve-4 { stroke: var(--five); stroke-width: 2; stroke-dasharray: 10 3 2 3; } .dot-4 { fill: var(--five); }
.curve-5 { stroke: var(--six); stroke-width: 2; stroke-dasharray: 4 2; }
.dot-5 { fill: var(--paper); stroke: var(--six); stroke-width: 2; }
"""
_SERIES, _COLUMNS_SIDE_BY_SIDE = 6, 2
_LINE_STYLE = """
.heading { fill: var(--ink); font-weight: 600; } .curve { stroke-width: 1.8; } .best { stroke-width: 5; stroke-opacity: .35; }
.error { stroke-width: 1; }
"""
_COLOURS = ("one", "two", "three", "four", "five", "six")
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "4 2", "12 4")
_ROW = 19.0
"""Height of a line of the legend beside lines."""

Series = Mapping[str, Sequence[float | None]]
"""Name to figures, one for each column; None where there is none."""


@dataclass(frozen=True)
class Drawing:
    """One picture of a reproduction."""

    file: str
    """Name of its file, beside the tables."""
    caption: str
    content: str
    """A whole SVG file."""


@dataclass(frozen=True)
class Point:
    """One figure of a curve."""

    x: float
    y: float
    error: float | None = None
    """Half of the bar across it."""


@dataclass(frozen=True)
class Curve:
    """A scheme, or the optimum of a way of drawing, as something else varies."""

    name: str
    kind: str
    """How drafts are drawn; curves of one kind share a colour."""
    points: Sequence[Point]
    best: bool = False
    """An optimum, drawn as a broad band behind the others."""


@dataclass(frozen=True)
class _Plane:
    """Straight scales both ways inside a drawing, with room for names around them."""

    across: svg.Scale
    up: svg.Scale
    width: float = 720.0
    height: float = 320.0
    left: float = 58.0
    right: float = 708.0
    top: float = 44.0
    bottom: float = 252.0

    @classmethod
    def of_columns(cls, count: int, up: svg.Scale) -> "_Plane":
        """Make one of equal columns, numbered from 0."""
        return cls(svg.Scale(-0.5, count - 0.5), up)

    def x(self, value: float) -> float:
        return self.left + self.across.fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - self.up.fraction(value) * (self.bottom - self.top)

    def frame(self, names: Mapping[float, str], across: str, up: str) -> list[str]:
        """Draw the paper, the grid, names below places of the axis, and what the two directions mean."""
        shapes = [svg.rect(0, 0, self.width, self.height, "paper")]
        for tick in self.up.ticks(4):
            y = self.y(tick)
            shapes += [
                svg.line(self.left, y, self.right, y, "grid"),
                svg.text(self.left - 8, y + 4, svg.tick_text(tick), "end"),
            ]
        shapes += [svg.text(self.x(value), self.bottom + 17, name, kind="name") for value, name in names.items()]
        shapes.append(svg.line(self.left, self.bottom, self.right, self.bottom, "base"))
        middle = (self.left + self.right) / 2
        return [*shapes, svg.text(middle, self.height - 8, across), svg.text(8, 18, up, "start", "name")]

    def file(self, shapes: Sequence[str], label: str, style: str = "") -> str:
        """Return a whole SVG file."""
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
            f"<title>{escape(label)}</title>\n<style>{_STYLE}{style}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
        )


def curves(series: Series, columns: Sequence[str], *, across: str, up: str, base: float = 0.0) -> str:
    """Draw one curve per series over common columns, from `base` upwards.

    Parameters
    ----------
    series : mapping of str to sequence of float or None
        Six at most.
    columns : sequence of str
        What is written below each figure.
    across, up : str
        What the two directions mean.
    base : float
        Below all figures.
    """
    plane = _Plane.of_columns(len(columns), svg.Scale(base, base + 1.12 * (_highest(series, least=base + 0.1) - base)))
    shapes = [*plane.frame(dict(enumerate(columns)), across, up), *_legend(series, "curve", plane.right)]
    for number, values in enumerate(series.values()):
        places = [None if value is None else (plane.x(column), plane.y(value)) for column, value in enumerate(values)]
        shapes += [svg.line(*one, *other, f"curve-{number}") for one, other in pairwise(places) if one and other]
        shapes += [svg.circle(*place, 4.5, f"dot-{number}") for place in places if place]
    return plane.file(shapes, _spoken(series, columns, up))


def grouped_columns(series: Series, groups: Mapping[str, Sequence[str]], *, base: float, across: str, up: str) -> str:
    """Draw one column per figure, standing on `base`, in named groups.

    Parameters
    ----------
    series : mapping of str to sequence of float or None
        Two at most; their columns stand side by side. Figures follow the groups' order.
    groups : mapping of str to sequence of str
        Name of a group to the names of its columns.
    base : float
        The figure that means "nothing gained".
    across, up : str
        What the two directions mean.
    """
    assert len(series) <= _COLUMNS_SIDE_BY_SIDE
    names = [name for group in groups.values() for name in group]
    highest = _highest(series, least=base)
    plane = _Plane.of_columns(len(names), svg.Scale(base, highest + 0.12 * max(highest - base, 0.1)))
    shapes = [*plane.frame(dict(enumerate(names)), across, up), *_legend(series, "column", plane.right)]
    step = (plane.right - plane.left) / len(names)
    width = 0.8 * step / max(1, len(series))
    for number, values in enumerate(series.values()):
        for column, value in enumerate(values):
            if value is not None:
                x, y = plane.x(column) - 0.4 * step + number * width, plane.y(value)
                shapes.append(svg.rect(x, y, width, plane.bottom - y, f"column-{number}"))
                shapes.append(svg.text(x + width / 2, y - 4, f"{value:.2f}"))
    start = 0
    for name, group in groups.items():
        shapes.append(svg.text(plane.x(start + (len(group) - 1) / 2), plane.bottom + 36, name, kind="name"))
        start += len(group)
        if start < len(names):
            shapes.append(svg.line(plane.x(start - 0.5), plane.top, plane.x(start - 0.5), plane.bottom + 40, "grid"))
    return plane.file(shapes, _spoken(series, names, up))


def scatter(groups: Mapping[str, Sequence[tuple[str, float, float]]], *, across: str, up: str) -> str:
    """Draw named points in a plane, with the front of each group: its points that no other of it beats both ways.

    Parameters
    ----------
    groups : mapping of str to sequence of (name, x, y)
        Six at most; larger is better in both directions.
    across, up : str
        What the two directions mean.
    """
    points = [point for group in groups.values() for point in group]
    plane = _Plane(svg.Scale(*_ends([x for _, x, _ in points])), svg.Scale(*_ends([y for _, _, y in points])))
    ticks = {tick: svg.tick_text(tick) for tick in plane.across.ticks(6)}
    shapes = [*plane.frame(ticks, across, up), *_legend(groups, "curve", plane.right)]
    for number, group in enumerate(groups.values()):
        front = sorted((x, y) for _, x, y in group if not any(a >= x and b >= y and (a, b) != (x, y) for _, a, b in group))
        places = [(plane.x(x), plane.y(y)) for x, y in front]
        shapes += [svg.line(*one, *other, f"curve-{number}") for one, other in pairwise(places)]
        for name, x, y in group:
            left, top = plane.x(x), plane.y(y)
            shapes += [svg.circle(left, top, 4.5, f"dot-{number}"), svg.text(left, top - 8, name)]
    told = [f"{name}: {x:.2f}, {y:.2f}" for name, x, y in points]
    return plane.file(shapes, f"{up} against {across}. {'; '.join(told)}")


def line_chart(curves: Sequence[Curve], *, across: str, up: str) -> str:
    """Draw curves over a common axis of numbers, their names beside them; colour tells kinds apart, dashes members of a kind.

    Parameters
    ----------
    curves : sequence of Curve
        Curves of one kind stand together; the order is that of the legend.
    across, up : str
        What the two directions mean; figures above are at most 1.

    Returns
    -------
    str
        A whole SVG file.
    """
    points = [point for curve in curves for point in curve.points]
    columns = sorted({point.x for point in points})
    first, last = (columns[0], columns[-1]) if columns else (0.0, 1.0)
    margin = 0.04 * (last - first) or 0.5
    heights = [point.y for point in points] or [0.0, 1.0]
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
        # Bands first, for the curves to lie upon.
        for curve in sorted(members, key=lambda curve: not curve.best):
            look = f"best {colour}" if curve.best else f"curve {colour} dash-{next(dashes)}"
            shapes += _strokes(plane, curve, look, f"error {colour}")
            legend += [svg.line(left, y, left + 34, y, look), svg.text(left + 42, y + 4, curve.name, "start", "name")]
            y += _ROW
    styles = [f".kind-{number} {{ stroke: var(--{colour}); }}" for number, colour in enumerate(_COLOURS)]
    styles += [f".dash-{number} {{ stroke-dasharray: {dash}; }}" for number, dash in enumerate(_DASHES)]
    told = [f"{curve.name}: " + ", ".join(f"{point.x:g} {point.y:.3f}" for point in curve.points) for curve in curves]
    label = f"{up} against {across}. {'; '.join(told)}"
    return plane.file([*shapes, *legend], label, f"{_LINE_STYLE}{' '.join(styles)}\n")


def _strokes(plane: _Plane, curve: Curve, look: str, error: str) -> list[str]:
    """Draw one curve, and a bar across each figure that has an error."""
    points = sorted(curve.points, key=lambda point: point.x)
    places = [(plane.x(point.x), plane.y(point.y)) for point in points]
    shapes = [svg.line(*one, *other, look) for one, other in pairwise(places)]
    if len(places) == 1:  # a lone figure is a short stroke
        ((x, y),) = places
        shapes.append(svg.line(x - 8, y, x + 8, y, look))
    for point, (x, _) in zip(points, places, strict=True):
        if point.error:
            shapes.append(svg.line(x, plane.y(point.y - point.error), x, plane.y(point.y + point.error), error))
    return shapes


def _ends(figures: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis, with some room around the figures."""
    low, high = min(figures, default=0.0), max(figures, default=1.0)
    room = 0.12 * (high - low) or 0.5
    return low - room, high + room


def _highest(series: Series, least: float) -> float:
    return max([least, *(value for values in series.values() for value in values if value is not None)])


def _legend(series: Mapping[str, object], kind: str, right: float) -> list[str]:
    assert len(series) <= _SERIES
    shapes: list[str] = []
    widths = [52.0 + 6.5 * len(name) for name in series]
    x = right - sum(widths)
    for number, name in enumerate(series):
        mark = (
            svg.rect(x, 8, 26, 12, f"column-{number}") if kind == "column" else svg.line(x, 14, x + 26, 14, f"curve-{number}")
        )
        shapes += [mark, svg.text(x + 32, 18, name, "start", "name")]
        if kind == "curve":
            shapes.append(svg.circle(x + 13, 14, 4.5, f"dot-{number}"))
        x += widths[number]
    return shapes


def _spoken(series: Series, names: Sequence[str], up: str) -> str:
    """Say the figures, for readers who hear the picture."""
    told = [
        f"{name}: "
        + ", ".join(f"{column} {value:.2f}" for column, value in zip(names, values, strict=True) if value is not None)
        for name, values in series.items()
    ]
    return f"{up}. {'; '.join(told)}"
