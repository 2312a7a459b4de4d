"""From acceptance to speed: the tokens that a tree brings per target pass, and what a round costs.

`polydraft.lab.theory` has the papers' formulas, and a search for the best tree.

References
----------
.. [1] Chen et al., Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding, arXiv:2402.12374.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from polydraft.errors import UsageError
from polydraft.trees import Topology

CostCurve = Callable[[int], float]
"""Tokens of one target pass to its cost, in passes over one token."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one round costs, in target passes over a single token."""

    draft_level: float
    """One draft pass, over all nodes of a level."""
    tree_pass: CostCurve
    """The target's pass, by its number of tokens, root included; see `cost_curve`."""
    overhead: float = 0.0
    """Everything else, once per round."""
    disturbed: bool = False
    """Whether they were measured on a busy machine."""

    def __post_init__(self) -> None:
        check_number("draft_level", self.draft_level, 0)
        check_number("overhead", self.overhead, 0)


def speedup(tokens: float, levels: int, nodes: int, costs: Costs) -> float:
    """Speed-up over plain decoding: tokens per round over the cost of the round.

    Parameters
    ----------
    tokens : float
        Expected tokens per round, as `tree_tokens` gives.
    levels, nodes : int
        Depth of the tree, and its nodes, root included.
    costs : Costs
        Measured on the machine in question.
    """
    check_number("tokens", tokens, 1)
    check_number("levels", levels, 0, whole=True)
    check_number("nodes", nodes, 1, whole=True)
    return tokens / (costs.draft_level * levels + costs.tree_pass(nodes) + costs.overhead)


def cost_curve(measured: Mapping[int, float]) -> CostCurve:
    """Return a curve through measured costs: linear in between, constant before the first, extrapolated after the last.

    Parameters
    ----------
    measured : mapping
        From tokens of a pass to its time. The pass with fewest tokens, preferably 1, is the unit.
    """
    if not measured:
        raise UsageError(
            "measured is empty; allowed: times of target passes by their number of tokens, such as {1: 20.0, 16: 24.5}"
        )
    for nodes, time in measured.items():
        check_number("tokens of a measured pass", nodes, 1, whole=True)
        check_number("time of a measured pass", time, math.nextafter(0, 1))
    points = sorted(measured.items())
    unit = points[0][1]

    def cost(nodes: int) -> float:
        if nodes <= points[0][0] or len(points) == 1:
            return 1.0
        right = next((index for index, point in enumerate(points) if point[0] >= nodes), len(points) - 1)
        (begin, low), (end, high) = points[right - 1], points[right]
        return (low + (high - low) * (nodes - begin) / (end - begin)) / unit

    return cost


def tree_tokens(topology: Topology, rank_acceptance: Sequence[float]) -> float:
    """Return the expected tokens per target pass with a tree, including the token after the accepted ones.

    Parameters
    ----------
    topology : Topology
        The tree.
    rank_acceptance : sequence of float
        Chance a_k that the k-th child of a node is accepted if the node was; falling, with a sum of at most 1.

    Returns
    -------
    float
        1 + Σ over nodes below the root of ∏ a_rank along their paths (the positional acceptance model of [1]).

    Notes
    -----
    The model assumes the same a_k at every node. In fact acceptance varies from position to position, so a_k is an average,
    and the product over- or understates long paths.
    """
    ranks = checked_ranks(rank_acceptance)
    if topology.max_children > len(ranks):
        raise UsageError(
            f"rank_acceptance has {len(ranks)} numbers but nodes have up to {topology.max_children} children; pass one for each"
        )
    chances = [1.0] * topology.num_nodes
    for node, children in enumerate(topology.children):
        for rank, child in enumerate(children):
            chances[child] = chances[node] * ranks[rank]
    return sum(chances)


def checked_ranks(rank_acceptance: Sequence[float]) -> list[float]:
    """Return the acceptance of children by rank; raise unless they are falling probabilities of exclusive events."""
    ranks = [float(chance) for chance in rank_acceptance]
    if not ranks or not all(0 <= chance <= 1 for chance in ranks) or sum(ranks) > 1 + 1e-9:
        raise UsageError(
            f"rank_acceptance is {ranks}; allowed: probabilities that sum to at most 1, because at most one child is accepted"
        )
    if any(younger > elder for elder, younger in pairwise(ranks)):
        raise UsageError(
            f"rank_acceptance rises ({ranks}); allowed: falling probabilities; sort them, or average over more positions"
        )
    return ranks


def check_number(name: str, value: float, least: float, most: float = math.inf, *, whole: bool = False) -> None:
    """Raise a `UsageError` for a number outside its range."""
    number = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not number or not least <= value <= most or value == math.inf:
        kind = "whole numbers" if whole else "numbers"
        allowed = f"{kind} from {least:g}" + ("" if most == math.inf else f" to {most:g}")
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}")
