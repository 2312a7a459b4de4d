"""How fast speculation can be: the papers' formulas for chains of drafts, and a search for the fastest tree.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, eq. 1.
.. [2] Leviathan et al. 2023, arXiv:2211.17192, eq. 1 and Theorem 3.8.
.. [3] Chen et al., Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding, arXiv:2402.12374.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from polydraft.draft.speedup import Costs, check_number, checked_ranks, speedup
from polydraft.errors import UsageError
from polydraft.trees import MAX_NODES, Topology
from polydraft.trees.topology import paths_by_product


def chain_tokens(acceptance: float | Sequence[float], length: int | None = None) -> float:
    """Return the expected tokens per target pass from a chain of drafts, including the token after the accepted ones.

    Parameters
    ----------
    acceptance : float or sequence of float
        Chance α that a draft is accepted if all before it were: one number for all positions, or one per position.
    length : int, optional
        Number of drafts γ; required with a single acceptance.

    Returns
    -------
    float
        1 + Σ_i ∏_{j≤i} α_j. For equal α this is (1 − α^{γ+1})/(1 − α), eq. 1 of [2], and γ + 1 for α = 1.
    """
    if isinstance(acceptance, Sequence):
        chances = list(acceptance)
    elif length is None:
        raise UsageError("length is missing; a single acceptance needs the number of drafts, such as length=5")
    else:
        check_number("length", length, 0, whole=True)
        chances = [acceptance] * length
    tokens, chance = 1.0, 1.0
    for one in chances:
        check_number("acceptance", one, 0, 1)
        chance *= one
        tokens += chance
    return tokens


def improvement_factor(acceptance: float, length: int, draft_cost: float) -> float:
    """Return a chain's speed-up over plain decoding: (1 − α^{γ+1}) / ((1 − α)(cγ + 1)), eq. 1 of [1], Theorem 3.8 of [2].

    Parameters
    ----------
    acceptance : float
        α: chance that one drafted token is accepted.
    length : int
        γ: drafts per round.
    draft_cost : float
        c: time of one draft pass, relative to a target pass.

    Notes
    -----
    [1] also uses α for another number, the accepted share of the longest path, E[length]/γ, and tabulates that. It is smaller
    for imperfect drafts; convert it with `token_acceptance` first. The formula assumes that the target's pass over all drafts
    costs as much as one over a single token; `Costs` does not.
    """
    check_number("draft_cost", draft_cost, 0)
    return chain_tokens(acceptance, length) / (draft_cost * length + 1)


def token_acceptance(accepted_share: float, length: int) -> float:
    """Return the acceptance per token at which a chain of `length` drafts has the given expected share accepted.

    Parameters
    ----------
    accepted_share : float
        E[accepted drafts] / length, which [1] reports as its acceptance rate.
    length : int
        γ: drafts per round.
    """
    check_number("accepted_share", accepted_share, 0, 1)
    check_number("length", length, 1, whole=True)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_tokens(middle, length) - 1 < accepted_share * length else (low, middle)
    return high


@dataclass(frozen=True)
class RatedTree:
    """A tree with its expected tokens by the model of `tree_tokens`, and its speed-up."""

    topology: Topology
    tokens: float
    """Expected tokens per target pass."""
    speedup: float
    """Over plain decoding."""


def largest_tree(rank_acceptance: Sequence[float], nodes: int, max_depth: int | None = None) -> Topology:
    """Return the tree of at most `nodes` nodes, the root included, with the most expected tokens.

    Notes
    -----
    [3] finds it by dynamic programming. If a_k falls with k, simply take the nodes with the largest path products: a parent's
    product is at least its child's, and an elder sibling's at least a younger's, so these nodes form a tree, and no other tree
    of this size has a larger sum. Nodes that cannot be accepted are left out.
    """
    check_number("nodes", nodes, 1, MAX_NODES, whole=True)
    paths = [path for path, _ in islice(paths_by_product(checked_ranks(rank_acceptance), max_depth), nodes - 1)]
    return Topology.from_paths(paths)


def fastest_tree(rank_acceptance: Sequence[float], costs: Costs, max_nodes: int, max_depth: int) -> RatedTree:
    """Return the tree with the largest speed-up, of all sizes and depths up to those given.

    For each depth, the best trees of all sizes are prefixes of one list of nodes, so all of them are tried.
    """
    check_number("max_nodes", max_nodes, 1, MAX_NODES, whole=True)
    ranks = checked_ranks(rank_acceptance)
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
