"""At temperature 0 every exact method gives the same text; a difference is a near-tie or an error."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from polydraft.models.hf import HFModel
from polydraft.trees import causal_block

_LEAST_GAP = 1e-3
"""Logits closer than this are a near-tie in any precision."""
_NOISE_FACTOR = 4.0
"""So are logits closer than this many times the rounding seen at that very place."""
_WATCHED = 16


class Likeness(StrEnum):
    """How a greedy text compares with the baseline's."""

    IDENTICAL = "identical"
    NEAR_TIE = "near-tie"
    """They part where two logits are as good as equal: a matrix product of another shape rounds otherwise."""
    DIFFERENT = "different"


@dataclass(frozen=True)
class IdentityCheck:
    """Compare token by token against the target's own logits."""

    target: HFModel

    @torch.inference_mode()
    def compare(self, prompt: list[int], expected: list[int], got: list[int]) -> Likeness:
        """Say how `got` compares with `expected`."""
        if expected == got:
            return Likeness.IDENTICAL
        parted = [index for index, (one, other) in enumerate(zip(expected, got, strict=False)) if one != other]
        if not parted:
            return Likeness.DIFFERENT  # one ends early although they agree as far as they go
        index = parted[0]
        text = prompt + expected[:index]
        logits_V = self._logits(text)
        gap = float((logits_V[expected[index]] - logits_V[got[index]]).abs())
        return Likeness.NEAR_TIE if gap <= self._tolerance(text, logits_V) else Likeness.DIFFERENT

    def _logits(self, text: list[int]) -> Tensor:
        logits_V: Tensor = self.target.hf_model(torch.tensor([text], device=self.target.device)).logits[0, -1].float()
        return logits_V

    def _tolerance(self, text: list[int], logits_V: Tensor) -> float:
        """Measure what rounding does to these very logits: the same text in one pass, and its last token by itself."""
        context = self.target.start(1, len(text))
        context.prefill([text[:-1]])
        last_11 = torch.tensor([text[-1:]], device=self.target.device)
        features_11F = context.extend(last_11, causal_block(1, 1, self.target.device))
        other_V = self.target.head(features_11F[0, -1:])[0].float()
        likeliest = logits_V.topk(min(_WATCHED, len(logits_V))).indices
        noise = (logits_V - other_V)[likeliest].abs().max()
        return max(_LEAST_GAP, _NOISE_FACTOR * float(noise))
