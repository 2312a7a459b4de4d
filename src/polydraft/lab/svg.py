"""The SVG shapes that charts are made of, and the ticks of an axis.

Two kinds of drawing keep text legible at every width. *Fluid* drawings have x in per cent of the page's width and y in pixels,
so that nothing is scaled. *Panels* have a fixed viewBox about as wide as a phone, and stand side by side if there is room.
"""

import html
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

Place = float | str
"""A coordinate: a number of units, or a percentage of the width."""


def escape(text: object) -> str:
    """Make any text safe inside an element or a quoted attribute, and control characters visible."""
    return html.escape(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text)), quote=True)


def place(value: Place) -> str:
    """Write a coordinate without trailing zeros."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def line(x1: Place, y1: Place, x2: Place, y2: Place, kind: str) -> str:
    """Draw a straight line of a CSS class."""
    return f'<line class="{kind}" x1="{place(x1)}" y1="{place(y1)}" x2="{place(x2)}" y2="{place(y2)}"/>'


def rect(x: Place, y: Place, width: Place, height: Place, kind: str) -> str:
    """Draw a filled rectangle of a CSS class."""
    return f'<rect class="{kind}" x="{place(x)}" y="{place(y)}" width="{place(width)}" height="{place(height)}"/>'


def circle(x: Place, y: Place, radius: float, kind: str) -> str:
    """Draw a disc of a CSS class."""
    return f'<circle class="{kind}" cx="{place(x)}" cy="{place(y)}" r="{place(radius)}"/>'


def text(x: Place, y: Place, words: str, anchor: str = "middle", kind: str = "tick", shift: float = 0, turn: float = 0) -> str:
    """Write words; `shift` moves them sideways by pixels (for x in per cent), `turn` rotates them around (x, y) by degrees."""
    moved = f' dx="{place(shift)}"' if shift else ""
    moved += f' transform="rotate({place(turn)} {place(x)} {place(y)})"' if turn else ""
    return f'<text class="{kind}" x="{place(x)}" y="{place(y)}"{moved} text-anchor="{anchor}">{escape(words)}</text>'


def text_width(words: str) -> float:
    """Return the approximate width of words in pixels, at font size 12."""
    return 7.0 * len(words)


@dataclass(frozen=True)
class Box:
    """A rectangle, to find labels that collide."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def around(cls, x: float, y: float, reach: float) -> "Box":
        """Return the square around a point."""
        return cls(x - reach, y - reach, x + reach, y + reach)

    @classmethod
    def along(cls, x1: float, y1: float, x2: float, y2: float) -> "list[Box]":
        """Cover a line with small squares."""
        steps = max(1, math.ceil(math.hypot(x2 - x1, y2 - y1) / 4))
        shares = [step / steps for step in range(steps + 1)]
        return [cls.around(x1 + share * (x2 - x1), y1 + share * (y2 - y1), 2) for share in shares]

    @classmethod
    def of_text(cls, x: float, y: float, words: str, anchor: str) -> "Box":
        """Return the rectangle that words take up at font size 12."""
        width = text_width(words)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        return cls(left, y - 10, left + width, y + 3)

    def meets(self, other: "Box") -> bool:
        """Whether the two overlap."""
        return self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom

    def holds(self, other: "Box") -> bool:
        """Whether the other lies inside this one."""
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom


def fluid(height: float, shapes: Iterable[str], label: str | None = None) -> str:
    """Draw at the width of the surrounding element; without a label, hide it from screen readers."""
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return f'<svg class="fluid" width="100%" height="{place(height)}" {role}>{"".join(shapes)}</svg>'


def panel(width: float, height: float, shapes: Iterable[str], label: str) -> str:
    """Draw in a frame of fixed proportions that scales as a whole."""
    frame = f'viewBox="0 0 {place(width)} {place(height)}"'
    return f'<svg class="panel-svg" {frame} role="img" aria-label="{escape(label)}">{"".join(shapes)}</svg>'


@dataclass(frozen=True)
class Scale:
    """A linear map from figures to percentages of the width, with round ticks."""

    low: float
    high: float

    def fraction(self, value: float) -> float:
        """Return a figure's position between the ends, 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def x(self, value: float) -> str:
        """Return a figure's position as a percentage."""
        return f"{100 * self.fraction(value):.2f}%"

    def width(self, start: float, end: float) -> str:
        """Return the distance between two figures as a percentage."""
        return f"{100 * (self.fraction(end) - self.fraction(start)):.2f}%"

    def ticks(self, wanted: int = 5) -> list[float]:
        """Return round figures between the ends, about as many as wanted."""
        raw = (self.high - self.low) / max(1, wanted)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(index * step, 10) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """Write a tick without trailing zeros."""
    return f"{value:,.10g}"


def end_anchor(fraction: float) -> str:
    """Return the text anchor that keeps a tick's text inside the drawing."""
    return "start" if fraction < 0.02 else "end" if fraction > 0.98 else "middle"
