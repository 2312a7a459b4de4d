"""Write figures as text; a missing figure is shown as missing, never as zero."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from polydraft.lab.svg import escape

DASH = '<span class="na" title="not available">–</span>'
NOT_AVAILABLE = '<span class="na">not available</span>'


def finite(value: object) -> float | None:
    """Return a figure, or None for anything else: null, NaN, infinities, text."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: object, digits: int = 2, unit: str = "") -> str:
    """Write a figure with a fixed number of digits, or a dash."""
    figure = finite(value)
    if figure is None:
        return DASH
    return f"{figure:,.{0 if abs(figure) >= 1000 else digits}f}{unit}"


def percent(value: object) -> str:
    """Write a fraction as a percentage, or a dash."""
    figure = finite(value)
    return DASH if figure is None else f"{100 * figure:.0f}\N{NO-BREAK SPACE}%"


def size(value: object) -> str:
    """Write bytes in binary units, or a dash."""
    figure = finite(value)
    if figure is None or figure <= 0:
        return DASH
    for unit in ("B", "KiB", "MiB"):
        if figure < 1024:
            return f"{figure:.0f} {unit}"
        figure /= 1024
    return f"{figure:.2f} GiB"


def interval(figures: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of a speed-up, if there is one."""
    low, high = finite(figures.get("speedup_low")), finite(figures.get("speedup_high"))
    return None if low is None or high is None else (low, high)


def speedup_verdict(figures: Mapping[str, Any]) -> str:
    """Return "faster", "slower", "noise" (the 95 % interval contains 1) or "unknown" (there is no interval)."""
    bounds = interval(figures)
    if bounds is None:
        return "unknown"
    if bounds[0] > 1:
        return "faster"
    return "slower" if bounds[1] < 1 else "noise"


VERDICT_MARKS = {"faster": "▲", "slower": "▼", "noise": "≈", "unknown": ""}
"""Signs shown beside the colours, for readers who cannot tell these apart."""


def speedup(figures: Mapping[str, Any]) -> str:
    """Write a speed-up with its interval and sign."""
    value, bounds = finite(figures.get("speedup")), interval(figures)
    if value is None:
        return DASH
    verdict = speedup_verdict(figures)
    mark = f' <span class="mark {verdict}" title="{verdict}">{VERDICT_MARKS[verdict]}</span>' if VERDICT_MARKS[verdict] else ""
    spread = f' <span class="spread">{bounds[0]:.2f}–{bounds[1]:.2f}</span>' if bounds else ""
    return f"<strong>{value:.2f}×</strong>{mark}{spread}"


def plain(value: object) -> str:
    """Write a setting of any type as escaped text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NOT_AVAILABLE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(key)} {plain(item)}" for key, item in value.items()) or NOT_AVAILABLE
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value) or NOT_AVAILABLE
    return escape(value)


def names(methods: Iterable[str]) -> str:
    """List methods in a sentence."""
    return ", ".join(f"<code>{escape(method)}</code>" for method in methods)


def missing_note(methods: Iterable[str]) -> str:
    """Name the methods that a drawing leaves out, if any."""
    listed = names(methods)
    return f'<p class="muted">Not available for {listed}.</p>' if listed else ""


def categories_of(results: Mapping[str, Any]) -> list[str]:
    """Return the categories in the order in which they first occur."""
    found: dict[str, None] = {}
    for figures in results["methods"].values():
        found.update(dict.fromkeys(figures.get("categories") or {}))
    return list(found)
