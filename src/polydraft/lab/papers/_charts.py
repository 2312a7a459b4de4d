"""Charts of a paper's figures as SVG files that stand beside its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from polydraft.lab import svg
from polydraft.lab.svg import escape

_WIDTH, _HEIGHT = 720.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 708.0, 44.0, 252.0
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
class _Plane:
    """Equal columns sideways, a straight scale upwards."""

    columns: int
    scale: svg.Scale

    def x(self, column: float) -> float:
        """Middle of a column; halves lie between two."""
        return _LEFT + (_RIGHT - _LEFT) * (column + 0.5) / self.columns

    def y(self, value: float) -> float:
        return _BOTTOM - self.scale.fraction(value) * (_BOTTOM - _TOP)

    @property
    def step(self) -> float:
        """Width of a column."""
        return (_RIGHT - _LEFT) / self.columns

    def frame(self, names: Sequence[str], across: str, up: str) -> list[str]:
        shapes = [svg.rect(0, 0, _WIDTH, _HEIGHT, "paper")]
        for tick in self.scale.ticks(4):
            y = self.y(tick)
            shapes += [svg.line(_LEFT, y, _RIGHT, y, "grid"), svg.text(_LEFT - 8, y + 4, svg.tick_text(tick), "end")]
        shapes += [svg.text(self.x(column), _BOTTOM + 17, name, kind="name") for column, name in enumerate(names)]
        shapes.append(svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "base"))
        return [*shapes, svg.text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, across), svg.text(8, 18, up, "start", "name")]


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
    plane = _Plane(len(columns), svg.Scale(base, base + 1.12 * (_highest(series, least=base + 0.1) - base)))
    shapes = [*plane.frame(columns, across, up), *_legend(series, "curve")]
    for number, values in enumerate(series.values()):
        places = [None if value is None else (plane.x(column), plane.y(value)) for column, value in enumerate(values)]
        shapes += [svg.line(*one, *other, f"curve-{number}") for one, other in pairwise(places) if one and other]
        shapes += [svg.circle(*place, 4.5, f"dot-{number}") for place in places if place]
    return _file(shapes, _spoken(series, columns, up))


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
    plane = _Plane(len(names), svg.Scale(base, highest + 0.12 * max(highest - base, 0.1)))
    shapes = [*plane.frame(names, across, up), *_legend(series, "column")]
    width = 0.8 * plane.step / max(1, len(series))
    for number, values in enumerate(series.values()):
        for column, value in enumerate(values):
            if value is not None:
                x, y = plane.x(column) - 0.4 * plane.step + number * width, plane.y(value)
                shapes.append(svg.rect(x, y, width, _BOTTOM - y, f"column-{number}"))
                shapes.append(svg.text(x + width / 2, y - 4, f"{value:.2f}"))
    start = 0
    for name, group in groups.items():
        shapes.append(svg.text(plane.x(start + (len(group) - 1) / 2), _BOTTOM + 36, name, kind="name"))
        start += len(group)
        if start < len(names):
            shapes.append(svg.line(plane.x(start - 0.5), _TOP, plane.x(start - 0.5), _BOTTOM + 40, "grid"))
    return _file(shapes, _spoken(series, names, up))


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
    low_x, high_x, low_y, high_y = _ends([x for _, x, _ in points]) + _ends([y for _, _, y in points])
    wide, high = svg.Scale(low_x, high_x), svg.Scale(low_y, high_y)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide.fraction(x) * (_RIGHT - _LEFT), _BOTTOM - high.fraction(y) * (_BOTTOM - _TOP)

    shapes = [svg.rect(0, 0, _WIDTH, _HEIGHT, "paper"), *_legend(groups, "curve")]
    for tick in high.ticks(4):
        y = place(low_x, tick)[1]
        shapes += [svg.line(_LEFT, y, _RIGHT, y, "grid"), svg.text(_LEFT - 8, y + 4, svg.tick_text(tick), "end")]
    for tick in wide.ticks(6):
        shapes.append(svg.text(place(tick, low_y)[0], _BOTTOM + 17, svg.tick_text(tick), kind="name"))
    shapes.append(svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "base"))
    shapes += [svg.text((_LEFT + _RIGHT) / 2, _HEIGHT - 8, across), svg.text(8, 18, up, "start", "name")]
    for number, group in enumerate(groups.values()):
        front = sorted((x, y) for _, x, y in group if not any(a >= x and b >= y and (a, b) != (x, y) for _, a, b in group))
        shapes += [svg.line(*place(*one), *place(*other), f"curve-{number}") for one, other in pairwise(front)]
        for name, x, y in group:
            left, top = place(x, y)
            shapes += [svg.circle(left, top, 4.5, f"dot-{number}"), svg.text(left, top - 8, name)]
    told = [f"{name}: {x:.2f}, {y:.2f}" for name, x, y in points]
    return _file(shapes, f"{up} against {across}. {'; '.join(told)}")


def _ends(figures: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis, with some room around the figures."""
    low, high = min(figures, default=0.0), max(figures, default=1.0)
    room = 0.12 * (high - low) or 0.5
    return low - room, high + room


def _highest(series: Series, least: float) -> float:
    return max([least, *(value for values in series.values() for value in values if value is not None)])


def _legend(series: Mapping[str, object], kind: str) -> list[str]:
    assert len(series) <= _SERIES
    shapes: list[str] = []
    widths = [52.0 + 6.5 * len(name) for name in series]
    x = _RIGHT - sum(widths)
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


def _file(shapes: Sequence[str], label: str) -> str:
    size = f'width="{_WIDTH:.0f}" height="{_HEIGHT:.0f}" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>{escape(label)}</title>\n<style>{_STYLE}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )
