"""Optimal acceptance of any draft law at all, by linear programming: the reference that the formulas are tested against.

A draft law is a table from tuples of tokens to probabilities. Only for tiny vocabularies; needs scipy.

References
----------
.. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from polydraft.errors import UsageError
from polydraft.theory.laws import SUM_TOLERANCE

DraftLaw = Mapping[tuple[int, ...], float]
"""Probability of each tuple of drafts; tuples may differ in length where support runs out."""

MAX_VARIABLES = 100_000
"""Pairs of a tuple and one of its tokens; at the limit the solver takes minutes."""


def linear_program_optimum(target: Sequence[float], law: DraftLaw) -> float:
    """Optimal acceptance for one position.

    Parameters
    ----------
    target : sequence of float
        The target's law.
    law : mapping
        The drafts' joint law, see `DraftLaw`.

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
    _check_table("law", list(law.values()))
    if any(not 0 <= token < len(target) for drafts in law for token in drafts):
        raise UsageError(f"law has a token outside the vocabulary; allowed: 0 to {len(target) - 1}")
    pairs = [(token, row) for row, drafts in enumerate(law, start=len(target)) for token in sorted(set(drafts))]
    if not pairs:
        return 0.0
    if len(pairs) > MAX_VARIABLES:
        raise UsageError(f"law has {len(pairs):,} pairs of a tuple and a token; allowed: at most {MAX_VARIABLES:,}")
    places = [place for pair in pairs for place in pair]
    columns = [column for column in range(len(pairs)) for _ in range(2)]
    sides = csr_matrix(([1.0] * len(places), (places, columns)), shape=(len(target) + len(law), len(pairs)))
    limits = [*target, *law.values()]
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = linprog([-1.0] * len(pairs), A_ub=sides, b_ub=limits, bounds=(0, None), method="highs", options=tight)
    assert result.status == 0, result.message
    return min(float(-result.fun), 1.0)


def subset_optimum(target: Sequence[float], law: DraftLaw) -> float:
    """Return the same by trying all sets of tokens, eq. 8 of [1]: exact to rounding, at most 20 tokens."""
    _check_table("target", list(target))
    _check_table("law", list(law.values()))
    if len(target) > 20:
        raise UsageError(f"a vocabulary of {len(target):,} tokens has too many sets; allowed: at most 20")
    drawn = {drafts: sum(1 << token for token in set(drafts)) for drafts in law}
    best = 1.0
    for chosen in range(1 << len(target)):
        outside = math.fsum(chance for drafts, chance in law.items() if drawn[drafts] & ~chosen)
        best = min(best, math.fsum(p for token, p in enumerate(target) if chosen >> token & 1) + outside)
    return best


def product_law(*drafts: Sequence[float]) -> dict[tuple[int, ...], float]:
    """One independent draft from each law; the same law n times is drawing with replacement."""
    tokens = itertools.product(*([token for token, chance in enumerate(law) if chance > 0] for law in drafts))
    return {tuples: math.prod(law[token] for law, token in zip(drafts, tuples, strict=True)) for tuples in tokens}


def without_replacement_law(draft: Sequence[float], count: int) -> dict[tuple[int, ...], float]:
    """`count` drafts one after the other, each from the law without the earlier ones (eq. 6 of [1])."""
    table: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(min(count, sum(chance > 0 for chance in draft))):
        longer = {}
        for drafts, chance in table.items():
            left = {token: weight for token, weight in enumerate(draft) if weight > 0 and token not in drafts}
            total = math.fsum(left.values())
            longer.update({(*drafts, token): chance * weight / total for token, weight in left.items()})
        table = longer
    return table


def hybrid_law(draft: Sequence[float], count: int, fixed: int) -> dict[tuple[int, ...], float]:
    """Return the `fixed` likeliest tokens, then independent drafts from the others; n − 1 fixed ones are the greedy law."""
    ranked = sorted((token for token, chance in enumerate(draft) if chance > 0), key=lambda token: -draft[token])
    top, rest = tuple(ranked[:fixed]), ranked[fixed:]
    total = math.fsum(draft[token] for token in rest)
    if not rest:
        return {top: 1.0}
    others = [draft[token] / total if token in rest else 0.0 for token in range(len(draft))]
    return {top + drafts: chance for drafts, chance in product_law(*[others] * (count - fixed)).items()}


def _check_table(name: str, values: list[float]) -> None:
    if not all(value >= 0 for value in values):
        raise UsageError(f"{name} has a negative entry or one that is not a number; allowed: probabilities from 0")
    if abs(math.fsum(values) - 1) > SUM_TOLERANCE:
        raise UsageError(f"{name} sums to {math.fsum(values):.6g}; allowed: 1 within {SUM_TOLERANCE:g}")
