"""Which candidates come first: estimated chances, continuations without repetition, and best paths.

The tables of hit rates were counted over text that SmolLM2 wrote itself at temperature 0: up to 80 tokens after each of 36
prompts of mathematics, code, translations and summaries, none of them among those that figures are reported of; then smoothed
by hand. They say which candidates a pass is spent on; the text that comes out follows the target's law whatever they say.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

from polydraft.ngrams.cache import Match

Step = tuple[float, int, int]
"""One way on from a node: how unlikely it is, at least 0 (minus the logarithm of its share, or its rank); token; node."""
Steps = Callable[[int], Sequence[Step]]
"""Ways on from a node, cheapest first; none at an end."""
Rest = Callable[[int, int], Sequence[int] | None]
"""Of a node that was reached with so many tokens and has but one way on: the whole path through it, those tokens included."""

_BY_MATCH = (
    (0.25, 0.06, 0.05, 0.03),
    (0.56, 0.08, 0.05, 0.05),
    (0.72, 0.14, 0.10, 0.05),
    (0.80, 0.14, 0.10, 0.05),
    (0.83, 0.14, 0.10, 0.05),
    (0.86, 0.14, 0.10, 0.05),
    (0.88, 0.14, 0.10, 0.05),
    (0.94, 0.14, 0.10, 0.05),
)
"""Of what followed in the text before: a row for 1, 2, 3, 4, 5, up to 7, up to 11 and more tokens that matched, by rank, the
last for all further ones."""
_MATCH_ROWS = (0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7)
_BY_SHARE = (
    ((0.05, 0.09, 0.16, 0.19, 0.20, 0.21, 0.27, 0.35, 0.40, 0.50), (0.02, 0.08, 0.10), (0.015, 0.03)),
    ((0.04, 0.07, 0.18, 0.24, 0.38, 0.40, 0.45, 0.58, 0.65, 0.75), (0.05, 0.12, 0.16, 0.22), (0.03, 0.06, 0.12)),
    ((0.11, 0.13, 0.28, 0.35, 0.40, 0.55, 0.60, 0.67, 0.85, 0.92), (0.05, 0.12, 0.25, 0.30), (0.05, 0.07, 0.20)),
)
"""Of what a corpus counted: for 1, 2 and more tokens that matched, by rank (0, 1, more) and by tenths of the places after these
tokens that have it next."""


def match_chance(size: int, rank: int) -> float:
    """Return the chance of what followed the text's last `size` tokens before, when `rank` others are better."""
    row = _BY_MATCH[_MATCH_ROWS[size] if size < len(_MATCH_ROWS) else -1]
    return row[rank] if rank < len(row) else row[-1]


def share_chance(size: int, rank: int, share: float) -> float:
    """Return the chance of what follows `size` tokens in a `share` of the places where a corpus has them."""
    ranks = _BY_SHARE[min(size, len(_BY_SHARE)) - 1]
    shares = ranks[min(rank, len(ranks) - 1)]
    return shares[min(int(10 * share), len(shares) - 1)]


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


def best_paths(root: int, steps: Steps, length: int, rest: Rest | None = None) -> Iterator[Sequence[int]]:
    """Yield different paths of up to `length` tokens: the greedy one, then those that leave earlier ones at the least cost.

    A path is followed greedily to its end once it has left the others, so each costs no more than `length` calls of `steps`,
    and far fewer where `rest` knows a short cut.
    """
    order = count()  # between equal costs the earlier one goes first
    open_paths: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, next(order), (), root)]
    while open_paths:
        cost, _, tokens, node = heappop(open_paths)
        while len(tokens) < length:
            if rest and tokens and (whole := rest(node, len(tokens))):
                yield whole
                break
            ways = steps(node)
            if not ways:
                if tokens:
                    yield tokens
                break
            for further, token, to in ways[1:]:
                heappush(open_paths, (cost + further, next(order), (*tokens, token), to))
            further, token, node = ways[0]
            cost, tokens = cost + further, (*tokens, token)
        else:
            yield tokens
