"""How often a pair's candidates are accepted, by how many there are and how deep they stand, and what trees make of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polydraft.draft.speedup import chain_tokens

PROBES = {1: (1,) * 6, 2: (2,) * 4, 4: (4,) * 2, 8: (8,)}
"""Trees that are run to learn what so many children per node give."""
_WEIGHT = 4.0
"""Visits that the guess from the level above weighs: few rounds get deep."""
WIDTHS = (1, 2, 3, 4, 6, 8)
_MOST_DEPTH = 8


@dataclass(frozen=True)
class Acceptance:
    """Chances that one of a node's children is accepted once the node was, by children per node and depth.

    Parameters
    ----------
    by_width : mapping
        Children per node to chances at depths 1, 2, ...; width 1 has the most depths.
    """

    by_width: Mapping[int, Sequence[float]]

    @classmethod
    def counted(cls, counts: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> "Acceptance":
        """Estimate from accepts and offers by depth; where few texts got that deep, the level above counts as well."""
        by_width = {}
        for width, (accepts, offers) in counts.items():
            chances: list[float] = []
            for accepted, offered in zip(accepts, offers, strict=True):
                guess = chances[-1] if chances else 0.5
                chances.append((accepted + _WEIGHT * guess) / (offered + _WEIGHT) if chances else accepted / max(offered, 1))
            by_width[width] = tuple(chances)
        return cls(by_width)

    def at(self, width: int, depth: int) -> float:
        """Return the chance at a depth, counted from 1, with so many children.

        Between measured widths it is straight over log width; beyond the last one it does not grow. Deeper than measured, what
        is rejected changes as it does in a chain.
        """
        known = sorted(self.by_width)
        below = max((one for one in known if one <= width), default=known[0])
        above = min((one for one in known if one >= width), default=known[-1])
        low, high = self._deep(below, depth), self._deep(above, depth)
        share = 0.0 if below == above else math.log(width / below) / math.log(above / below)
        return low + share * (max(high, low) - low)

    def _deep(self, width: int, depth: int) -> float:
        chances, chain = self.by_width[width], self.by_width.get(1, self.by_width[width])
        if depth <= len(chances):
            return chances[depth - 1]
        if not chances:
            return 0.0
        last, reference = min(depth, len(chain)) - 1, len(chances) - 1
        rejected = 1 - chances[-1]
        if 0 <= reference < len(chain) and chain[reference] < 1:
            rejected *= (1 - chain[last]) / (1 - chain[reference])
        return min(max(1 - rejected, 0.0), 1.0)

    def tokens(self, widths: Sequence[int]) -> float:
        """Return the expected tokens per pass of a tree with so many children per node, level by level."""
        return chain_tokens([self.at(width, depth) for depth, width in enumerate(widths, start=1)])


def shapes(most_nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield all trees of `WIDTHS` that do not widen with depth and have at most so many nodes, the root included."""

    def grow(widths: tuple[int, ...], nodes: int, last: int) -> Iterator[tuple[int, ...]]:
        for width in WIDTHS:
            level = last * width
            if (not widths or width <= widths[-1]) and nodes + level <= most_nodes and len(widths) < _MOST_DEPTH:
                yield (*widths, width)
                yield from grow((*widths, width), nodes + level, level)

    return grow((), 1, 1)


def spelled(widths: Sequence[int]) -> str:
    """Write a tree as users do."""
    return f"chain:{len(widths)}" if set(widths) == {1} else "x".join(map(str, widths))
