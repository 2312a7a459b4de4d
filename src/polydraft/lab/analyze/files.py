"""The table as files: CSV, and as figures 1 and 2 of the paper, acceptance as the temperature or the number of drafts varies.

In a figure colour says how drafts are drawn, and dashes tell schemes apart.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, groupby, pairwise
from pathlib import Path

from polydraft.errors import UsageError
from polydraft.lab import svg
from polydraft.lab.analyze.comparison import Row
from polydraft.lab.svg import escape
from polydraft.output import write_text

_REMEDY = "free some space or choose another --out, and run again"
_WIDTH, _LEFT, _RIGHT, _TOP = 860.0, 56.0, 610.0, 40.0
_LEGEND, _LINE = 640.0, 19.0
_LEAST_HEIGHT = 380.0
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "4 2", "12 4")
# A file has no page around it to take colours from.
_STYLE = """
svg { --ink: #15202b; --muted: #4d5b6a; --line: #d3dae2; --paper: #ffffff;
  --kind-0: #0b5cad; --kind-1: #955800; --kind-2: #1b7340; --kind-3: #8a2d7d; --kind-4: #b3261e; --kind-5: #4d5b6a;
  font-family: system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ink: #e7ecf1; --muted: #a5b2bf; --line: #303b47; --paper: #0e1318;
  --kind-0: #6bb0f5; --kind-1: #f0b35e; --kind-2: #69d28f; --kind-3: #e08fd4; --kind-4: #ff8a80; --kind-5: #a5b2bf; } }
text { font-size: 12px; fill: var(--muted); } .name { fill: var(--ink); } .heading { fill: var(--ink); font-weight: 600; }
.paper { fill: var(--paper); } .grid { stroke: var(--line); } .base { stroke: var(--ink); stroke-width: 1.5; }
.curve { stroke-width: 1.8; } .best { stroke-width: 5; stroke-opacity: .35; } .error { stroke-width: 1; }
"""


class Sweep(StrEnum):
    """What varies along a figure's axis."""

    TEMPERATURE = "temperature"
    DRAFTS = "drafts"

    @property
    def across(self) -> str:
        """What is written below the axis."""
        return {"temperature": "temperature T", "drafts": "drafts n"}[self]

    def place(self, row: Row) -> float:
        """Where a row stands on the axis."""
        return row.temperature if self is Sweep.TEMPERATURE else row.drafts

    def other(self, row: Row) -> str:
        """Name of what stays the same in a figure, as it stands in the name of the file."""
        return f"drafts-{row.drafts}" if self is Sweep.TEMPERATURE else f"temperature-{row.temperature:g}"


def write_files(rows: Sequence[Row], out: Path, sweep: Sweep | None, *, paper_bound: bool) -> list[Path]:
    """Write the rows as CSV and, of a sweep, the figures; return what was written."""
    name = "table.csv" if sweep is None else f"sweep-{sweep}.csv"
    contents = {name: to_csv(rows, paper_bound=paper_bound), **({} if sweep is None else figures(sweep, rows))}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error.strerror}); choose another --out") from None
    for file, content in contents.items():
        write_text(out / file, content, remedy=_REMEDY)
    return [out / file for file in contents]


