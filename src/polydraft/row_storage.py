"""Tensors and lists with a row for each text, of which only the first rows may be at work."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def resized(values_BX: Tensor, rows: int) -> Tensor:
    """Return the first rows of a tensor, with zeros behind them if there are fewer."""
    missing = rows - len(values_BX)
    if missing <= 0:
        return values_BX[:rows]
    return torch.cat([values_BX, values_BX.new_zeros(missing, *values_BX.shape[1:])])


def swap_rows(first_X: Tensor, second_X: Tensor) -> None:
    """Swap the contents of two tensors."""
    kept_X = first_X.clone()
    first_X.copy_(second_X)
    second_X.copy_(kept_X)


class RowStorage:
    """What its owner keeps by row, by name: all rows, while the owner itself sees the first ones.

    Rows that are not at work sleep: they come back as they were. Tensors stay where they are, however many of their rows
    are seen, so that captured rounds of all sizes find them.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._lists: dict[str, list[Any]] = {}

    def whole(self, name: str, values_BX: Tensor) -> Tensor:
        """Return all rows of a tensor of which the owner sees `values_BX`."""
        known = self._tensors.get(name)
        # What the owner has replaced since is all that there is.
        return values_BX if known is None or known.data_ptr() != values_BX.data_ptr() else known

    def resized(self, name: str, values_BX: Tensor, rows: int) -> Tensor:
        """Return so many first rows of a tensor; rows that there never were are zero."""
        whole = self.whole(name, values_BX)
        return self.keep(name, resized(whole, max(rows, len(whole))), rows)

    def keep(self, name: str, whole_BX: Tensor, rows: int) -> Tensor:
        """Keep a new tensor of all rows and return the first ones."""
        self._tensors[name] = whole_BX
        return whole_BX[:rows]

    def resized_list(self, name: str, values: Sequence[T], rows: int, new: Callable[[], T]) -> list[T]:
        """Return so many first entries of a list; entries that there never were are new."""
        whole = self.whole_list(name, values)
        whole += [new() for _ in range(rows - len(whole))]
        self._lists[name] = whole
        return whole[:rows]

    def swapped_list(self, name: str, values: Sequence[T], first: int, second: int) -> list[T]:
        """Return a list with two entries swapped, the second of which may sleep."""
        whole = self._lists[name] = self.whole_list(name, values)
        whole[first], whole[second] = whole[second], whole[first]
        return whole[: len(values)]

    def whole_list(self, name: str, values: Sequence[T]) -> list[T]:
        """Return all entries of a list of which the owner sees `values`."""
        return [*values, *self._lists.get(name, [])[len(values) :]]

    def swap(self, name: str, values_BX: Tensor, first: int, second: int) -> None:
        """Swap two rows of a tensor, the second of which may sleep; one that never was is zero."""
        whole = self.whole(name, values_BX)
        if second < len(whole):
            swap_rows(whole[first], whole[second])
        else:
            whole[first].zero_()
