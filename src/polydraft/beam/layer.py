"""Verification of one layer of draft beams (Algorithm 1 of [1], corrected).

References
----------
.. [1] Qin et al. 2025, Dynamic-Width Speculative Beam Decoding for LLM Inference, AAAI (arXiv:2409.16560).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polydraft.beam.chance import Chance
from polydraft.beam.law import Floats


@dataclass(frozen=True)
class LayerVerdict:
    """The beams of one layer."""

    outputs: list[int]
    """Entries of the universe, in the order in which they became certain."""
    drafts: list[int]
    """Which draft each of the first outputs is; the others were drawn anew."""
    complete: bool
    """Whether all outputs were drafted, so that the next layer can be verified."""


def verify_layer(
    target_probs_U: Floats, draft_probs_U: Floats, drafts: Sequence[int], width: int, chance: Chance, *, distinct: bool
) -> LayerVerdict:
    """Turn drafts from one beam law into `width` beams from another.

    Parameters
    ----------
    target_probs_U, draft_probs_U : array
        The beam laws of target and draft over all pairs of a surviving beam and a token. The draft's is restricted to
        surviving beams and normed: drafts below a rejected beam, orphans, are no draws from it.
    drafts : sequence of int
        What the draft drew, orphans left out, in draw order.
    width : int
        Beams wanted; it must not depend on which drafts were drawn.
    chance : Chance
    distinct : bool
        Drafts are drawn, and outputs follow the target's law, without replacement; independently otherwise.

    Notes
    -----
    Deviations from the printed algorithm, each needed for exactness (tests/beam/test_layer.py): a draft is accepted with
    chance min(1, p'/q), printed upside down; q is normed over what survives; for distinct beams q loses every draft after its
    turn, taken or not, and p every output.

    Guarantee: outputs are independent draws from the target's law, or successive ones without replacement.
    """
    target_U, draft_U, residual_U = target_probs_U, draft_probs_U, target_probs_U
    outputs: list[int] = []
    taken: list[int] = []
    for number, draft in enumerate(drafts):
        if len(outputs) == width:
            break
        if chance.accepts(float(residual_U[draft]), float(draft_U[draft])):
            outputs.append(draft)
            taken.append(number)
            if distinct:
                target_U = _without(target_U, draft)
            residual_U = target_U
        else:
            residual_U = _residual(residual_U, draft_U)
        if distinct:
            draft_U = _without(draft_U, draft)
    complete = len(outputs) == width
    if not complete:
        for entry in chance.draw(residual_U, 1, distinct=distinct):
            outputs.append(entry)
            target_U = _without(target_U, entry) if distinct else target_U
        outputs += chance.draw(target_U, width - len(outputs), distinct=distinct)
    return LayerVerdict(outputs, taken, complete)


def _residual(target_U: Floats, draft_U: Floats) -> Floats:
    """Return norm(max(p' - q, 0)), or p' where rounding left nothing of that."""
    left_U = np.maximum(target_U - draft_U, 0.0)
    total = left_U.sum()
    return left_U / total if total > 0 else target_U


def _without(probs_U: Floats, entry: int) -> Floats:
    """Return the law given that it is not `entry`."""
    left_U = probs_U.copy()
    left_U[entry] = 0.0
    total = left_U.sum()
    return left_U / total if total > 0 else left_U
