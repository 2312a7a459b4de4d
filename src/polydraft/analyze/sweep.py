"""Figures 1 and 2 of the paper: acceptance as the temperature or the number of drafts varies."""

from collections.abc import Sequence
from enum import StrEnum

from polydraft.analyze.chart import Curve, Point, chart
from polydraft.analyze.row import Row


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
