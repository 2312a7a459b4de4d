"""Which optimum a scheme is to be held against: that of its own way of drawing drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from polydraft.schemes import Greedy, Hybrid, Naive, Scheme, SpecHub, Top
from polydraft.theory import (
    conditional_poisson_optimum,
    greedy_optimum,
    hybrid_optimum,
    top_optimum,
    with_replacement_optimum,
    without_replacement_optimum,
)

Optimum = Callable[[Tensor, Tensor, int], Tensor]
"""Target and draft laws and the number of drafts, to the largest acceptance of each row."""


@dataclass(frozen=True)
class Drawing:
    """A way of drawing drafts."""

    name: str
    optimum: Optimum
    published: Optimum | None = None
    """What the paper prints for it; None where it has nothing."""


WITH_REPLACEMENT = Drawing("independent", with_replacement_optimum, with_replacement_optimum)
WITHOUT_REPLACEMENT = Drawing("distinct", without_replacement_optimum, conditional_poisson_optimum)
GREEDY = Drawing("greedy", greedy_optimum, greedy_optimum)
TOP = Drawing("top", top_optimum)


def drawing_of(scheme: Scheme) -> Drawing | None:
    """Return how a scheme draws, or None where that is not known.

    `child_law` is the way of drawing, so a subclass that keeps it keeps the optimum, and one that replaces it has to say by
    `replacement` what it draws.
    """
    law = type(scheme).child_law
    if law is Hybrid.child_law:
        return Drawing("hybrid", _own_optimum(cast(Hybrid, scheme)))
    known = {Greedy.child_law: GREEDY, SpecHub.child_law: GREEDY, Top.child_law: TOP, Naive.child_law: WITHOUT_REPLACEMENT}
    declared = {True: WITH_REPLACEMENT, False: WITHOUT_REPLACEMENT, None: None}
    return known.get(law, declared[scheme.replacement])


def _own_optimum(scheme: Hybrid) -> Optimum:
    """Return the optimum for as many certain drafts as this scheme takes at each position: those whose law is one token."""

    def optimum(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
        rows = len(draft_probs_RV)
        certain_R = torch.zeros(rows, dtype=torch.long, device=draft_probs_RV.device)
        raised_RV = draft_probs_RV.double()
        for rank in range(count):
            law_RV = scheme.child_law(draft_probs_RV.double(), certain_R.new_zeros(rows, rank), count)
            sure_R = (certain_R == rank) & (law_RV.amax(-1) == 1)
            if not sure_R.any():
                break
            certain_R += sure_R
            # Of equally likely tokens it is the scheme's that are certain: put above the others, whose law that leaves alone.
            raised_RV = raised_RV.scatter_add(1, law_RV.argmax(-1, keepdim=True), sure_R[:, None].double())
        return hybrid_optimum(target_probs_RV, raised_RV / raised_RV.sum(-1, keepdim=True), count, certain_R)

    return optimum
