"""The rows of a batch: what is kept by row, and how rows come, go and trade places. The one home of this protocol.

Rounds cost what their rows cost, so a batch has about as many rows as it has running texts: the last ones move into the first
free rows when others end, and fewer rows are at work from then on (docs/decisions/046-rounds-have-the-rows-they-need.md). Rows
that are not at work *sleep*: their state stays where it is and comes back with them. Tensors keep their addresses meanwhile, so
captured rounds of all sizes find them.

A class that keeps state by row is a `ByRow`: it names its attributes in `ROW_STATE` and its parts in `row_parts`; `resize` and
`swap_rows` are inherited.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor


class ByRow:
    """State with a row for each text of a batch, of which only the first rows may be at work."""

    ROW_STATE: ClassVar[tuple[str, ...]] = ()
    """Attributes that have an entry for each row: tensors, whose first axis is rows, and lists. None means not there yet."""

    def row_parts(self) -> Iterable["ByRow"]:
        """Return the parts of this object that keep state by row, too."""
        return ()

    def new_row(self, name: str) -> Any:
        """Return the entry of a row that never was, in a list; rows of tensors begin with zeros."""
        raise NotImplementedError(f"{type(self).__name__}.{name}: say what a new row begins with")

    def resize(self, rows: int, most: int) -> None:
        """Put the first `rows` rows to work, never more than `most`; the others sleep, rows that never were are new."""
        for part in self.row_parts():
            part.resize(rows, most)
        for name in self.ROW_STATE:
            seen = getattr(self, name)
            if seen is None:
                continue
            whole = self._whole(name, seen)
            missing = rows - len(whole)
            if isinstance(seen, Tensor):
                whole = whole if missing <= 0 else torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
            else:
                whole = [*whole, *(self.new_row(name) for _ in range(missing))]
            self._sleepers[name] = whole
            setattr(self, name, whole[:rows])

    def swap_rows(self, first: int, second: int) -> None:
        """Swap a row at work with another one, which may sleep, between two rounds."""
        for part in self.row_parts():
            part.swap_rows(first, second)
        for name in self.ROW_STATE:
            seen = getattr(self, name)
            if isinstance(seen, Tensor):
                whole_BX = self._whole(name, seen)
                if second < len(whole_BX):
                    swap(whole_BX[first], whole_BX[second])
                else:
                    whole_BX[first].zero_()
            elif seen is not None:
                whole = self._whole(name, seen)
                whole += [self.new_row(name) for _ in range(second + 1 - len(whole))]
                whole[first], whole[second] = whole[second], whole[first]
                self._sleepers[name] = whole
                setattr(self, name, whole[: len(seen)])

    @property
    def _sleepers(self) -> dict[str, Any]:
        """All rows of each attribute, at work or not."""
        found: dict[str, Any] = self.__dict__.setdefault("_all_rows", {})
        return found

    def _whole(self, name: str, seen: Any) -> Any:
        """Return all rows of an attribute, of which `seen` are at work."""
        known = self._sleepers.get(name)
        if isinstance(seen, Tensor):
            # A tensor that was replaced since is all there is.
            return seen if known is None or known.data_ptr() != seen.data_ptr() else known
        return [*seen, *(known or [])[len(seen) :]]


def swap(first_X: Tensor, second_X: Tensor) -> None:
    """Swap the contents of two tensors."""
    kept_X = first_X.clone()
    first_X.copy_(second_X)
    second_X.copy_(kept_X)
