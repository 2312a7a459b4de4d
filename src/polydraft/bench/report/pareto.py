"""Speed against tokens a pass: what the drafts bring, and what drafting costs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polydraft import svg
from polydraft.bench.report import values
from polydraft.bench.schema import BASELINE
from polydraft.svg import escape

_HEIGHT, _FOOT, _HEAD = 380.0, 44.0, 26.0
_NOMINAL_WIDTH = 320.0  # labels are kept apart as on a phone; wider pages have more room
_OFFSETS = ((10, 4, "start"), (-10, 4, "end"), (0, -10, "middle"), (0, 19, "middle"), (10, -10, "start"), (10, 18, "start"))


@dataclass(frozen=True)
class Point:
    """One method in the plane; `number` is its row in the table of figures."""

    number: int
    method: str
    tokens_per_pass: float
    tokens_per_second: float

    def beaten_by(self, other: "Point") -> bool:
        """Whether another method is as good on both axes and better on one."""
        mine, theirs = (self.tokens_per_pass, self.tokens_per_second), (other.tokens_per_pass, other.tokens_per_second)
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


def points_of(methods: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """Methods of which both figures are known."""
    found = []
    for index, (name, figures) in enumerate(methods.items(), 1):
        per_pass, speed = values.finite(figures.get("tokens_per_pass")), values.finite(figures.get("tokens_per_second"))
        if per_pass is not None and speed is not None:
            found.append(Point(index, name, per_pass, speed))
    return found


def _labels(points: list[Point], x: svg.Scale, y: svg.Scale) -> list[str]:
    """Numbers beside their points, each at the first side where it covers nothing."""
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
    return _HEAD + (1 - y.fraction(value)) * (_HEIGHT - _FOOT - _HEAD)


def pareto_plot(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw every method; filled where no other is as good on both axes, a dashed line where drafting would cost nothing."""
    points = points_of(methods)
    if not points:
        return '<p class="muted">No method tells both figures.</p>'
    x = svg.Scale(0.5, 1.1 * max(2.0, *(p.tokens_per_pass for p in points), 2.0))
    y = svg.Scale(0, 1.12 * max(1e-9, *(p.tokens_per_second for p in points), 1e-9))
    shapes, foot = [], _HEIGHT - _FOOT
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
    shapes.append(svg.text("50%", _HEIGHT - 8, "tokens a target pass", kind="axis-name"))
    shapes += _free_line(methods, x, y)
    best = {p.number for p in points if not any(p.beaten_by(other) for other in points)}
    for p in points:
        kind = "point best" if p.number in best else "point"
        shapes.append(svg.circle(x.x(p.tokens_per_pass), _height(y, p.tokens_per_second), 6, kind))
    said = "; ".join(f"{p.method}: {p.tokens_per_pass:.2f} tokens a pass, {p.tokens_per_second:.1f} tokens/s" for p in points)
    drawing = svg.fluid(_HEIGHT, [*shapes, *_labels(points, x, y)], f"Tokens/s against tokens a pass. {said}")
    rows = "".join(
        f'<li value="{p.number}"><code>{escape(p.method)}</code> <span class="muted">{p.tokens_per_pass:.2f} a pass, '
        f"{p.tokens_per_second:.1f}/s</span>{' <span class=badge>not beaten</span>' if p.number in best else ''}</li>"
        for p in points
    )
    drawn = {p.method for p in points}
    note = values.missing_note(name for name in methods if name not in drawn)
    return f'<div class="card pareto"><div>{drawing}</div><div><ol>{rows}</ol>{note}</div></div>'


def _free_line(methods: Mapping[str, Mapping[str, Any]], x: svg.Scale, y: svg.Scale) -> list[str]:
    """Where a method would lie if its passes cost what plain decoding's do."""
    speed = values.finite(methods.get(BASELINE, {}).get("tokens_per_second"))
    if not speed:
        return []
    end = min(x.high, y.high / speed)
    return [svg.line(x.x(x.low), _height(y, speed * x.low), x.x(end), _height(y, speed * end), "free")]
