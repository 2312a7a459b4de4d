"""Verification node by node, of all nodes at once: work for many where few are visited, but one step instead of one a level."""

import dataclasses

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.schemes import Scheme
from polydraft.trees import DraftTree
from polydraft.walks.greedy import follow_tokens
from polydraft.walks.target_law import TargetLaw, laws_everywhere
from polydraft.walks.walk import Fault, Verdict, fault_of


def verify_everywhere(scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict | None:
    """Let every node emit its token, by its level's random numbers, then follow those that are children.

    None where the host may look, and so may stop in time, where the root is all there is, or where the laws of all nodes are
    too much to ask.
    """
    if draft.depth == 0:
        return None
    columns = draft.laws[0].shape[-1] if draft.laws else 0
    target_BNV = laws_everywhere(draft, target_law, columns if draft.vocabulary is None else draft.vocabulary.size)
    if target_BNV is None:
        return None
    (batch, nodes, _), used = target_BNV.shape, scheme.verify_uniforms
    level_BN1 = draft.depths_BN.clamp(max=draft.depth)[..., None]
    uniforms_BDU = uniforms_BU[:, : used * (draft.depth + 1)].reshape(batch, draft.depth + 1, used)
    uniforms_RU = uniforms_BDU.gather(1, level_BN1.expand(-1, -1, used)).flatten(0, 1)
    target_RV, draft_RV = target_BNV.flatten(0, 1), target_BNV.new_empty(batch * nodes, 0)
    if draft.laws:
        draft_RV = draft.all_laws().flatten(0, 1)
    fault_BN = fault_of(target_RV, draft_RV).view(batch, nodes)
    if draft.laws and draft.vocabulary is not None:
        draft_RV = draft.vocabulary.spread(draft_RV)
    token_R = scheme.verify(target_RV, draft_RV, draft.all_children().flatten(0, 1), uniforms_RU)
    verdict = follow_tokens(draft, token_R.view(batch, nodes))
    # Behind the last level nothing was drawn: the token comes from the target's law itself.
    last_B11 = verdict.path_BD[:, -1:, None].expand(-1, 1, target_BNV.shape[-1])
    bonus_B = draw_one(target_BNV.gather(1, last_B11)[:, 0], uniforms_BDU[:, -1, 0])
    last_B = bonus_B.where(verdict.accepted_B == draft.depth, verdict.tokens_BD[:, -1])
    tokens_BD = torch.cat([verdict.tokens_BD[:, :-1], last_B[:, None]], dim=1)
    fault_BD = fault_BN.gather(1, verdict.path_BD)
    first_B1 = (fault_BD != Fault.NONE.value).to(torch.uint8).argmax(-1, keepdim=True)
    fault_B = fault_BD.gather(1, first_B1)[:, 0]
    silent_B = (fault_B == Fault.NONE.value) & (last_B == NO_TOKEN)
    return dataclasses.replace(verdict, tokens_BD=tokens_BD, fault_B=fault_B.masked_fill(silent_B, Fault.SCHEME.value))
