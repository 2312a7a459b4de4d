"""From acceptance to speed: tokens per target pass, what a round costs, and which tree makes the most of it.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, eq. 1.
.. [2] Leviathan et al. 2023, arXiv:2211.17192, eq. 1 and Theorem 3.8.
.. [3] Chen et al., Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding, arXiv:2402.12374.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from polydraft.errors import UsageError
from polydraft.trees import MAX_NODES, Topology
from polydraft.trees.topology import paths_by_product

CostCurve = Callable[[int], float]
"""Tokens of one target pass to its cost, in passes over one token."""


def chain_tokens(acceptance: float | Sequence[float], length: int | None = None) -> float:
    """Return the expected tokens per target pass from a chain of drafts, the token after the accepted ones included.

    Parameters
    ----------
    acceptance : float or sequence of float
        Chance α that a draft is accepted if all before it were: one number for all places, or one per place.
    length : int, optional
        Drafts γ of the chain; required with a single number.

    Returns
    -------
    float
        1 + Σ_i ∏_{j≤i} α_j; for equal α (1 − α^{γ+1})/(1 − α), eq. 1 of [2], and γ + 1 at α = 1.
    """
    if isinstance(acceptance, Sequence):
        chances = list(acceptance)
    elif length is None:
        raise UsageError("length is missing; a single acceptance needs the number of drafts, such as length=5")
    else:
        _check("length", length, 0, whole=True)
        chances = [acceptance] * length
    tokens, chance = 1.0, 1.0
    for one in chances:
        _check("acceptance", one, 0, 1)
        chance *= one
        tokens += chance
    return tokens


def improvement_factor(acceptance: float, length: int, draft_cost: float) -> float:
    """Speed-up of a chain of drafts over plain decoding: (1 − α^{γ+1}) / ((1 − α)(cγ + 1)), eq. 1 of [1], Theorem 3.8 of [2].

    Parameters
    ----------
    acceptance : float
        α: chance that one drafted token is accepted.
    length : int
        γ: drafts per round.
    draft_cost : float
        c: time of one draft pass in target passes.

    Notes
    -----
    [1] also calls α the share of the longest path that was accepted, E[length]/γ, and tabulates that. It is another number,
    smaller for imperfect drafts: convert it with `token_acceptance` before it goes in here. Either way the formula takes
    the target's pass over a whole tree to cost as much as one over a single token; `Costs` does not.
    """
    _check("draft_cost", draft_cost, 0)
    return chain_tokens(acceptance, length) / (draft_cost * length + 1)


def token_acceptance(accepted_share: float, length: int) -> float:
    """Return the acceptance of one token at which a chain of `length` drafts has the given share accepted, in expectation.

    Parameters
    ----------
    accepted_share : float
        E[accepted drafts] / length, which [1] reports as its acceptance rate.
    length : int
        γ: drafts per round.
    """
    _check("accepted_share", accepted_share, 0, 1)
    _check("length", length, 1, whole=True)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tokens(middle, length) - 1 < accepted_share * length else (low, middle)
    return high


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one round costs, in target passes over a single token."""

    draft_level: float
    """One draft pass, over all nodes of a level."""
    tree_pass: CostCurve
    """The target's pass, by the number of its tokens, the root among them; see `cost_curve`."""
    overhead: float = 0.0
    """Everything else, once per round."""
    disturbed: bool = False
    """Whether they were measured on a busy machine."""

    def __post_init__(self) -> None:
        _check("draft_level", self.draft_level, 0)
        _check("overhead", self.overhead, 0)

    def of_round(self, levels: int, nodes: int) -> float:
        """Cost of drafting `levels` levels and verifying a tree of `nodes` nodes, the root included."""
        return self.draft_level * levels + self.tree_pass(nodes) + self.overhead


def speedup(tokens: float, levels: int, nodes: int, costs: Costs) -> float:
    """Speed-up over plain decoding: tokens per round over the cost of the round.

    `improvement_factor` is the case of a chain (`tokens` from `chain_tokens`, levels γ) with a flat cost curve.

    Parameters
    ----------
    tokens : float
        Expected tokens per round, as `chain_tokens` or `tree_tokens` give.
    levels, nodes : int
        Depth of the tree, and its nodes with the root.
    costs : Costs
        As measured on the machine in question.
    """
    _check("tokens", tokens, 1)
    _check("levels", levels, 0, whole=True)
    _check("nodes", nodes, 1, whole=True)
    return tokens / costs.of_round(levels, nodes)


