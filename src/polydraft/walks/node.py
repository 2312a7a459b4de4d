"""Verification node by node."""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.schemes import Scheme
from polydraft.schemes.arrays import looks
from polydraft.trees import DraftTree
from polydraft.walks.everywhere import verify_everywhere
from polydraft.walks.greedy import greedy_verdict
from polydraft.walks.target_law import TargetLaw, TreeLaws
from polydraft.walks.walk import WALKS, Fault, Verdict, Walk, fault_of


@WALKS.register("node")
class NodeWalk(Walk):
    """Emit one token at each node; if it is one of the children go on from that child, else stop (MCSD §3).

    Each step is exact given the path so far, so the whole is. At the last level there are no children and the token
    comes from the target's law itself.
    """

    name = "node"

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Every scheme verifies single nodes."""
        return True

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Enough for one verification a level."""
        return scheme.verify_uniforms * (depth + 1)

    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Walk all rows in step; rows that stopped idle along."""
        if isinstance(target_law, TreeLaws) and target_law.greedy:
            return greedy_verdict(draft, target_law)
        verdict = verify_everywhere(scheme, draft, target_law, uniforms_BU)
        if verdict is not None:
            return verdict
        batch_size, device = len(draft.tokens_BN), draft.tokens_BN.device
        node_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        accepted_B, offered_B = torch.zeros_like(node_B), torch.zeros_like(node_B)
        going_B = torch.ones(batch_size, dtype=torch.bool, device=device)
        fault_B = torch.zeros_like(node_B)
        tokens_BD = torch.full((batch_size, draft.depth + 1), NO_TOKEN, device=device)
        path_BD = torch.zeros_like(tokens_BD)
        for step in range(draft.depth + 1):
            target_probs_BV = target_law(node_B, tokens_BD[:, :step])
            _, children_BK = draft.children(node_B)
            used = scheme.verify_uniforms * step
            draft_probs_BV = target_probs_BV
            if step < draft.drawn_depth:
                uniforms = uniforms_BU[:, used : used + scheme.verify_uniforms]
                draft_probs_BV = draft.draft_law(step, node_B)
                token_B = scheme.verify(target_probs_BV, draft_probs_BV, children_BK, uniforms)
            else:
                token_B = draw_one(target_probs_BV, uniforms_BU[:, used])
            tokens_BD[:, step] = token_B
            broken_B = fault_of(target_probs_BV, draft_probs_BV)[:, 0]
            broken_B = torch.where((broken_B == Fault.NONE.value) & (token_B == NO_TOKEN), Fault.SCHEME, broken_B)
            fault_B = torch.where(going_B & (fault_B == Fault.NONE.value), broken_B, fault_B)
            # Whatever the scheme drew, the token has the target's law: if somebody else proposed it, the walk goes on as well.
            nodes_BK, children_BK = draft.followers(node_B)
            match_BK = (children_BK == token_B[:, None]) & (children_BK != NO_TOKEN)
            offered_B += going_B & (children_BK != NO_TOKEN).any(-1)
            going_B = going_B & match_BK.any(-1)
            accepted_B += going_B
            # The first match: a token drawn twice has equal subtrees in law.
            child_B = nodes_BK.gather(1, match_BK.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
            node_B = torch.where(going_B, child_B, node_B)
            if step < draft.depth:
                path_BD[:, step + 1] = node_B
            if step == draft.reach or (looks(going_B) and not going_B.any()):
                path_BD[:, step + 1 :] = node_B[:, None]
                break
        return Verdict(path_BD, accepted_B, tokens_BD, offered_B, fault_B)
