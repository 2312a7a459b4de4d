"""Optimal acceptance for any joint distribution of drafts over a tiny vocabulary: the reference that formulas are tested with.

The distribution is a table from tuples of tokens to probabilities. A linear program (which needs scipy), or a search over all
sets of tokens, finds its optimum.

References
----------
.. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.lab.theory._formulas import SUM_TOLERANCE, check_distributions

DraftDistribution = Mapping[tuple[int, ...], float]
"""Probability of each tuple of drafts; tuples are shorter if the support runs out."""

MAX_VARIABLES = 100_000
"""Most pairs of a tuple and one of its tokens; with this many the solver takes minutes."""
MAX_VOCABULARY = 20
"""Most tokens if all sets are tried: that is a million sets, and takes a second or so per row."""


def linear_program_optimum(target: Sequence[float], distribution: DraftDistribution) -> float:
    """Optimal acceptance for one position.

    Parameters
    ----------
    target : sequence of float
        The target's distribution.
    distribution : mapping
        The drafts' joint distribution, see `DraftDistribution`.

    Notes
    -----
    Eq. 9 of [1]: maximise the mass that goes from a tuple to one of its own tokens, without taking more than p(i) to any
    token or more than its probability from any tuple.
    """
    try:
        from scipy.optimize import linprog  # type: ignore[import-untyped]
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError("linear programs need scipy, which is not installed; install polydraft[bench], or scipy") from None

    _check_table("target", list(target))
    _check_table("distribution", list(distribution.values()))
    if any(not 0 <= token < len(target) for drafts in distribution for token in drafts):
        raise UsageError(f"distribution has a token outside the vocabulary; allowed: 0 to {len(target) - 1}")
    pairs = [(token, row) for row, drafts in enumerate(distribution, start=len(target)) for token in sorted(set(drafts))]
    if not pairs:
        return 0.0
    if len(pairs) > MAX_VARIABLES:
        raise UsageError(f"distribution has {len(pairs):,} pairs of a tuple and a token; allowed: at most {MAX_VARIABLES:,}")
    places = [place for pair in pairs for place in pair]
    columns = [column for column in range(len(pairs)) for _ in range(2)]
    sides = csr_matrix(([1.0] * len(places), (places, columns)), shape=(len(target) + len(distribution), len(pairs)))
    limits = [*target, *distribution.values()]
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = linprog([-1.0] * len(pairs), A_ub=sides, b_ub=limits, bounds=(0, None), method="highs", options=tight)
    assert result.status == 0, result.message
    return min(float(-result.fun), 1.0)


def subset_optimum(target: Sequence[float], distribution: DraftDistribution) -> float:
    """Return the same as `linear_program_optimum` by trying all sets of at most 20 tokens, eq. 8 of [1]; exact to rounding."""
    _check_table("target", list(target))
    _check_table("distribution", list(distribution.values()))
    if len(target) > MAX_VOCABULARY:
        raise UsageError(f"a vocabulary of {len(target):,} tokens has too many sets; allowed: at most {MAX_VOCABULARY}")
    drawn = {drafts: sum(1 << token for token in set(drafts)) for drafts in distribution}
    best = 1.0
    for chosen in range(1 << len(target)):
        outside = math.fsum(chance for drafts, chance in distribution.items() if drawn[drafts] & ~chosen)
        best = min(best, math.fsum(p for token, p in enumerate(target) if chosen >> token & 1) + outside)
    return best


def product_optimum(target_probs_RV: Tensor, draft_probs: Sequence[Tensor]) -> Tensor:
    """Optimal acceptance for one draft from each of several distributions, drawn independently.

    Parameters
    ----------
    target_probs_RV : Tensor
        Probabilities, one row per position.
    draft_probs : sequence of Tensor
        One tensor [R, V] for each draft. At most 20 tokens, because all sets of tokens are enumerated. For larger vocabularies,
        the sum of the drafts' single acceptances is an upper bound, and the largest of them a lower bound.

    Returns
    -------
    Tensor
        α* of each row, float64.

    Notes
    -----
    Eq. 8 of [1] with Q(H) = ∏_j q_j(H), the third construction of its §2.3, for which it gives no algorithm: P − Q is
    submodular, but Q is not q-convex for any single q, so Theorem 6 does not apply.
    """
    if not draft_probs:
        raise UsageError("draft_probs is empty; allowed: one distribution [R, V] per draft, at least one")
    named = {f"draft_probs[{index}]": draft_RV for index, draft_RV in enumerate(draft_probs)}
    check_distributions(target_probs_RV=target_probs_RV, **named)
    vocabulary = target_probs_RV.shape[1]
    if vocabulary > MAX_VOCABULARY:
        raise UsageError(
            f"a vocabulary of {vocabulary:,} tokens is too large for different draft distributions; allowed: at most "
            f"{MAX_VOCABULARY}, because all its sets are tried; use one draft distribution, or merge tokens"
        )
    best = []
    for row in range(len(target_probs_RV)):
        inside_X = torch.ones(1, dtype=torch.float64, device=target_probs_RV.device)
        for draft_RV in draft_probs:
            inside_X = inside_X * _subset_sums(draft_RV[row].double())
        best.append((_subset_sums(target_probs_RV[row].double()) + 1 - inside_X).min())
    return torch.stack(best).clamp(max=1)


def without_replacement_distribution(draft: Sequence[float], count: int) -> dict[tuple[int, ...], float]:
    """Return the distribution of `count` drafts drawn one by one, each without the earlier tokens (eq. 6 of [1])."""
    table: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(min(count, sum(chance > 0 for chance in draft))):
        longer = {}
        for drafts, chance in table.items():
            left = {token: weight for token, weight in enumerate(draft) if weight > 0 and token not in drafts}
            total = math.fsum(left.values())
            longer.update({(*drafts, token): chance * weight / total for token, weight in left.items()})
        table = longer
    return table


def _check_table(name: str, values: list[float]) -> None:
    if not all(value >= 0 for value in values):
        raise UsageError(f"{name} has a negative entry or one that is not a number; allowed: probabilities from 0")
    if abs(math.fsum(values) - 1) > SUM_TOLERANCE:
        raise UsageError(f"{name} sums to {math.fsum(values):.6g}; allowed: 1 within {SUM_TOLERANCE:g}")


def _subset_sums(weights_V: Tensor) -> Tensor:
    """Return the sum of the weights over each of the 2^V sets; token i is bit i of a set's number."""
    sums_X = weights_V.new_zeros(1)
    for weight in weights_V:
        sums_X = torch.cat([sums_X, sums_X + weight])
    return sums_X
