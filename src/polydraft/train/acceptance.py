"""How many drafted tokens the target would accept, measured on held-out text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.schemes import RejectionWithoutReplacement
from polydraft.train.laws import TargetLaws

_CHUNK = 256
_CANDIDATES = 4


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
    for first in range(0, len(logits_RD), _CHUNK):
        probs_RD, draft_RD = laws.probs_RD[first : first + _CHUNK], logits_RD[first : first + _CHUNK].float().softmax(-1)
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
