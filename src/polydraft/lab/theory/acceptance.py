"""How often a scheme's emitted token is one of its children: by formula if one is known, otherwise by sampling.

References
----------
.. [1] Hu et al., Towards Optimal Multi-Draft Speculative Decoding.
.. [2] Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport, NeurIPS 2023.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.lab.theory._formulas import (
    Formula,
    by_rows,
    check_pair,
    chunk_size,
    rejection_of_two,
    rejection_with_replacement,
    rejection_without_replacement,
    sequential_acceptance,
)
from polydraft.lab.theory.optimum import greedy_optimum, top_optimum, with_replacement_optimum
from polydraft.lab.theory.without_replacement import MAX_COUNT, inclusion
from polydraft.sampling import NO_TOKEN
from polydraft.verify import SCHEMES, Race, Scheme
from polydraft.verify.weights import normalised, ratio

_LOOKUP_SAMPLES, _DISTRIBUTION_SAMPLES, _RACE_SAMPLES = 1024, 64, 16
"""Drawings per row: where each costs a few look-ups, or passes over the vocabulary; and for races, where little is random."""


@dataclass(frozen=True, eq=False)
class RowAcceptance:
    """Acceptance of each row."""

    value_R: Tensor
    """Probability that the emitted token is one of the children, float64."""
    standard_error_R: Tensor
    """Standard error over the sampled drawings, 0 if the value is exact. Events that were never drawn are not in it."""


def acceptance(
    scheme: str | Scheme,
    target_probs_RV: Tensor,
    draft_probs_RV: Tensor,
    count: int,
    *,
    generator: torch.Generator | None = None,
    samples: int | None = None,
) -> RowAcceptance:
    """Return the acceptance of a scheme at each of many positions.

    Parameters
    ----------
    scheme : str or Scheme
        A registered name, or a scheme with options of your own.
    target_probs_RV, draft_probs_RV : Tensor
        Distributions, one row per position; each sums to one.
    count : int
        Children of each node.
    generator : torch.Generator, optional
        Source of random numbers, on the host; by default a new one with seed 0, so that results repeat.
    samples : int, optional
        Drawings per row, at least 2, if the value is not exact. By default 1024 for rrs-wor, whose drawings cost a few
        look-ups, 16 for races with buckets (race-bucketed, hybrid), where next to nothing is random, and 64 for others.

    Returns
    -------
    RowAcceptance
        Exact for speculative, naive, top, rrs-wr, kseq, greedy, spechub and race, and for rrs-wor up to two children. For
        every other scheme, children are drawn by `Scheme.draw`, and the mass of `Scheme.distribution` on them, which is exact
        given the children, is averaged (Rao-Blackwell).

    Examples
    --------
    >>> import torch
    >>> from polydraft.lab.theory import acceptance
    >>> target_probs, draft_probs = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    >>> acceptance("rrs-wr", target_probs, draft_probs, 2).value_R
    tensor([0.7500], dtype=torch.float64)
    """
    instance = SCHEMES.get(scheme)() if isinstance(scheme, str) else scheme
    check_pair(target_probs_RV, draft_probs_RV, count, most=instance.max_children)
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 2):
        raise UsageError(f"samples is {samples!r}; allowed: whole numbers from 2; one drawing has no standard error")
    # Formulas by name do not apply to subclasses, which may verify differently.
    name = instance.name if instance.name in SCHEMES and type(instance) is SCHEMES.get(instance.name) else ""
    exact = _EXACT.get(name, _EXACT_FOR_FEW.get((name, count)))
    if exact is not None:
        value_R = exact(target_probs_RV, draft_probs_RV, count)
        return RowAcceptance(value_R, torch.zeros_like(value_R))
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    estimate = _looked_up(generator, samples) if name == "rrs-wor" else _drawn(instance, generator, samples)
    moments_RX = by_rows(estimate, target_probs_RV, draft_probs_RV, count)
    return RowAcceptance(moments_RX[:, 0], moments_RX[:, 1])


def naive_acceptance(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int, *, replacement: bool) -> Tensor:
    """Return the chance that a token drawn from the target was drafted: Σ p(i) P(i drafted).

    Parameters
    ----------
    target_probs_RV, draft_probs_RV : Tensor
        Distributions, one row per position; each sums to one.
    count : int
        Drafts per position; at most 64 without replacement.
    replacement : bool
        True for independent drafts, with P(i drafted) = 1 − (1 − q(i))ⁿ; false for distinct ones as in the scheme naive, where
        the sum over all drawings is one integral, see `without_replacement.inclusion`.

    Returns
    -------
    Tensor
        Acceptance of each row, float64.
    """
    check_pair(target_probs_RV, draft_probs_RV, count, most=None if replacement else MAX_COUNT)
    formula = _independent_inclusion if replacement else inclusion
    return by_rows(formula, target_probs_RV, draft_probs_RV, count).clamp(0, 1)


def _independent_inclusion(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    drafted_RV = -torch.expm1(count * torch.log1p(-draft_RV.clamp(max=1)))
    return (target_RV * drafted_RV).sum(-1)


def _looked_up(generator: torch.Generator, samples: int | None) -> Formula:
    """Return a formula for mean and standard error over drawings of rrs-wor, which cost a few look-ups each."""

    def moments(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
        uniforms_RXK = _uniforms(len(draft_RV), samples or _LOOKUP_SAMPLES, count, generator)
        return _moments(rejection_without_replacement(target_RV, draft_RV, uniforms_RXK.movedim(-1, 0).to(draft_RV.device)))

    return moments


def _drawn(scheme: Scheme, generator: torch.Generator, samples: int | None) -> Formula:
    """Return a formula for mean and standard error over drawn children, for any scheme."""
    drawings = samples or (_RACE_SAMPLES if isinstance(scheme, Race) else _DISTRIBUTION_SAMPLES)
    picks = scheme.select_uniforms or 0 if isinstance(scheme, Race) else 0

    def moments(target_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
        rows, device, values = len(draft_RV), draft_RV.device, []
        uniforms_RXU = _uniforms(rows, drawings, count + picks, generator)
        at_once = max(1, chunk_size(device) // draft_RV.numel())
        for begin in range(0, drawings, at_once):
            copies = min(at_once, drawings - begin)
            many_target_RV, many_draft_RV = target_RV.repeat(copies, 1), draft_RV.repeat(copies, 1)
            uniforms_RU = uniforms_RXU[:, begin : begin + copies].transpose(0, 1).flatten(0, 1).to(device)
            children_RK = scheme.draw(many_draft_RV, uniforms_RU[:, :count])
            if picks:
                value_R = _race_acceptance(scheme, many_target_RV, many_draft_RV, children_RK, uniforms_RU[:, count:])
            else:
                value_R = _mass(scheme.distribution(many_target_RV, many_draft_RV, children_RK), children_RK)
            values.append(value_R.view(copies, rows).T)
        return _moments(torch.cat(values, dim=1))

    return moments


def _uniforms(rows: int, drawings: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw random numbers row by row, so that each row's are the same however many rows and drawings are computed at a time."""
    return torch.rand(rows, drawings, count, generator=generator, dtype=torch.float64)


