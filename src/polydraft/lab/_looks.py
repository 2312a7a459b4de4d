"""How the shapes of charts look, written out as plain attributes: not every renderer reads style sheets with variables."""

import re

INK, MUTED, LINE, PAPER = "#15202b", "#4d5b6a", "#d3dae2", "#ffffff"
COLOURS = ("#0b5cad", "#955800", "#1b7340", "#8a2d7d", "#b3261e", "#4d5b6a", "#00707a")
"""Of series, which differ by dashes and filling too."""
DASHES = ("none", "7 4", "2 3", "10 3 2 3", "4 2", "12 4", "1 4")
_OPACITIES = (".85", ".55", ".35")

_LOOKS: dict[str, dict[str, str]] = {
    "tick": {"fill": MUTED},
    "name": {"fill": INK},
    "heading": {"fill": INK, "font-weight": "600"},
    "paper": {"fill": PAPER},
    "grid": {"stroke": LINE},
    "base": {"stroke": INK, "stroke-width": "1.5"},
    "error": {"stroke": INK, "stroke-width": "1.2"},
    "curve": {"stroke-width": "1.8"},
    "best": {"stroke-width": "5", "stroke-opacity": ".35"},
    "thin": {"stroke-width": "1"},
}
for _number, (_colour, _dash) in enumerate(zip(COLOURS, DASHES, strict=True)):
    _LOOKS |= {
        f"kind-{_number}": {"stroke": _colour},
        f"dash-{_number}": {"stroke-dasharray": _dash},
        f"curve-{_number}": {"stroke": _colour, "stroke-width": "2.2", "stroke-dasharray": _dash},
        f"error-{_number}": {"stroke": _colour, "stroke-width": "1.2"},
        f"dot-{_number}": {"fill": PAPER if _number % 2 else _colour, "stroke": _colour, "stroke-width": "2"},
        f"column-{_number}": {"fill": _colour, "fill-opacity": _OPACITIES[_number % len(_OPACITIES)]},
    }


def painted(shapes: str) -> str:
    """Add to every shape the attributes that its classes stand for."""
    return re.sub(r'class="([^"]*)"', lambda match: f"{match[0]}{_attributes(match[1])}", shapes)


def _attributes(classes: str) -> str:
    look = {key: value for name in classes.split() for key, value in _LOOKS[name].items()}
    return "".join(f' {key}="{value}"' for key, value in look.items())
