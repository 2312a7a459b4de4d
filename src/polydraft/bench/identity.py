"""At temperature 0 every exact method gives the same text; a difference is a near-tie or an error."""

from dataclasses import dataclass
from enum import StrEnum

import torch

from polydraft.models.hf import HFModel


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
        ids_1T = torch.tensor([prompt + expected[:index]], device=self.target.device)
        logits_V = self.target.hf_model(ids_1T).logits[0, -1].float()
        gap = (logits_V[expected[index]] - logits_V[got[index]]).abs()
        return Likeness.NEAR_TIE if gap <= self._tolerance(logits_V) else Likeness.DIFFERENT

    def _tolerance(self, logits_V: torch.Tensor) -> float:
        if self.target.dtype == torch.float32:
            return 1e-3
        # Half precision: a few units in the last place of logits of this size.
        return 8 * torch.finfo(self.target.dtype).eps * float(logits_V.abs().max())
