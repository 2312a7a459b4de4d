"""The target's laws along known texts, and how near a draft comes to them: losses and acceptance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary
from polydraft.schemes import RejectionWithoutReplacement
from polydraft.trees import causal_block

_CHUNK_BYTES = 2**29
"""Logits over all tokens are large; so many bytes of them at a time."""
_CHUNK_ROWS, _CANDIDATES = 256, 4
"""Positions whose acceptance is measured at a time, and the candidates drawn at each."""


@dataclass(frozen=True, eq=False)
class TargetLaws:
    """Short laws of some positions, with the mass that a draft cannot reach."""

    probs_RD: Tensor
    """The target's probabilities of the tokens that the draft knows; they need not sum to one."""
    best_R: Tensor
    """Column of the likeliest token, or -1 where the draft does not know it."""

    def rows(self, index: Tensor | slice) -> "TargetLaws":
        """Return the laws of some of the positions."""
        return TargetLaws(self.probs_RD[index], self.best_R[index])


class Teacher:
    """Read texts with the target and tell its features and laws.

    Parameters
    ----------
    target : HFModel
    vocabulary : PartialVocabulary, optional
        What the draft knows; all tokens if not given.
    """

    def __init__(self, target: HFModel, vocabulary: PartialVocabulary | None) -> None:
        self.target, self.vocabulary = target, vocabulary
        self._column_V: Tensor | None = None
        if vocabulary is not None:
            self._column_V = torch.full((vocabulary.size,), -1, device=target.device)
            self._column_V[vocabulary.tokens_D] = torch.arange(len(vocabulary.tokens_D), device=target.device)

    @torch.no_grad()
    def features(self, tokens_BL: Tensor) -> Tensor:
        """Return the features of every position."""
        context = self.target.start(*tokens_BL.shape)
        return context.extend(tokens_BL, causal_block(*tokens_BL.shape, self.target.device))

    @torch.no_grad()
    def laws(self, features_RF: Tensor) -> TargetLaws:
        """Return the laws that follow some positions, given by their features."""
        rows = max(_CHUNK_BYTES // (4 * self.target.vocab_size), 1)
        parts = [self._laws(part_RF) for part_RF in features_RF.split(rows)]  # type: ignore[no-untyped-call]
        return TargetLaws(torch.cat([part.probs_RD for part in parts]), torch.cat([part.best_R for part in parts]))

    def _laws(self, features_RF: Tensor) -> TargetLaws:
        logits_RV = self.target.head(features_RF).float()
        best_R = logits_RV.argmax(-1)
        normaliser_R1 = logits_RV.logsumexp(-1, keepdim=True)
        if self.vocabulary is None or self._column_V is None:
            return TargetLaws((logits_RV - normaliser_R1).exp(), best_R)
        short_RD = logits_RV[:, self.vocabulary.tokens_D]
        return TargetLaws((short_RD - normaliser_R1).exp(), self._column_V[best_R])


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


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Chance that one of n candidates is accepted."""

    greedy_1: float
    """At temperature 0, one candidate."""
    greedy_4: float
    sampled_1: float
    """At temperature 1, one candidate."""
    sampled_4: float
    """At temperature 1, four candidates drawn without replacement (MCSD Algorithm 2)."""

    def __str__(self) -> str:
        return f"α@1 {self.greedy_1:.2f}/{self.sampled_1:.2f}, α@4 {self.greedy_4:.2f}/{self.sampled_4:.2f} (T=0/T=1)"


def acceptance_of(laws: TargetLaws, logits_RD: Tensor, seed: int = 0) -> Acceptance:
    """Measure a draft's logits against the target's laws at the same positions.

    The rate with four candidates is exact given the candidates: the mass that verification puts on them.
    """
    generator = torch.Generator(logits_RD.device).manual_seed(seed)
    top_R4 = logits_RD.topk(min(_CANDIDATES, logits_RD.shape[1]), dim=-1).indices
    hits_R4 = top_R4 == laws.best_R[:, None]
    sampled_1, sampled_4 = [], []
    scheme = RejectionWithoutReplacement()
    for first in range(0, len(logits_RD), _CHUNK_ROWS):
        probs_RD, draft_RD = (
            laws.probs_RD[first : first + _CHUNK_ROWS],
            logits_RD[first : first + _CHUNK_ROWS].float().softmax(-1),
        )
        sampled_1.append(torch.minimum(probs_RD, draft_RD).sum(-1))
        # One more column for all tokens that the draft does not know.
        rest_R1 = (1 - probs_RD.double().sum(-1, keepdim=True)).clamp(min=0)
        target_RX = torch.cat([probs_RD.double(), rest_R1], dim=-1)
        draft_RX = torch.nn.functional.pad(draft_RD, (0, 1))
        uniforms_RK = torch.rand(len(draft_RX), _CANDIDATES, generator=generator, device=generator.device, dtype=torch.float64)
        children_RK = scheme.draw(draft_RX, uniforms_RK)
        law_RX = scheme.law(target_RX, draft_RX, children_RK)
        sampled_4.append((law_RX.gather(1, children_RK.clamp(min=0)) * (children_RK >= 0)).sum(-1))
    return Acceptance(
        greedy_1=hits_R4[:, 0].double().mean().item(),
        greedy_4=hits_R4.any(-1).double().mean().item(),
        sampled_1=torch.cat(sampled_1).mean().item(),
        sampled_4=torch.cat(sampled_4).mean().item(),
    )
