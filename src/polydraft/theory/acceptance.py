"""How often a scheme's emitted token is one of its children: exact where a formula is known, sampled otherwise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.schemes import SCHEMES, Race, Scheme
from polydraft.theory.gumbel import gumbel_of_one, gumbel_race
from polydraft.theory.laws import by_rows, check_count, check_laws
from polydraft.theory.optimum import greedy_optimum, top_optimum, with_replacement_optimum
from polydraft.theory.rates import naive_acceptance, sequential_acceptance
from polydraft.theory.rejection import rejection_of_two, rejection_with_replacement, rejection_without_replacement
from polydraft.theory.sampled import moments, sampled_acceptance

Exact = Callable[[Tensor, Tensor, int], Tensor]
"""Target and draft laws and the number of children, to the acceptance of each row."""
Sampled = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Target and draft laws and uniforms_KRX, to the acceptance of each row in each of X drawings of K children."""

_LOOKUP_SAMPLES, _LAW_SAMPLES, _RACE_SAMPLES = 1024, 64, 16
"""Drawings a row where one costs some look-ups; where it costs passes over the vocabulary; where next to nothing is random."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """Acceptance of each row."""

    value_R: Tensor
    """Chance that the emitted token is one of the children, float64."""
    standard_error_R: Tensor
    """Of the value, over the sampled drawings; 0 where it is exact. It cannot know of what was not drawn once."""


def acceptance(
    scheme: str | Scheme,
    target_probs_RV: Tensor,
    draft_probs_RV: Tensor,
    count: int,
    *,
    generator: torch.Generator | None = None,
    samples: int | None = None,
) -> Estimate:
    """Tell how much a scheme accepts at each of many positions.

    Parameters
    ----------
    scheme : str or Scheme
        A registered name, or a scheme with options of your own.
    target_probs_RV, draft_probs_RV : Tensor
        Laws, one row a position; each sums to one.
    count : int
        Children of each node.
    generator : torch.Generator, optional
        Of the random numbers, on the host; without one, a new one of seed 0, so that values repeat.
    samples : int, optional
        Drawings a row where the value is not exact, at least 2. By default 1024 where a drawing costs some look-ups
        (rrs-wor, gumbel), 16 for races with buckets (race-bucketed, hybrid), where next to nothing is random, else 64.

    Returns
    -------
    Estimate
        Exact for speculative, naive, top, rrs-wr, kseq, greedy, spechub and race, for rrs-wor up to two children and for
        gumbel with one. For every other scheme children are drawn by `Scheme.draw` and the mass of `Scheme.law` on them
        is averaged, which is exact given the children (Rao-Blackwell).

    Examples
    --------
    >>> import torch
    >>> from polydraft.theory import acceptance
    >>> target_probs, draft_probs = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    >>> acceptance("rrs-wr", target_probs, draft_probs, 2).value_R
    tensor([0.7500], dtype=torch.float64)
    """
    instance = SCHEMES.get(scheme)() if isinstance(scheme, str) else scheme
    check_laws(target_probs_RV=target_probs_RV, draft_probs_RV=draft_probs_RV)
    check_count(count, most=instance.max_children)
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 2):
        raise UsageError(f"samples is {samples!r}; allowed: whole numbers from 2; one drawing has no standard error")
    name = _formula_name(instance)
    exact = _EXACT.get(name, _EXACT_FOR_FEW.get((name, count)))
    if exact is not None:
        value_R = exact(target_probs_RV, draft_probs_RV, count)
        return Estimate(value_R, torch.zeros_like(value_R))
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    estimate = partial(_sampled_moments, instance, count, generator, samples)
    moments_RX = by_rows(estimate, target_probs_RV, draft_probs_RV)
    return Estimate(moments_RX[:, 0], moments_RX[:, 1])


def _sampled_moments(
    scheme: Scheme, count: int, generator: torch.Generator, samples: int | None, target_RV: Tensor, draft_RV: Tensor
) -> Tensor:
    """Return mean and standard error of each row's acceptance over drawings of its children."""
    name = _formula_name(scheme)
    if name in _SAMPLED:
        shape = (count, len(draft_RV), samples or _LOOKUP_SAMPLES)
        uniforms_KRX = torch.rand(*shape, generator=generator, dtype=torch.float64).to(draft_RV.device)
        return moments(_SAMPLED[name](target_RV, draft_RV, uniforms_KRX))
    drawings = samples or (_RACE_SAMPLES if isinstance(scheme, Race) else _LAW_SAMPLES)
    return sampled_acceptance(scheme, target_RV, draft_RV, count, generator, drawings)


def _formula_name(scheme: Scheme) -> str:
    """Name under which formulas are known; a subclass verifies in its own way and has none."""
    known = scheme.name in SCHEMES and type(scheme) is SCHEMES.get(scheme.name)
    return scheme.name if known else ""


def _in_blocks(formula: Exact) -> Exact:
    """Give a formula of float64 laws a few rows at a time."""
    return lambda target_RV, draft_RV, count: by_rows(lambda one, other: formula(one, other, count), target_RV, draft_RV)


_EXACT: dict[str, Exact] = {
    "speculative": with_replacement_optimum,
    "naive": partial(naive_acceptance, replacement=False),
    "top": top_optimum,
    "rrs-wr": _in_blocks(rejection_with_replacement),
    "kseq": _in_blocks(sequential_acceptance),
    "greedy": greedy_optimum,
    "spechub": greedy_optimum,
    "race": with_replacement_optimum,
}
_EXACT_FOR_FEW: dict[tuple[str, int], Exact] = {
    ("rrs-wor", 1): with_replacement_optimum,
    ("rrs-wor", 2): _in_blocks(lambda target_RV, draft_RV, _: rejection_of_two(target_RV, draft_RV)),
    ("gumbel", 1): _in_blocks(lambda target_RV, draft_RV, _: gumbel_of_one(target_RV, draft_RV)),
}
_SAMPLED: dict[str, Sampled] = {"rrs-wor": rejection_without_replacement, "gumbel": gumbel_race}
