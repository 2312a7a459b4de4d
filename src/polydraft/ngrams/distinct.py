"""Continuations without repetition."""

from collections.abc import Sequence

from polydraft.ngrams.cache import Match


class Distinct:
    """Collect up to `count` continuations, none of which is the beginning of an earlier one."""

    def __init__(self, count: int) -> None:
        self.matches: list[Match] = []
        self._count = count
        self._beginnings: set[tuple[int, ...]] = {()}

    @property
    def full(self) -> bool:
        """Whether no more are wanted."""
        return len(self.matches) >= self._count

    def add(self, prefix: int, tokens: Sequence[int]) -> None:
        """Add a continuation if it says anything new and there is room."""
        kept = tuple(tokens)
        if kept in self._beginnings or self.full:
            return
        self._beginnings.update(kept[:end] for end in range(1, len(kept) + 1))
        self.matches.append(Match(prefix, kept))
