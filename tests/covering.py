"""Which combinations the default tests run: every value of everything, the rest being slow.

The values come from registries or from tables beside the tests: one that is added is tested by default, without editing a list.
"""

from collections.abc import Collection, Hashable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def chosen(rows: Sequence[tuple[Hashable, ...]], strength: int = 1) -> list[tuple[Hashable, ...]]:
    """Return few rows, in which any `strength` columns have all the values together that they have in all rows.

    Greedy: the row that covers most of what is left, and of equal ones that whose values were taken least often, so that long
    columns go round the short ones.
    """
    parts = list(combinations(range(len(rows[0])), strength))
    covers = {row: {(part, *(row[column] for column in part)) for part in parts} for row in rows}
    left = set().union(*covers.values())
    taken: dict[tuple[int, Hashable], int] = {}
    found: list[tuple[Hashable, ...]] = []

    def worth(row: tuple[Hashable, ...]) -> tuple[int, int]:
        return len(covers[row] & left), -sum(taken.get(one, 0) for one in enumerate(row))

    while left:
        best = max(rows, key=worth)
        found.append(best)
        left -= covers[best]
        for one in enumerate(best):
            taken[one] = taken.get(one, 0) + 1
    return found


def some_slow(values: Collection[Any], slow: Collection[Any]) -> list[Any]:
    """Return parameters of all values, some of them marked slow. A value that is a tuple stands for as many arguments."""
    rows = list(values)
    unknown = [value for value in slow if value not in rows]
    assert not unknown, f"nothing of that name to mark: {unknown}"
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow if row in slow else ())
        for row in rows
    ]


def all_slow(*dimensions: Collection[Any]) -> list[Any]:
    """Return parameters of all combinations, all of them marked slow."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in product(*dimensions)]


def keeping(values: Collection[Any], *kept: Any) -> list[Any]:
    """Return parameters of all values, those that are not kept by name marked slow: for cases whose like runs elsewhere.

    A value that is a tuple stands for as many arguments.
    """
    missing = [one for one in kept if one not in values]
    assert not missing, f"nothing to keep: {missing}"
    return some_slow(values, [value for value in values if value not in kept])


def covering(*dimensions: Collection[Any], strength: int = 1) -> list[Any]:
    """Return parameters of all combinations, those that are not needed to cover the dimensions marked slow.

    A value that is a tuple stands for as many arguments.
    """
    values = [list(dimension) for dimension in dimensions]
    everything = list(product(*(range(len(dimension)) for dimension in values)))
    quick = set(chosen(everything, strength))
    made = []
    for places in everything:
        picked = [dimension[place] for dimension, place in zip(values, places, strict=True)]
        flat = [part for one in picked for part in (one if isinstance(one, tuple) else (one,))]
        made.append(pytest.param(*flat, marks=() if places in quick else pytest.mark.slow))
    return made
