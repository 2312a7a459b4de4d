"""The target's laws along known texts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.models.hf import HFModel
from polydraft.sampling import PartialVocabulary
from polydraft.trees import causal_block

_CHUNK_BYTES = 2**29
"""Logits over all tokens are large; so many bytes of them at a time."""


@dataclass(frozen=True, eq=False)
class TargetLaws:
    """Short laws of some positions, with the mass that a draft cannot reach."""

    probs_RD: Tensor
    """The target's probabilities of the tokens that the draft knows; they need not sum to one."""
    best_R: Tensor
    """Column of the likeliest token, or -1 where the draft does not know it."""


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
