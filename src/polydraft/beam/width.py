"""How many beams a layer should keep: as many as its drafts will likely yield (eqs. 2 to 7 of [1], corrected).

References
----------
.. [1] Qin et al. 2025, Dynamic-Width Speculative Beam Decoding for LLM Inference, AAAI (arXiv:2409.16560).
"""

import numpy as np

from polydraft.beam.law import Floats


def acceptance_chances(target_probs_U: Floats, draft_probs_U: Floats, drafts: int) -> list[float]:
    """Return α_j, the chance that the j-th draft in a row is accepted after all before it were not (eq. 4)."""
    chances, residual_U = [], target_probs_U
    for _ in range(drafts):
        chances.append(min(float(np.minimum(residual_U, draft_probs_U).sum()), 1.0))
        left_U = np.maximum(residual_U - draft_probs_U, 0.0)
        total = left_U.sum()
        residual_U = left_U / total if total > 0 else residual_U
    return chances


def count_law(chances: list[float]) -> Floats:
    """Return P(m, k), the chance that k of m independent drafts are accepted, for k = 0 to m (eqs. 2 and 3).

    Notes
    -----
    P(m, 0) = ∏ (1 - α_j), which the paper leaves out. After an acceptance everything begins anew with the drafts left, so
    P(m, k) = Σ_i α_i ∏_{j<i} (1 - α_j) P(m - i, k - 1).
    """
    total = len(chances)
    law_MK = np.zeros((total + 1, total + 1))
    none_before = np.concatenate([[1.0], np.cumprod(1.0 - np.array(chances))])
    law_MK[:, 0] = none_before
    first = np.array(chances) * none_before[:-1]
    for drafts in range(1, total + 1):
        law_MK[drafts, 1:] = first[:drafts] @ law_MK[drafts - 1 :: -1, :-1]
    chances_K: Floats = law_MK[total]
    return chances_K


def dynamic_width(target_probs_U: Floats, draft_probs_U: Floats, drafts: int, *, threshold: float, least: int) -> int:
    """Return the largest width that is reached with chance `threshold` at least, and no less than `least` (eqs. 5 to 7).

    Notes
    -----
    The sum of eq. 5 begins at k = 0. It looks at the laws and at the number of drafts, never at which they are: a width
    that did would change the law of the beams. For distinct drafts the recursion is an estimate, which costs no exactness.
    """
    chances = count_law(acceptance_chances(target_probs_U, draft_probs_U, drafts))
    reached = 1.0 - np.concatenate([[0.0], np.cumsum(chances)[:-1]])  # P(at least K) for K = 0 to m
    widest = max(width for width in range(drafts + 1) if width == 0 or reached[width] >= threshold)
    return max(least, widest)
