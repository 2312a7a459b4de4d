"""Rules as users might hand them in: right ones, wrong ones, and ones that are not rules at all."""

import numpy as np
import torch

from polydraft.verify import NodeWalk, RejectionWithReplacement, Scheme


class Own(RejectionWithReplacement):
    """A scheme of one's own."""


class OwnWalk(NodeWalk):
    """A walk of one's own."""


class Choosy(RejectionWithReplacement):
    """A scheme that cannot be made without arguments."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold


class WithLaw(RejectionWithReplacement):
    """Overrides what an earlier version called; it would be ignored."""

    def law(self, target_probs_RV, draft_probs_RV, children_RK):
        return draft_probs_RV.double()


class Neither:
    """Neither a scheme nor a walk."""


class NegativeDrawing(RejectionWithReplacement):
    """A drawing that is no distribution."""

    def child_distribution(self, draft_probs_RV, earlier_RJ, count):
        return super().child_distribution(draft_probs_RV, earlier_RJ, count) - 0.5


class WrongDtype(RejectionWithReplacement):
    """A distribution in too few digits."""

    def distribution(self, target_probs_RV, draft_probs_RV, children_RK):
        return super().distribution(target_probs_RV, draft_probs_RV, children_RK).float()


class VerifiesOtherwise(RejectionWithReplacement):
    """A right distribution, and a verification that does not follow it."""

    def verify(self, target_probs_RV, draft_probs_RV, children_RK, uniforms_RU):
        return target_probs_RV.argmax(-1)


class ChangesDistributions(RejectionWithReplacement):
    """Right, but it works in the caller's tensors."""

    def verify(self, target_probs_RV, draft_probs_RV, children_RK, uniforms_RU):
        token_R = super().verify(target_probs_RV, draft_probs_RV, children_RK, uniforms_RU)
        draft_probs_RV[:] = 0
        return token_R


assert issubclass(Own, Scheme)


def right(target_probs, draft_probs, children):
    distribution, undecided = torch.zeros_like(target_probs), 1.0
    for child in children:
        accept = min(1.0, float(target_probs[child] / draft_probs[child]))
        distribution[child] += undecided * accept
        undecided *= 1 - accept
        residual = (target_probs - draft_probs).clamp(min=0)
        target_probs = residual / residual.sum() if residual.sum() > 0 else target_probs
    return distribution + undecided * target_probs


def without_residual(target_probs, draft_probs, children):
    distribution, undecided = torch.zeros_like(target_probs), 1.0
    for child in children:
        accept = min(1.0, float(target_probs[child] / draft_probs[child]))
        distribution[child] += undecided * accept
        undecided *= 1 - accept
    return distribution + undecided * target_probs


def verify(target_probs, draft_probs, children, rng):
    target_probs = target_probs.copy()
    for child in children:
        if rng.random() * draft_probs[child] < target_probs[child]:
            return child
        target_probs = np.maximum(target_probs - draft_probs, 0)
        target_probs /= target_probs.sum()
    return int(rng.choice(len(target_probs), p=target_probs))


def verify_by_torch(target_probs, draft_probs, children, rng=None):
    return torch.multinomial(target_probs, 1, generator=rng)


def verify_without_residual(target_probs, draft_probs, children, rng):
    for child in children:
        if rng.random() * draft_probs[child] < target_probs[child]:
            return child
    return int(rng.choice(len(target_probs), p=target_probs))


def top(target_probs, draft_probs, children):
    return list(target_probs)


def negative(target_probs, draft_probs, children):
    distribution = torch.full_like(target_probs, -1.0)
    distribution[0] = len(distribution)
    return distribution


def not_a_number(target_probs, draft_probs, children):
    return target_probs * float("nan")


def half(target_probs, draft_probs, children):
    return target_probs / 2


def too_short(target_probs, draft_probs, children):
    return target_probs[:1]


def nothing(target_probs, draft_probs, children):
    return None


def raises(target_probs, draft_probs, children):
    raise RuntimeError("out of order")


def no_token(target_probs, draft_probs, children, rng):
    return 0.5


def far_token(target_probs, draft_probs, children, rng):
    return len(target_probs)


def too_few(target_probs, draft_probs):
    return target_probs


NUMBER = 7
