"""From acceptance to speed: tokens a target pass, what a round costs, and their quotient.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, eq. 1.
.. [2] Leviathan et al. 2023, arXiv:2211.17192, eq. 1 and Theorem 3.8.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polydraft.errors import UsageError

CostCurve = Callable[[int], float]
"""Tokens of one target pass to its cost, in passes over one token."""


def chain_tokens(acceptance: float | Sequence[float], length: int | None = None) -> float:
    """Return the expected tokens a target pass from a chain of drafts, the token after the accepted ones included.

    Parameters
    ----------
    acceptance : float or sequence of float
        Chance α that a draft is accepted if all before it were: one number for all places, or one a place.
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
        γ: drafts a round.
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
        γ: drafts a round.
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
    """Everything else, once a round."""

    def __post_init__(self) -> None:
        _check("draft_level", self.draft_level, 0)
        _check("overhead", self.overhead, 0)

    def of_round(self, levels: int, nodes: int) -> float:
        """Cost of drafting `levels` levels and verifying a tree of `nodes` nodes, the root included."""
        return self.draft_level * levels + self.tree_pass(nodes) + self.overhead


def speedup(tokens: float, levels: int, nodes: int, costs: Costs) -> float:
    """Speed-up over plain decoding: tokens a round over the cost of the round.

    `improvement_factor` is the case of a chain (`tokens` from `chain_tokens`, levels γ) with a flat cost curve.

    Parameters
    ----------
    tokens : float
        Expected tokens a round, as `chain_tokens` or `tree_tokens` give.
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


def _check(name: str, value: float, least: float, most: float = math.inf, *, whole: bool = False) -> None:
    """Refuse a number outside its range."""
    number = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not number or not least <= value <= most or value == math.inf:
        kind = "whole numbers" if whole else "numbers"
        allowed = f"{kind} from {least:g}" + ("" if most == math.inf else f" to {most:g}")
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}")
