"""The verification of improved-MCSD's target-initialised trees: keep the longest accepted path. Lossy; not registered.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, §3.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.schemes import Scheme
from polydraft.trees import DraftTree
from polydraft.walks.walk import Fault, TargetLaw, Verdict, Walk


@dataclass(frozen=True, eq=False)
class LongestVerdict(Verdict):
    """A verdict that also says from which law the next tree begins."""

    next_law_BV: Tensor
    """Law after the last emitted token: the target's, or what rejection left of it."""
    known_B: Tensor
    """Whether that law is known: not where nothing was accepted."""


class LongestWalk(Walk):
    """Verify every chain of a fork by itself and keep the first longest.

    Looking at several first tokens from the target's law and keeping the one that the draft continues best prefers tokens
    that the draft finds easy: the text no longer follows the target's law (docs/dynamic.md measures by how much).
    """

    name = "longest"

    def __init__(self, greedy: bool) -> None:
        self.greedy = greedy
        self.given_B: Tensor | None = None
        """Rows whose first level comes from the target's own law, and so is accepted unseen."""

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Only what its own drafter draws."""
        return False

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """One for each node of a chain is enough: chains may share them, since only one chain is kept."""
        return depth + 1

    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> LongestVerdict:
        """Walk down the chains one after the other."""
        batch_size, device = len(draft.tokens_BN), draft.tokens_BN.device
        given_B = torch.zeros(batch_size, dtype=torch.bool, device=device) if self.given_B is None else self.given_B
        root_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        firsts_BK, tokens_BK = draft.children(root_B)
        best_B = torch.full_like(root_B, -1)
        path_BD = torch.zeros(batch_size, draft.depth + 1, dtype=torch.long, device=device)
        kept_BD = torch.full_like(path_BD, NO_TOKEN)
        end_B = root_B
        for chain in range(firsts_BK.shape[1]):
            nodes_BD, texts_BD, length_B = self._chain(
                draft, target_law, firsts_BK[:, chain], tokens_BK[:, chain], given_B, uniforms_BU
            )
            better_B1 = (length_B > best_B)[:, None]
            path_BD, kept_BD = torch.where(better_B1, nodes_BD, path_BD), torch.where(better_B1, texts_BD, kept_BD)
            best_B = torch.maximum(best_B, length_B)
            end_B = path_BD.gather(1, best_B.clamp(min=0)[:, None])[:, 0]
        return self._verdict(draft, target_law, uniforms_BU, best_B, path_BD, kept_BD, end_B)

    def _chain(
        self,
        draft: DraftTree,
        target_law: TargetLaw,
        first_B: Tensor,
        token_B: Tensor,
        given_B: Tensor,
        uniforms_BU: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chain's nodes, root first, its tokens, and how many of these are accepted."""
        batch_size = len(first_B)
        node_B, going_B = torch.zeros_like(first_B), torch.ones_like(given_B)
        length_B = torch.zeros_like(first_B)
        nodes_BD = torch.zeros(batch_size, draft.depth + 1, dtype=torch.long, device=first_B.device)
        texts_BD = torch.full_like(nodes_BD, NO_TOKEN)
        for step in range(draft.depth):
            if step:
                first_B, token_B = (values_BK[:, 0] for values_BK in draft.children(node_B))
            accepted_B = self._accepts(draft, target_law, step, node_B, token_B, texts_BD[:, :step], uniforms_BU[:, step])
            if step == 0:
                accepted_B = accepted_B | given_B
            going_B = going_B & accepted_B & (token_B != NO_TOKEN)
            if first_B.device.type == "cpu" and not going_B.any():
                break
            length_B = length_B + going_B
            node_B = torch.where(going_B, first_B, node_B)
            nodes_BD[:, step + 1], texts_BD[:, step] = node_B, torch.where(going_B, token_B, NO_TOKEN)
        return nodes_BD, texts_BD, length_B

    def _accepts(
        self,
        draft: DraftTree,
        target_law: TargetLaw,
        step: int,
        node_B: Tensor,
        token_B: Tensor,
        path_BP: Tensor,
        uniform_B: Tensor,
    ) -> Tensor:
        target_B = _at(target_law(node_B, path_BP), token_B)
        draft_B = torch.ones_like(target_B) if self.greedy else _at(draft.draft_law(step, node_B), token_B)
        return uniform_B * draft_B < target_B

    def _verdict(
        self,
        draft: DraftTree,
        target_law: TargetLaw,
        uniforms_BU: Tensor,
        best_B: Tensor,
        path_BD: Tensor,
        kept_BD: Tensor,
        end_B: Tensor,
    ) -> LongestVerdict:
        """Emit the path, its last token pending; where nothing was accepted one token from the target's law."""
        known_B = best_B > 0
        next_BV = target_law(end_B, kept_BD[:, : draft.depth])
        fault_B = torch.where(next_BV[:, :1].isnan(), Fault.TARGET, Fault.NONE)[:, 0]
        if not self.greedy:
            level_B = best_B.clamp(max=draft.depth - 1)
            draft_BV = torch.stack([draft.draft_law(step, end_B) for step in range(draft.depth)], dim=1)
            draft_BV = draft_BV.gather(1, level_B[:, None, None].expand(-1, 1, draft_BV.shape[-1]))[:, 0]
            left_BV = (next_BV - draft_BV).clamp(min=0)
            rejected_B1 = ((best_B < draft.depth) & (left_BV.sum(-1) > 0))[:, None]
            next_BV = torch.where(rejected_B1, left_BV, next_BV)
        tokens_BD = kept_BD.clone()
        tokens_BD[:, 0] = torch.where(known_B, kept_BD[:, 0], draw_one(next_BV, uniforms_BU[:, -1]))
        accepted_B = (best_B - 1).clamp(min=0)
        # Entries beyond the accepted ones repeat the last of them.
        places_D = torch.arange(path_BD.shape[1], device=path_BD.device)
        path_BD = path_BD.gather(1, torch.minimum(places_D, accepted_B[:, None]))
        offered_B = torch.where(accepted_B < draft.depth - 1, accepted_B + 1, accepted_B)
        return LongestVerdict(path_BD, accepted_B, tokens_BD, offered_B, fault_B, next_BV, known_B)


def _at(law_BV: Tensor, token_B: Tensor) -> Tensor:
    """Return each row's probability of one token."""
    return law_BV.gather(1, token_B.clamp(min=0)[:, None])[:, 0]
