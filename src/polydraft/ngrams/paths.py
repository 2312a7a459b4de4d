"""Best paths through whatever knows what may come next."""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple


class Step(NamedTuple):
    """One way on from a node."""

    cost: float
    """How unlikely it is, at least 0: minus the logarithm of its share, or its rank."""
    token: int
    node: int


def best_paths(root: int, steps: Callable[[int], Sequence[Step]], length: int) -> Iterator[tuple[int, ...]]:
    """Yield different paths of up to `length` tokens: the greedy one, then those that leave earlier ones at the least cost.

    `steps` returns the ways on from a node, cheapest first, none at an end. A path is followed greedily to its end once it
    has left the others, so each costs no more than `length` calls of `steps`.
    """
    order = count()  # between equal costs the earlier one goes first
    open_paths: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, next(order), (), root)]
    while open_paths:
        cost, _, tokens, node = heappop(open_paths)
        while len(tokens) < length and (ways := steps(node)):
            for way in ways[1:]:
                heappush(open_paths, (cost + way.cost, next(order), (*tokens, way.token), way.node))
            first = ways[0]
            cost, tokens, node = cost + first.cost, (*tokens, first.token), first.node
        if tokens:
            yield tokens
