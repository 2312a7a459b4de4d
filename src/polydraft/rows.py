"""The rows of a batch: state that is kept by row, and how rows come, go and trade places.

The cost of a round grows with its rows, so a batch has about as many rows as running texts: when texts end, the last ones move
into the free rows, and fewer rows are at work from then on (docs/decisions/046-rounds-have-the-rows-they-need.md). The other
rows *sleep*: their state stays in place, and comes back with them. Tensors keep their addresses, so captured rounds of all
sizes find them.

A class that keeps state by row is a `ByRow`. It names its attributes in `ROW_STATE` and its parts in `row_parts`, and inherits
`resize` and `swap_rows`, and also `take_row` and `put_row`, for a text that gives up its row and comes back. Parameters do not
move with their rows: whoever resizes or swaps sets them afterwards.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional


class ByRow:
    """State with a row for each text of a batch; perhaps only the first rows are at work."""

    ROW_STATE: ClassVar[tuple[str, ...]] = ()
    """Attributes with an entry per row: lists, and tensors whose first axis is rows. None means not created yet."""
    FORGETS: ClassVar[bool] = False
    """Whether rows are dropped instead of sleeping, and are new when they come back."""

    def row_parts(self) -> Iterable["ByRow"]:
        """Return the parts of this object that also keep state by row."""
        return ()

    def new_row(self, name: str) -> Any:
        """Return the initial value of a new row: the entry of a list, or what fills the row of a tensor."""
        if isinstance(getattr(self, name), Tensor):
            return 0
        raise NotImplementedError(f"{type(self).__name__}.{name}: say what a new row begins with")

    def before_rows_change(self) -> None:
        """Bring the attributes up to date, before rows are resized, swapped, taken or put back."""

    def resize(self, rows: int, most: int) -> None:
        """Put the first `rows` rows to work, never more than `most`; the others sleep, and missing ones are created."""
        self.before_rows_change()
        for part in self.row_parts():
            part.resize(rows, most)
        for name in self.ROW_STATE:
            if getattr(self, name) is not None:
                setattr(self, name, self.keep_rows(name, self._at_least(rows, name), rows))

    def swap_rows(self, first: int, second: int, used: int | None = None) -> None:
        """Swap a row at work with another one, which may be asleep, between two rounds.

        Of parts with slots, only the first `used` ones need to be swapped, if that number is known.
        """
        self.before_rows_change()
        for part in self.row_parts():
            part.swap_rows(first, second, used)
        for name in self.ROW_STATE:
            seen = getattr(self, name)
            if isinstance(seen, Tensor):
                whole_BX = self.every_row(name)
                if second < len(whole_BX):
                    swap(whole_BX[first], whole_BX[second])
                else:
                    whole_BX[first] = self.new_row(name)
            elif seen is not None:
                whole = self._at_least(second + 1, name)
                whole[first], whole[second] = whole[second], whole[first]
                setattr(self, name, self.keep_rows(name, whole, len(seen)))

    def take_row(self, row: int) -> Any:
        """Return all state of a row except the slots of its text, for `put_row`, and reset the row."""
        self.before_rows_change()
        own = dict[str, Any]()
        for name in self.ROW_STATE:
            seen = getattr(self, name)
            if seen is not None:
                own[name] = seen[row].clone() if isinstance(seen, Tensor) else seen[row]
                seen[row] = self.new_row(name)
        return own, [part.take_row(row) for part in self.row_parts()]

    def put_row(self, row: int, taken: Any) -> None:
        """Restore what `take_row` returned in a row whose text is in its slots already."""
        self.before_rows_change()
        own, parts = taken
        for name, value in own.items():
            if isinstance(value, Tensor):
                whole_BX = self._as_wide(name, value)
                # The rest of a wider row stays as in any row in use.
                whole_BX[row][tuple(slice(size) for size in value.shape)] = value
            else:
                getattr(self, name)[row] = value
        for part, of_part in zip(self.row_parts(), parts, strict=True):
            part.put_row(row, of_part)

    def every_row(self, name: str) -> Any:
        """Return all rows of an attribute, at work or asleep; a list is copied."""
        seen, known = getattr(self, name), self._rows_kept.get(name)
        if isinstance(seen, Tensor):
            # If the tensor was replaced since, it is all there is.
            return seen if known is None or known.data_ptr() != seen.data_ptr() else known
        return [*seen, *(known or [])[len(seen) :]]

    def keep_rows(self, name: str, whole: Any, rows: int) -> Any:
        """Remember all rows of an attribute, and return the first ones, for the attribute itself."""
        if not self.FORGETS:
            self._rows_kept[name] = whole
        return whole[:rows]

    def _at_least(self, rows: int, name: str) -> Any:
        """Return all rows of an attribute, with new ones added until there are at least `rows`."""
        whole = self.every_row(name)
        missing = rows - len(whole)
        if not isinstance(whole, Tensor):
            return whole + [self.new_row(name) for _ in range(missing)]
        if missing <= 0:
            return whole
        more_BX = whole.new_empty(missing, *whole.shape[1:])
        more_BX[:] = self.new_row(name)
        return torch.cat([whole, more_BX])

    def _as_wide(self, name: str, row_X: Tensor) -> Tensor:
        """Return all rows of an attribute, widened to the width of a row that was taken when they were wider."""
        whole_BX: Tensor = self.every_row(name)
        missing = [max(wanted - size, 0) for wanted, size in zip(row_X.shape, whole_BX.shape[1:], strict=True)]
        if any(missing):
            whole_BX = functional.pad(whole_BX, [side for more in reversed(missing) for side in (0, more)])
            setattr(self, name, self.keep_rows(name, whole_BX, len(getattr(self, name))))
        return whole_BX

    @property
    def _rows_kept(self) -> dict[str, Any]:
        """All rows of each attribute, at work or asleep, from the first `resize` on."""
        found: dict[str, Any] = self.__dict__.setdefault("_all_rows_kept", {})
        return found


def swap(first_X: Tensor, second_X: Tensor) -> None:
    """Swap the contents of two tensors."""
    kept_X = first_X.clone()
    first_X.copy_(second_X)
    second_X.copy_(kept_X)