def to_csv(rows: Sequence[Row], *, paper_bound: bool) -> str:
    """Write one line per row, empty where there is no figure."""
    records = [row.as_dict(paper_bound=paper_bound) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else ["scheme"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def figures(sweep: Sweep, rows: Sequence[Row]) -> dict[str, str]:
    """Draw one figure for each value of what does not vary.

    Returns
    -------
    dict
        Name of a file to its content.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(sweep.other(row), []).append(row)
    return {
        f"sweep-{sweep}-{name}.svg": chart(
            curves(sweep, group), across=sweep.across, up=f"acceptance rate α, {name.replace('-', ' ')}"
        )
        for name, group in groups.items()
    }


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


def curves(sweep: Sweep, rows: Sequence[Row]) -> list[Curve]:
    """Return a curve for each scheme and for each optimum, those of one drawing together."""
    kinds: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        kinds.setdefault(row.drawing or "other", {}).setdefault(row.scheme, []).append(row)
    result = []
    for kind, schemes in kinds.items():
        best = {sweep.place(row): row.optimum for group in schemes.values() for row in group if row.optimum is not None}
        if best:
            result.append(Curve(f"α* {kind}", kind, [Point(x, y) for x, y in sorted(best.items())], best=True))
        result += [
            Curve(name, kind, [Point(sweep.place(row), row.acceptance, row.standard_error) for row in group])
            for name, group in schemes.items()
        ]
    return result


def chart(curves: Sequence[Curve], *, across: str, up: str, most: float = 1.0, names: Mapping[float, str] | None = None) -> str:
    """Draw curves over a common axis, their names beside them.

    Parameters
    ----------
    curves : sequence of Curve
        Curves of one kind stand together; the order is that of the legend.
    across, up : str
        What the two directions mean.
    most : float
        The largest figure that can be.
    names : mapping, optional
        What is written below a place of the axis, if not its number.

    Returns
    -------
    str
        A whole SVG file.
    """
    kinds = list(dict.fromkeys(curve.kind for curve in curves))
    height = max(_LEAST_HEIGHT, _TOP + _LINE * (len(curves) + len(kinds) + 1) + 8)
    plane = _Plane(curves, height - 56, most, names or {})
    shapes = [svg.rect(0, 0, _WIDTH, height, "paper"), *plane.frame(across, up, height)]
    styles = [f".kind-{number} {{ stroke: var(--kind-{number}); }}" for number in range(6)]
    styles += [f".dash-{number} {{ stroke-dasharray: {dash}; }}" for number, dash in enumerate(_DASHES)]
    legend, y = [], _TOP + 4.0
    for number, (kind, members) in enumerate(groupby(curves, key=lambda curve: curve.kind)):
        legend.append(svg.text(_LEGEND, y + 4, kind, "start", "heading"))
        y += _LINE
        dashes, colour = cycle(range(len(_DASHES))), f"kind-{min(number, 5)}"
        # Bands first, for the curves to lie upon.
        for curve in sorted(members, key=lambda curve: not curve.best):
            look = f"best {colour}" if curve.best else f"curve {colour} dash-{next(dashes)}"
            shapes += plane.curve(curve, look, f"error {colour}")
            legend += [svg.line(_LEGEND, y, _LEGEND + 34, y, look), svg.text(_LEGEND + 42, y + 4, curve.name, "start", "name")]
            y += _LINE
    size = f'width="{_WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {_WIDTH:.0f} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(_spoken(curves, across, up))}</title>\n'
        f"<style>{_STYLE}{' '.join(styles)}\n</style>\n" + "\n".join([*shapes, *legend]) + "\n</svg>\n"
    )


class _Plane:
    """Straight scales both ways, around the figures that there are."""

    def __init__(self, curves: Sequence[Curve], bottom: float, most: float, names: Mapping[float, str]) -> None:
        points = [point for curve in curves for point in curve.points]
        self._bottom, self._names = bottom, names
        self._columns = sorted({point.x for point in points})
        heights = [point.y for point in points] or [0.0, 1.0]
        room = 0.06 * max(max(heights) - min(heights), 0.05)
        self._up = svg.Scale(max(0.0, min(heights) - room), min(most, max(heights) + room))
        ends = (self._columns[0], self._columns[-1]) if self._columns else (0.0, 1.0)
        margin = 0.04 * (ends[1] - ends[0]) or 0.5
        self._across = svg.Scale(ends[0] - margin, ends[1] + margin)

    def x(self, value: float) -> float:
        return _LEFT + self._across.fraction(value) * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        return self._bottom - self._up.fraction(value) * (self._bottom - _TOP)

    def frame(self, across: str, up: str, height: float) -> list[str]:
        shapes = []
        for tick in self._up.ticks(5):
            y = self.y(tick)
            shapes += [svg.line(_LEFT, y, _RIGHT, y, "grid"), svg.text(_LEFT - 8, y + 4, svg.tick_text(tick), "end")]
        for value in self._columns:
            shapes.append(svg.text(self.x(value), self._bottom + 18, self._names.get(value, svg.tick_text(value)), kind="name"))
        shapes.append(svg.line(_LEFT, self._bottom, _RIGHT, self._bottom, "base"))
        return [*shapes, svg.text((_LEFT + _RIGHT) / 2, height - 14, across), svg.text(8, 20, up, "start", "name")]

    def curve(self, curve: Curve, look: str, error: str) -> list[str]:
        points = sorted(curve.points, key=lambda point: point.x)
        places = [(self.x(point.x), self.y(point.y)) for point in points]
        shapes = [svg.line(*one, *other, look) for one, other in pairwise(places)]
        if len(places) == 1:  # a lone figure is a short stroke
            (x, y) = places[0]
            shapes.append(svg.line(x - 8, y, x + 8, y, look))
        for point, (x, _) in zip(points, places, strict=True):
            if point.error:
                shapes.append(svg.line(x, self.y(point.y - point.error), x, self.y(point.y + point.error), error))
        return shapes


def _spoken(curves: Sequence[Curve], across: str, up: str) -> str:
    """Say the figures, for readers who hear the picture."""
    told = [f"{curve.name}: " + ", ".join(f"{point.x:g} {point.y:.3f}" for point in curve.points) for curve in curves]
    return f"{up} against {across}. {'; '.join(told)}"
