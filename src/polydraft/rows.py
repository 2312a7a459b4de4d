"""The rows of a batch: what is kept by row, and how rows come, go and trade places. The one home of this protocol.

Rounds cost what their rows cost, so a batch has about as many rows as it has running texts: the last ones move into the first
free rows when others end, and fewer rows are at work from then on (docs/decisions/046-rounds-have-the-rows-they-need.md). Rows
that are not at work *sleep*: their state stays where it is and comes back with them. Tensors keep their addresses meanwhile, so
captured rounds of all sizes find them.

A class that keeps state by row is a `ByRow`: it names its attributes in `ROW_STATE` and its parts in `row_parts`; `resize` and
`swap_rows` are inherited, and so are `take_row` and `put_row`, for a text that gives its row up and comes back. Parameters do
not move with their rows: whoever resizes or swaps sets them afterwards.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional


class ByRow:
    """State with a row for each text of a batch, of which only the first rows may be at work."""

    ROW_STATE: ClassVar[tuple[str, ...]] = ()
    """Attributes that have an entry for each row: tensors, whose first axis is rows, and lists. None means not there yet."""
    FORGETS: ClassVar[bool] = False
    """Whether rows do not sleep: those that go are dropped, and new when they come back."""

    def row_parts(self) -> Iterable["ByRow"]:
        """Return the parts of this object that keep state by row, too."""
        return ()

    def new_row(self, name: str) -> Any:
        """Return what a row begins with that never was: an entry of a list; of a tensor, what fills it."""
        if isinstance(getattr(self, name), Tensor):
            return 0
        raise NotImplementedError(f"{type(self).__name__}.{name}: say what a new row begins with")

    def before_rows_change(self) -> None:
        """Bring the attributes up to date: they are about to be resized, or two of their rows to be swapped."""

    def resize(self, rows: int, most: int) -> None:
        """Put the first `rows` rows to work, never more than `most`; the others sleep, rows that never were are new."""
        self.before_rows_change()
        for part in self.row_parts():
            part.resize(rows, most)
        for name in self.ROW_STATE:
            if getattr(self, name) is not None:
                setattr(self, name, self.keep_rows(name, self._at_least(rows, name), rows))

    def swap_rows(self, first: int, second: int, used: int | None = None) -> None:
        """Swap a row at work with another one, which may sleep, between two rounds.

        Of parts that have slots only the first `used` ones need to be swapped, where that is known.
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
        """Return all that is kept of a row but the slots of its text, for `put_row`, and leave it as a new one."""
        self.before_rows_change()
        own = dict[str, Any]()
        for name in self.ROW_STATE:
            seen = getattr(self, name)
            if seen is not None:
                own[name] = seen[row].clone() if isinstance(seen, Tensor) else seen[row]
                seen[row] = self.new_row(name)
        return own, [part.take_row(row) for part in self.row_parts()]

    def put_row(self, row: int, taken: Any) -> None:
        """Go on in a row with what `take_row` returned; its text is in the slots already."""
        self.before_rows_change()
        own, parts = taken
        for name, value in own.items():
            if isinstance(value, Tensor):
                whole_BX = self._as_wide(name, value)
                whole_BX[row][tuple(slice(size) for size in value.shape)] = (
                    value  # what is behind it is as in a row that has begun
                )
            else:
                getattr(self, name)[row] = value
        for part, of_part in zip(self.row_parts(), parts, strict=True):
            part.put_row(row, of_part)

    def every_row(self, name: str) -> Any:
        """Return all rows of an attribute, at work or not; a list is a copy."""
        seen, known = getattr(self, name), self._rows_kept.get(name)
        if isinstance(seen, Tensor):
            # A tensor that was replaced since is all there is.
            return seen if known is None or known.data_ptr() != seen.data_ptr() else known
        return [*seen, *(known or [])[len(seen) :]]

    def keep_rows(self, name: str, whole: Any, rows: int) -> Any:
        """Let these be all rows of an attribute; return the first ones, for it to be set to."""
        if not self.FORGETS:
            self._rows_kept[name] = whole
        return whole[:rows]

    def _at_least(self, rows: int, name: str) -> Any:
        """Return all rows of an attribute, and new ones behind them if there are fewer."""
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
        """Return all rows of an attribute, made as wide as a row that was taken out when they were wider."""
        whole_BX: Tensor = self.every_row(name)
        missing = [max(wanted - size, 0) for wanted, size in zip(row_X.shape, whole_BX.shape[1:], strict=True)]
        if any(missing):
            whole_BX = functional.pad(whole_BX, [side for more in reversed(missing) for side in (0, more)])
            setattr(self, name, self.keep_rows(name, whole_BX, len(getattr(self, name))))
        return whole_BX

    @property
    def _rows_kept(self) -> dict[str, Any]:
        """All rows of each attribute, at work or not, since the first `resize`."""
        found: dict[str, Any] = self.__dict__.setdefault("_all_rows_kept", {})
        return found


def swap(first_X: Tensor, second_X: Tensor) -> None:
    """Swap the contents of two tensors."""
    kept_X = first_X.clone()
    first_X.copy_(second_X)
    second_X.copy_(kept_X)
