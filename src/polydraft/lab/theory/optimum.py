"""The largest acceptance that any exact verifier can have, for each way of drawing n drafts from one distribution.

All follow from one minimum over sets (eq. 8 and 15 of [1]): a verifier accepts at most α* = min over sets H of
P(H) + (1 − Q(H)), where P(H) is the target's mass on H and Q(H) the chance that all drafts fall into H. If all drafts come from
one distribution, the best H consists of the tokens with the largest q/p, so one sort and one scan find it (Theorem 6 of [1]).

References
----------
.. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
"""

import math
from functools import partial

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.lab.theory._formulas import by_rows, check_pair
from polydraft.lab.theory.without_replacement import MAX_COUNT, escape_chances, mass_behind


def with_replacement_optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Optimal acceptance for `count` independent drafts; the scheme race attains it, as does speculative with one draft.

    Parameters
    ----------
    target_probs_RV, draft_probs_RV : Tensor
        Distributions, one row per position; each sums to one.
    count : int
        Drafts per position, n.

    Returns
    -------
    Tensor
        α* of each row, float64.

    Notes
    -----
    §4.2 of [1] with Q(H) = q(H)ⁿ. 1 − Q is computed from the mass outside H, which keeps its digits when q(H) is near one.
    """
    check_pair(target_probs_RV, draft_probs_RV, count)
    return by_rows(_independent, target_probs_RV, draft_probs_RV, count)


def without_replacement_optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Optimal acceptance for `count` drafts drawn one after the other without replacement (eq. 6 of [1]).

    Parameters and result as for `with_replacement_optimum`; `count` at most 64.

    Notes
    -----
    Q comes from `escape_chances` and is correct to about 1e-10 (1e-14 up to 4 drafts), even if nearly all draft mass is on
    fewer than n tokens. If the draft's support has at most n tokens, α* is the target's mass on it.

    Deviation from [1]: its §4.2.2 computes another Q, see `conditional_poisson_optimum`. [1] proves that the best H is a
    prefix for that other Q; for this one it is proved only for n ≤ 2. No exception is known (the tests compare with all sets),
    and any would make this function return too much, so it is an upper bound in any case.
    """
    check_pair(target_probs_RV, draft_probs_RV, count, most=MAX_COUNT)
    return by_rows(_distinct, target_probs_RV, draft_probs_RV, count)


def conditional_poisson_optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Optimal acceptance as [1] prints it for drawing without replacement, although its formula is for another way of drawing.

    Parameters and result as for `with_replacement_optimum`.

    Notes
    -----
    §4.2.2 of [1] takes Q(H) = W_n(H) / W_n(Σ), with W_n(H) the coefficient of tⁿ in ∏_{i∈H} (1 + q(i)t). That is the
    distribution of n independent draws given that they are distinct (conditional Poisson sampling): a set of drafts has
    probability proportional to the product of its q. Drawing one after the other, each from q without the earlier ones (eq. 6
    of [1], and what every implementation does), gives other sets: likely tokens use up their mass early, so unlikely ones are
    drawn more often. The two agree for n = 1, for uniform q, and if every token is drawn.

    So this value does not bound what verifiers of sequential drafts accept. For p = (1, 0, 0), q = (.6, .2, .2), n = 2 it is
    6/7 = .857, while token 0 is drafted, and accepted, with probability 1 − 2 · (.2 · .2/.8) = .9. Table 1 of [1] has such a
    case on real text, 36.4 against 36.9. The value can also be too large, by .10 and more at V = 6. Use
    `without_replacement_optimum` for a bound; this function is here to reproduce the paper.

    Computed in logarithms of b_j = j! W_j, which are probabilities: b_j(H ∪ x) = b_j(H) + j q(x) b_{j−1}(H).
    """
    check_pair(target_probs_RV, draft_probs_RV, count)
    return by_rows(_conditional_poisson, target_probs_RV, draft_probs_RV, count)


def top_optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Optimal acceptance if the drafts are the `count` likeliest tokens: the target's mass on them.

    Parameters and result as for `with_replacement_optimum`. Ties are broken as by `torch.topk`.
    """
    return hybrid_optimum(target_probs_RV, draft_probs_RV, count, count)