def cost_curve(measured: Mapping[int, float]) -> CostCurve:
    """Return a curve through measured costs: straight between them, level before the first, and on at the last slope.

    Parameters
    ----------
    measured : mapping
        Tokens of a pass to its time. The smallest number of tokens, preferably 1, is the unit.
    """
    if not measured:
        raise UsageError(
            "measured is empty; allowed: times of target passes by their number of tokens, such as {1: 20.0, 16: 24.5}"
        )
    for nodes, time in measured.items():
        _check("tokens of a measured pass", nodes, 1, whole=True)
        _check("time of a measured pass", time, math.nextafter(0, 1))
    points = sorted(measured.items())
    unit = points[0][1]

    def cost(nodes: int) -> float:
        if nodes <= points[0][0] or len(points) == 1:
            return 1.0
        right = next((index for index, point in enumerate(points) if point[0] >= nodes), len(points) - 1)
        (begin, low), (end, high) = points[right - 1], points[right]
        return (low + (high - low) * (nodes - begin) / (end - begin)) / unit

    return cost


@dataclass(frozen=True)
class RatedTree:
    """A tree with what the model of `tree_tokens` expects of it."""

    topology: Topology
    tokens: float
    """Expected tokens per target pass."""
    speedup: float
    """Over plain decoding."""


def tree_tokens(topology: Topology, rank_acceptance: Sequence[float]) -> float:
    """Return the expected tokens per target pass from a tree, the token after the accepted ones included.

    Parameters
    ----------
    topology : Topology
        The tree.
    rank_acceptance : sequence of float
        Chance a_k that the k-th child of a node is accepted if the node was; falling, at most one in all.

    Returns
    -------
    float
        1 + Σ over nodes below the root of ∏ a_rank along their paths (the positional acceptance model of [3]).

    Notes
    -----
    The model takes a_k to be the same at every node. Where acceptance varies from position to position, as it does, it is
    an average, and the product overstates or understates long paths.
    """
    ranks = _checked(rank_acceptance)
    if topology.max_children > len(ranks):
        raise UsageError(
            f"rank_acceptance has {len(ranks)} numbers but nodes have up to {topology.max_children} children; pass one for each"
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
    [3] finds it by dynamic programming. With a_k falling the nodes of the largest path products are the tree: a parent's
    product is never smaller than its child's, nor an elder sibling's than a younger's, so they hang together. That also
    bounds what any tree of this size can give. Nodes that cannot be accepted are left out.
    """
    _check("nodes", nodes, 1, MAX_NODES, whole=True)
    paths = [path for path, _ in islice(paths_by_product(_checked(rank_acceptance), max_depth), nodes - 1)]
    return Topology.from_paths(paths)


def fastest_tree(rank_acceptance: Sequence[float], costs: Costs, max_nodes: int, max_depth: int) -> RatedTree:
    """Return the tree with the largest speed-up, over all sizes and depths up to those given.

    For every depth the trees of all sizes are beginnings of one list, so that all are tried.
    """
    _check("max_nodes", max_nodes, 1, MAX_NODES, whole=True)
    ranks = _checked(rank_acceptance)
    best, best_paths, best_tokens = speedup(1.0, 0, 1, costs), [], 1.0
    for cap in range(1, max_depth + 1):
        paths: list[tuple[int, ...]] = []
        tokens, depth = 1.0, 0
        for path, chance in islice(paths_by_product(ranks, cap), max_nodes - 1):
            paths.append(path)
            tokens, depth = tokens + chance, max(depth, len(path))
            factor = speedup(tokens, depth, len(paths) + 1, costs)
            if factor > best:
                best, best_paths, best_tokens = factor, paths.copy(), tokens
    return RatedTree(Topology.from_paths(best_paths), best_tokens, best)


def _checked(rank_acceptance: Sequence[float]) -> list[float]:
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


def _check(name: str, value: float, least: float, most: float = math.inf, *, whole: bool = False) -> None:
    """Refuse a number outside its range."""
    number = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not number or not least <= value <= most or value == math.inf:
        kind = "whole numbers" if whole else "numbers"
        allowed = f"{kind} from {least:g}" + ("" if most == math.inf else f" to {most:g}")
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}")
