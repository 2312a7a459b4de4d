"""What a tree is worth, and which is worth most, when a child's chance depends on its rank alone.

References
----------
.. [1] Chen et al., Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding, arXiv:2402.12374.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from polydraft.errors import UsageError
from polydraft.theory.speedup import Costs, speedup
from polydraft.trees import MAX_NODES, Topology


@dataclass(frozen=True)
class RatedTree:
    """A tree with what the model of `tree_tokens` expects of it."""

    topology: Topology
    tokens: float
    """Expected tokens a target pass."""
    speedup: float
    """Over plain decoding."""


def tree_tokens(topology: Topology, rank_acceptance: Sequence[float]) -> float:
    """Return the expected tokens a target pass from a tree, the token after the accepted ones included.

    Parameters
    ----------
    topology : Topology
        The tree.
    rank_acceptance : sequence of float
        Chance a_k that the k-th child of a node is accepted if the node was; falling, at most one in all.

    Returns
    -------
    float
        1 + Σ over nodes below the root of ∏ a_rank along their paths (the positional acceptance model of [1]).

    Notes
    -----
    The model takes a_k to be the same at every node. Where acceptance varies from position to position, as it does, it is
    an average, and the product overstates or understates long paths.
    """
    ranks = _checked(rank_acceptance)
    if topology.max_children > len(ranks):
        raise UsageError(
            f"rank_acceptance has {len(ranks)} numbers but nodes have up to {topology.max_children} children; give one a child"
        )
    chances = [1.0] * topology.num_nodes
    for node, children in enumerate(topology.children):
        for rank, child in enumerate(children):
            chances[child] = chances[node] * ranks[rank]
    return sum(chances)


def largest_tree(rank_acceptance: Sequence[float], nodes: int, max_depth: int | None = None) -> Topology:
    """Return the tree of at most `nodes` nodes, the root included, with the most expected tokens.

    Notes
    -----
    [1] finds it by dynamic programming. With a_k falling the nodes of the largest path products are the tree: a parent's
    product is never smaller than its child's, nor an elder sibling's than a younger's, so they hang together. That also
    bounds what any tree of this size can give. Nodes that cannot be accepted are left out.
    """
    _check_size("nodes", nodes)
    paths = [path for path, _ in islice(_by_product(_checked(rank_acceptance), max_depth), nodes - 1)]
    return Topology.from_paths(paths)


def fastest_tree(rank_acceptance: Sequence[float], costs: Costs, max_nodes: int, max_depth: int) -> RatedTree:
    """Return the tree with the largest speed-up, over all sizes and depths up to those given.

    For every depth the trees of all sizes are beginnings of one list, so that all are tried.
    """
    _check_size("max_nodes", max_nodes)
    ranks = _checked(rank_acceptance)
    best, best_paths, best_tokens = speedup(1.0, 0, 1, costs), [], 1.0
    for cap in range(1, max_depth + 1):
        paths: list[tuple[int, ...]] = []
        tokens, depth = 1.0, 0
        for path, chance in islice(_by_product(ranks, cap), max_nodes - 1):
            paths.append(path)
            tokens, depth = tokens + chance, max(depth, len(path))
            factor = speedup(tokens, depth, len(paths) + 1, costs)
            if factor > best:
                best, best_paths, best_tokens = factor, paths.copy(), tokens
    return RatedTree(Topology.from_paths(best_paths), best_tokens, best)


def _by_product(ranks: list[float], max_depth: int | None) -> Iterator[tuple[tuple[int, ...], float]]:
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


def _checked(rank_acceptance: Sequence[float]) -> list[float]:
    ranks = [float(chance) for chance in rank_acceptance]
    if not ranks or not all(0 <= chance <= 1 for chance in ranks) or sum(ranks) > 1 + 1e-9:
        raise UsageError(
            f"rank_acceptance is {ranks}; allowed: chances from 0, at most 1 in all, because one child at most is accepted"
        )
    if any(younger > elder for elder, younger in pairwise(ranks)):
        raise UsageError(
            f"rank_acceptance rises ({ranks}); allowed: falling chances; sort them, or average over more positions"
        )
    return ranks


def _check_size(name: str, nodes: int) -> None:
    if isinstance(nodes, bool) or not isinstance(nodes, int) or not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"{name} is {nodes!r}; allowed: whole numbers from 1 to {MAX_NODES}, the root included")
