"""Which nodes of a tree are likeliest to be accepted, if candidates are accepted by their rank alone."""

import heapq
from collections.abc import Iterator, Sequence

RANK_ACCEPTANCE = (0.70, 0.10, 0.042, 0.026, 0.015, 0.010, 0.008, 0.006)
"""How often the shipped head's candidates are the target's token at temperature 0, by rank; other good heads are alike."""


def paths_by_product(ranks: Sequence[float], max_depth: int | None) -> Iterator[tuple[tuple[int, ...], float]]:
    """Paths and their products, largest first, shallow before deep among equals; each after its parent and elder siblings."""
    heap: list[tuple[float, int, tuple[int, ...], float]] = []
    if max_depth is None or max_depth > 0:
        heap.append((-ranks[0], 1, (0,), 1.0))
    while heap:
        negative, depth, path, parent = heapq.heappop(heap)
        if negative == 0:
            return
        yield path, -negative
        rank = path[-1]
        if rank + 1 < len(ranks):
            heapq.heappush(heap, (-parent * ranks[rank + 1], depth, (*path[:-1], rank + 1), parent))
        if max_depth is None or depth < max_depth:
            heapq.heappush(heap, (negative * ranks[0], depth + 1, (*path, 0), -negative))
