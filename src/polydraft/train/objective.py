"""Losses for drafts: imitate the target's distribution, and get candidates accepted.

The acceptance of one candidate is Σ min(p, q), so its complement, the total variation, can be trained directly. The same holds
for the n candidates of a node if they are verified by `hybrid`: let T be the m tokens that are certain candidates, q' the
distribution of the others, and k = n − m the number of draws from it. Then acceptance is P(T) + 1 − max_H (q'(H)^k − p(H)) over
sets H of other tokens. The best H consists of the tokens with k q'(H)^(k − 1) q' > p. A few steps find it, starting from all
tokens; the gradient for a fixed H is known.

Gradients are computed by hand together with the loss. Most of the memory traffic in training is due to these distributions,
over tens of thousands of tokens at tens of thousands of positions; this way they are read a dozen times instead of about
thirty.
"""

from typing import Any

import torch
from torch import Tensor

from polydraft.verify import Hybrid

_CHUNK_BYTES = 2**28
_STEPS = 4
"""Steps towards the best H; in tests, acceptance is then within 0.01 of the largest."""
_TRUST = 3.0
"""How fast ``lk`` moves from imitation to acceptance as drafts get better."""


def loss_of(kind: str, probs_RD: Tensor, logits_RD: Tensor, weights_R: Tensor, candidates: int = 1) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses at all positions, and the acceptance at each.

    Parameters
    ----------
    kind : str
        ``kl``: −Σ p log q, the Kullback–Leibler divergence up to a constant. ``tv``: the probability that all candidates are
        rejected. Its gradient vanishes where distributions do not overlap, so it is for the end of training, or for sums.
        ``kl+tv``: the sum. ``lk``: λ times the first plus 1 − λ times the second, with λ = exp(−3 · acceptance) at each
        position (arXiv:2602.23881).
    probs_RD : Tensor
        The target's probabilities of the tokens that the draft knows; they need not sum to one.
    candidates : int
        Number of candidates per node of the tree.
    """
    apply: Any = _Objective.apply
    loss, accepted_R = apply(logits_RD, probs_RD, weights_R, kind, candidates)
    return loss, accepted_R


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RD: Tensor, probs_RD: Tensor, weights_R: Tensor, kind: str, candidates: int
    ) -> tuple[Tensor, Tensor]:
        gradient_RD = torch.empty_like(logits_RD)
        accepted_R = torch.empty_like(probs_RD[:, 0])
        loss = accepted_R.new_zeros(())
        rows = max(_CHUNK_BYTES // (4 * logits_RD.shape[1]), 1)
        for first in range(0, len(logits_RD), rows):
            part = slice(first, first + rows)
            target_RD, weight_R1 = probs_RD[part], weights_R[part, None]
            scores_RD = logits_RD[part].to(target_RD.dtype, copy=True)  # becomes the draft's distribution in place
            normaliser_R1 = scores_RD.logsumexp(-1, keepdim=True)
            mass_R1 = target_RD.sum(-1, keepdim=True)
            divergence_R1 = normaliser_R1 * mass_R1 - (target_RD * scores_RD).sum(-1, keepdim=True)
            draft_RD = scores_RD.sub_(normaliser_R1).exp_()
            accepted_R1, slope_RD = _acceptance(target_RD, draft_RD, candidates)
            imitation, success = _shares(kind, accepted_R1)
            loss = loss + (weight_R1 * (imitation * divergence_R1 + success * (1 - accepted_R1))).sum()
            slope_RD.mul_(-success * weight_R1)
            slope_RD.addcmul_(draft_RD, imitation * mass_R1 * weight_R1)
            gradient_RD[part] = slope_RD.addcmul_(target_RD, imitation * weight_R1, value=-1)
            accepted_R[part] = accepted_R1[:, 0]
        ctx.save_for_backward(gradient_RD)
        ctx.mark_non_differentiable(accepted_R)
        return loss, accepted_R

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_RD,) = ctx.saved_tensors
        return gradient_RD.mul_(upstream[0].to(gradient_RD.dtype)), None, None, None, None


def _shares(kind: str, accepted_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of imitation and of acceptance in a loss."""
    if kind == "lk":
        imitation_R1 = (-_TRUST * accepted_R1).exp()
        return imitation_R1, 1 - imitation_R1
    one = torch.ones_like(accepted_R1)
    return one * ("kl" in kind), one * ("tv" in kind)


def _acceptance(target_RD: Tensor, draft_RD: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Return the acceptance of each row, and its gradient with respect to the draft's logits."""
    certain_R1: Tensor | float = 0.0
    draws_R1: Tensor | float = 1.0
    if candidates > 1:
        value_RK, token_RK = draft_RD.topk(min(candidates, draft_RD.shape[1]), dim=-1)
        left_K = candidates - torch.arange(value_RK.shape[1], device=value_RK.device)
        rest_RK = 1 - value_RK.cumsum(-1) + value_RK
        likely_RK = (value_RK * left_K >= rest_RK * Hybrid.usual_threshold) & (left_K > 1) & (value_RK < rest_RK)
        certain_RK = likely_RK.cumprod(-1).bool()
        draws_R1 = candidates - certain_RK.sum(-1, keepdim=True).to(draft_RD.dtype)
        known_RK = target_RD.gather(1, token_RK)
        certain_R1 = (known_RK * certain_RK).sum(-1, keepdim=True)
        target_RD = target_RD.scatter(1, token_RK, known_RK * ~certain_RK)
        rest_R1 = 1 - (value_RK * certain_RK).sum(-1, keepdim=True)
        draft_RD = draft_RD.scatter(1, token_RK, value_RK * ~certain_RK).div_(rest_R1.clamp(min=1e-6))
    reach_R1, steep_R1 = torch.ones_like(target_RD[:, :1]), draws_R1 * torch.ones_like(target_RD[:, :1])
    for _ in range(1 if candidates == 1 else _STEPS):
        chosen_RD = (draft_RD * steep_R1) > target_RD
        reach_R1 = (draft_RD * chosen_RD).sum(-1, keepdim=True)
        steep_R1 = draws_R1 * reach_R1 ** (draws_R1 - 1)
    excess_R1 = reach_R1**draws_R1 - (target_RD * chosen_RD).sum(-1, keepdim=True)
    accepted_R1 = (1 + certain_R1 - excess_R1).clamp(0, 1)
    slope_RD = (reach_R1 - chosen_RD.to(draft_RD.dtype)).mul_(draft_RD).mul_(steep_R1)
    return accepted_R1, slope_RD