def greedy_optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Optimal acceptance if the drafts are the n − 1 likeliest tokens and one drawn from the others (eq. 20 of [1]).

    Parameters and result as for `with_replacement_optimum`.
    """
    return hybrid_optimum(target_probs_RV, draft_probs_RV, count, count - 1)


def hybrid_optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int, fixed: int | Tensor) -> Tensor:
    """Optimal acceptance for the `fixed` likeliest tokens and `count` − `fixed` independent draws from the others as drafts.

    Parameters
    ----------
    target_probs_RV, draft_probs_RV, count
        As for `with_replacement_optimum`.
    fixed : int or Tensor
        Number of drafts that are not random, 0 to `count`; one number, or one per row. 0 gives `with_replacement_optimum`,
        n − 1 `greedy_optimum`, n `top_optimum`.

    Returns
    -------
    Tensor
        α* = P(T) + 1 − max_H (Q(H) − P(H)) over sets H outside the likeliest tokens T, float64.
    """
    check_pair(target_probs_RV, draft_probs_RV, count)
    fixed_R = torch.as_tensor(fixed, device=draft_probs_RV.device).expand(len(draft_probs_RV))
    if fixed_R.is_floating_point() or fixed_R.min() < 0 or fixed_R.max() > count:
        raise UsageError(f"fixed is {fixed}; allowed: whole numbers from 0 to count, {count}")
    value_R = torch.empty(len(draft_probs_RV), dtype=torch.float64, device=draft_probs_RV.device)
    for kept in sorted(set(fixed_R.tolist())):
        rows_X = (fixed_R == kept).nonzero()[:, 0]
        formula = partial(_fixed_and_drawn, fixed=kept)
        value_R[rows_X] = by_rows(formula, target_probs_RV[rows_X], draft_probs_RV[rows_X], count)
    return value_R


def _fixed_and_drawn(target_RV: Tensor, draft_RV: Tensor, count: int, fixed: int) -> Tensor:
    """Return P(T) plus the most that independent draws from q without T can cover of the rest; T has only tokens with mass."""
    places_RK = draft_RV.topk(min(fixed, draft_RV.shape[1]), dim=1).indices
    top_RV = torch.zeros_like(draft_RV, dtype=torch.bool).scatter_(1, places_RK, True) & (draft_RV > 0)
    sure_R = (target_RV * top_RV).sum(-1)
    if fixed == count:
        return sure_R.clamp(max=1)
    others_RV = draft_RV.masked_fill(top_RV, 0.0)
    mass_R1 = others_RV.sum(-1, keepdim=True)
    distribution_RV = others_RV / torch.where(mass_R1 > 0, mass_R1, 1.0)
    covered_R = _independent(target_RV.masked_fill(top_RV, 0.0), distribution_RV, count - fixed)
    return (sure_R + torch.where(mass_R1[:, 0] > 0, covered_R, 0.0)).clamp(max=1)


def _independent(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Return α* for draws with replacement; the target's mass may be less than one."""
    if count == 1:
        return torch.minimum(target_RV, draft_RV).sum(-1).clamp(max=1)  # eq. 3 of [1], without a sort
    target_RV, draft_RV = _by_ratio(target_RV, draft_RV)
    return _best_prefix(target_RV, -torch.expm1(count * torch.log1p(-mass_behind(draft_RV).clamp(max=1))))


def _distinct(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Return α* for draws without replacement."""
    target_RV, draft_RV = _by_ratio(target_RV, draft_RV)
    support = int((draft_RV > 0).sum(-1).max())  # tokens without draft mass come last and cannot be drawn
    return _best_prefix(target_RV[:, :support], escape_chances(draft_RV[:, :support], count))


def _conditional_poisson(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Return α* for independent draws given that they are distinct."""
    target_RV, draft_RV = _by_ratio(target_RV, draft_RV)
    log_draft_RV = draft_RV.log()
    log_sum_RV = log_draft_RV.logcumsumexp(-1)
    for order in range(2, count + 1):
        before_RV = torch.nn.functional.pad(log_sum_RV[:, :-1], (1, 0), value=-torch.inf)
        log_sum_RV = (log_draft_RV + before_RV).logcumsumexp(-1) + math.log(order)
    inside_RV = torch.exp(log_sum_RV - log_sum_RV[:, -1:])
    support_R1 = (draft_RV > 0).sum(-1, keepdim=True)
    whole_RV = (draft_RV > 0).cumsum(-1) == support_R1
    escape_RV = 1 - torch.where(support_R1 < count, whole_RV.double(), inside_RV)
    return _best_prefix(target_RV, escape_RV.clamp(min=0))


def _by_ratio(target_RV: Tensor, draft_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Sort both distributions by falling q/p: tokens without target mass first, tokens without draft mass last."""
    order_RV = torch.where(draft_RV > 0, draft_RV / target_RV, -1.0).argsort(dim=-1, descending=True)
    return target_RV.gather(1, order_RV), draft_RV.gather(1, order_RV)


def _best_prefix(target_RV: Tensor, escape_RV: Tensor) -> Tensor:
    """Return the minimum of P(H) + (1 − Q(H)) over prefixes H, the empty one included: eq. 15 of [1]."""
    return (target_RV.cumsum(-1) + escape_RV).amin(-1).clamp(max=1)
