"""How far a draft's law is from the target's."""

from torch import Tensor

from polydraft.train.laws import TargetLaws


def loss_of(kind: str, laws: TargetLaws, logits_RD: Tensor) -> Tensor:
    """Return the mean loss over positions.

    ``kl`` is −Σ p log q, the Kullback–Leibler divergence up to a constant. ``tv`` is 1 − Σ min(p, q), the chance that
    speculative sampling rejects; its gradient vanishes where laws do not overlap, so it serves to finish, or as a sum.
    """
    log_probs_RD = logits_RD.float().log_softmax(-1)
    loss = log_probs_RD.new_zeros(())
    if "kl" in kind:
        loss = loss - (laws.probs_RD * log_probs_RD).sum(-1).mean()
    if "tv" in kind:
        loss = loss + 1 - log_probs_RD.exp().minimum(laws.probs_RD).sum(-1).mean()
    return loss
