"""Drafts from different laws: no order of the tokens is known to be best, so all sets are tried."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.theory.laws import check_laws

MAX_VOCABULARY = 20
"""Largest vocabulary: a million sets, a second or so a row."""


def product_optimum(target_probs_RV: Tensor, draft_probs: Sequence[Tensor]) -> Tensor:
    """Optimal acceptance for one draft from each of several laws, drawn independently.

    Parameters
    ----------
    target_probs_RV : Tensor
        Laws, one row a position.
    draft_probs : sequence of Tensor
        One tensor [R, V] for each draft. At most 20 tokens: the sum over sets is enumerated. For larger vocabularies
        bound the value by the sum of the drafts' single acceptances from above and by the best of them from below.

    Returns
    -------
    Tensor
        α* of each row, float64.

    Notes
    -----
    Eq. 8 of [1] with Q(H) = ∏_j q_j(H), the third construction of its §2.3, for which it gives no algorithm: P − Q is
    submodular, but Q is not q-convex for any single q, so Theorem 6 does not apply.

    References
    ----------
    .. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
    """
    if not draft_probs:
        raise UsageError("draft_probs is empty; allowed: one law [R, V] for each draft, from one")
    named = {f"draft_probs[{index}]": draft_RV for index, draft_RV in enumerate(draft_probs)}
    check_laws(target_probs_RV=target_probs_RV, **named)
    vocabulary = target_probs_RV.shape[1]
    if vocabulary > MAX_VOCABULARY:
        raise UsageError(
            f"a vocabulary of {vocabulary:,} tokens is too large for different draft laws; allowed: at most {MAX_VOCABULARY}, "
            "because all its sets are tried; use one draft law, or merge tokens"
        )
    best = []
    for row in range(len(target_probs_RV)):
        inside_X = torch.ones(1, dtype=torch.float64, device=target_probs_RV.device)
        for draft_RV in draft_probs:
            inside_X = inside_X * subset_sums(draft_RV[row].double())
        best.append((subset_sums(target_probs_RV[row].double()) + 1 - inside_X).min())
    return torch.stack(best).clamp(max=1)


def subset_sums(weights_V: Tensor) -> Tensor:
    """Return the sum of the weights over each of the 2^V sets; token i is bit i of a set's number."""
    sums_X = weights_V.new_zeros(1)
    for weight in weights_V:
        sums_X = torch.cat([sums_X, sums_X + weight])
    return sums_X