def _moments(values_RX: Tensor) -> Tensor:
    """Return the mean over X and its standard error, side by side."""
    return torch.stack([values_RX.mean(-1), values_RX.std(-1) / values_RX.shape[1] ** 0.5], dim=1)


def _race_acceptance(scheme: Scheme, target_RV: Tensor, draft_RV: Tensor, children_RK: Tensor, uniforms_RU: Tensor) -> Tensor:
    """Return the acceptance of a race, with far less noise than by its distribution.

    Whatever is drawn, the selected child is accepted with probability Σ min(p, r). The drawn children matter only after a
    rejection, if the residual hits another of them: never if cells are single tokens, seldom if they are buckets.
    """
    selection = scheme.select(target_RV, draft_RV, children_RK, uniforms_RU)
    target_RV, token_R1 = normalised(target_RV), selection.token_R.clamp(min=0)[:, None]
    accepted_R = ratio(target_RV.gather(1, token_R1), selection.distribution_RV.gather(1, token_R1)).clamp(max=1.0)[:, 0]
    residual_RV = normalised((target_RV - selection.distribution_RV).clamp(min=0))
    return torch.minimum(target_RV, selection.distribution_RV).sum(-1) + (1 - accepted_R) * _mass(residual_RV, children_RK)


def _mass(distribution_RV: Tensor, children_RK: Tensor) -> Tensor:
    """Return the distribution's mass on the children; a child drawn twice counts once."""
    again_RKK = (children_RK[:, :, None] == children_RK[:, None, :]).tril(-1)
    counted_RK = (children_RK != NO_TOKEN) & ~again_RKK.any(-1)
    return (distribution_RV.gather(1, children_RK.clamp(min=0)) * counted_RK).sum(-1)


_EXACT: dict[str, Formula] = {
    "speculative": with_replacement_optimum,
    "naive": partial(naive_acceptance, replacement=False),
    "top": top_optimum,
    "rrs-wr": partial(by_rows, rejection_with_replacement),
    "kseq": partial(by_rows, sequential_acceptance),
    "greedy": greedy_optimum,
    "spechub": greedy_optimum,
    "race": with_replacement_optimum,
}
_EXACT_FOR_FEW: dict[tuple[str, int], Formula] = {
    ("rrs-wor", 1): with_replacement_optimum,
    ("rrs-wor", 2): partial(by_rows, rejection_of_two),
}
