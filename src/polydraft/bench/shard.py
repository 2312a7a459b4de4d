"""A part of a benchmark's prompts, so that several processes share a long run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from polydraft.errors import UsageError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard:
    """Every `count`-th item, from the `index`-th on, counted from 1.

    Taking turns, not runs: prompts of one category stand together in many files, and every shard gets its share of them.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read ``I/N``, such as ``1/4``."""
        match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
        index, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= index <= count:
            raise UsageError(f"shard {text!r} is none; allowed: I/N with I from 1 to N, such as 1/4 for the first of four")
        return cls(index, count)

    def __str__(self) -> str:
        """Write it as the user does."""
        return f"{self.index}/{self.count}"

    def select(self, items: Sequence[Item]) -> list[Item]:
        """Return this shard's items.

        Raises
        ------
        UsageError
            If there are fewer items than shards, so that this one would measure nothing.
        """
        chosen = list(items[self.index - 1 :: self.count])
        if not chosen:
            raise UsageError(f"shard {self} is empty: {len(items)} prompts are selected; use {len(items)} shards at most")
        return chosen

    def place(self, position: int) -> int:
        """Return where the item at `position` of this shard stands among all items, both counted from 0."""
        return position * self.count + self.index - 1
