"""Laws of both models at the same positions, in as few columns as their comparison needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.errors import FailureError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.sampling import PartialVocabulary, SamplingParams, Warper

_CHUNK_BYTES = 2**28
"""Logits over all tokens are large; so many bytes of them at a time."""


@dataclass(frozen=True, eq=False)
class Laws:
    """What the target and the draft say of the next token, one row a position."""

    target_RV: Tensor
    """Float32, on the host. Where the draft knows only part of the tokens, the last column stands for all others."""
    draft_RV: Tensor
    prompt_R: Tensor
    """Number of the prompt whose answer the position lies in; positions of one prompt are alike."""

    def __len__(self) -> int:
        return len(self.prompt_R)


def target_laws(target: LanguageModel, features_RF: Tensor, temperature: float, vocabulary: PartialVocabulary | None) -> Tensor:
    """Return the target's laws over the draft's tokens and, where these are not all, one column for the others.

    Tokens that a draft cannot propose differ in nothing that acceptance depends on: it is their sum that counts.
    """
    parts = []
    for part_RF in _chunks(features_RF, target.vocab_size):
        probs_RV = _warped(target.head(part_RF), temperature)
        if vocabulary is not None:
            known_RD = probs_RV[:, vocabulary.tokens_D]
            others_RV = probs_RV.index_fill(1, vocabulary.tokens_D, 0.0)
            probs_RV = torch.cat([known_RD, others_RV.sum(-1, keepdim=True, dtype=torch.float64).float()], dim=1)
        parts.append(probs_RV.cpu())
    return _checked(torch.cat(parts), "target", target.name)


def draft_laws(draft: LanguageModel | FeatureHead, features_RF: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """Return the draft's laws in the columns of `target_laws`."""
    parts = []
    for part_RF in _chunks(features_RF, vocab_size):
        logits_RD = draft.head(part_RF)
        if draft.vocabulary is None:
            # Padding rows of either model's table never get mass.
            missing = vocab_size - logits_RD.shape[-1]
            probs_RV = _warped(torch.nn.functional.pad(logits_RD, (0, missing), value=-torch.inf), temperature)
        else:
            probs_RV = torch.nn.functional.pad(_warped(logits_RD, temperature), (0, 1))
        parts.append(probs_RV.cpu())
    return _checked(torch.cat(parts), "draft", draft.name)


def _chunks(features_RF: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    return torch.split(features_RF, max(1, _CHUNK_BYTES // (4 * vocab_size)))


def _warped(logits_RV: Tensor, temperature: float) -> Tensor:
    warper = Warper(SamplingParams(temperature=temperature), logits_RV.shape[-1], [], logits_RV.device)
    nothing_1RP = torch.empty(1, len(logits_RV), 0, dtype=torch.long, device=logits_RV.device)
    return warper.probs(logits_RV[None], nothing_1RP)[0]


def _checked(probs_RV: Tensor, role: str, name: str) -> Tensor:
    if not probs_RV.isfinite().all():
        raise FailureError(f"logits of {role} {name!r} are not numbers; its weights may be broken, or overflow in this dtype")
    return probs_RV
