"""Best paths through whatever knows what may come next."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

Step = tuple[float, int, int]
"""One way on from a node: how unlikely it is, at least 0 (minus the logarithm of its share, or its rank); token; node."""
Steps = Callable[[int], Sequence[Step]]
"""Ways on from a node, cheapest first; none at an end."""
Rest = Callable[[int, int], Sequence[int] | None]
"""Of a node that was reached with so many tokens and has but one way on: the whole path through it, those tokens included."""


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
