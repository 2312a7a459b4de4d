"""Verification node by node: level by level, of all nodes at once, and at temperature 0."""

import dataclasses

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.trees import DraftTree
from polydraft.verify.arrays import can_sync
from polydraft.verify.fused_follow import follow, follow_fits, follow_largest
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import (
    WALKS,
    Fault,
    TargetDistribution,
    TreeDistributions,
    Verdict,
    Walk,
    distributions_everywhere,
    fault_of,
    followed,
    lone_root,
)


@WALKS.register("node")
class NodeWalk(Walk):
    """Emit one token at each node; if it is one of the children, continue from that child, otherwise stop (MCSD §3).

    Each step is exact given the path so far, so the whole is. At the last level there are no children and the token
    comes from the target's distribution itself.
    """

    name = "node"

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Every scheme verifies single nodes."""
        return True

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Enough for one verification per level."""
        return scheme.verify_uniforms * (depth + 1)

    def has_kernels(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution) -> bool:
        """At temperature 0 on a GPU, where nothing changes the order of logits."""
        return (
            isinstance(target_distribution, TreeDistributions)
            and target_distribution.greedy
            and _ranked(draft, target_distribution) is not None
        )

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        """Walk all rows in step; rows that stopped idle along."""
        if isinstance(target_distribution, TreeDistributions) and target_distribution.greedy:
            return greedy_verdict(draft, target_distribution)
        verdict = verify_everywhere(scheme, draft, target_distribution, uniforms_BU)
        if verdict is not None:
            return verdict
        if draft.depth == 0:
            return lone_root(
                draft, draw_one(target_distribution(draft.tokens_BN[:, 0] * 0, draft.tokens_BN[:, :0]), uniforms_BU[:, 0])
            )
        batch_size, device = len(draft.tokens_BN), draft.tokens_BN.device
        node_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        accepted_B, offered_B = torch.zeros_like(node_B), torch.zeros_like(node_B)
        going_B = torch.ones(batch_size, dtype=torch.bool, device=device)
        fault_B = torch.zeros_like(node_B)
        tokens_BD = torch.full((batch_size, draft.depth + 1), NO_TOKEN, device=device)
        path_BD = torch.zeros_like(tokens_BD)
        for step in range(draft.depth + 1):
            target_probs_BV = target_distribution(node_B, tokens_BD[:, :step])
            _, children_BK = draft.children(node_B)
            used = scheme.verify_uniforms * step
            draft_probs_BV = target_probs_BV
            if step < draft.drawn_depth:
                uniforms = uniforms_BU[:, used : used + scheme.verify_uniforms]
                draft_probs_BV = draft.draft_distribution(step, node_B)
                token_B = scheme.verify(target_probs_BV, draft_probs_BV, children_BK, uniforms)
            else:
                token_B = draw_one(target_probs_BV, uniforms_BU[:, used])
            tokens_BD[:, step] = token_B
            broken_B = fault_of(target_probs_BV, draft_probs_BV)[:, 0]
            broken_B = torch.where((broken_B == Fault.NONE.value) & (token_B == NO_TOKEN), Fault.SCHEME, broken_B)
            fault_B = torch.where(going_B & (fault_B == Fault.NONE.value), broken_B, fault_B)
            # Whatever the scheme drew, the token has the target's distribution: if somebody else proposed it, the walk goes on
            # as well.
            nodes_BK, children_BK = draft.followers(node_B)
            match_BK = (children_BK == token_B[:, None]) & (children_BK != NO_TOKEN)
            offered_B += going_B & (children_BK != NO_TOKEN).any(-1)
            going_B = going_B & match_BK.any(-1)
            accepted_B += going_B
            # The first match: a token drawn twice has equal subtrees in distribution.
            child_B = nodes_BK.gather(1, match_BK.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
            node_B = torch.where(going_B, child_B, node_B)
            if step < draft.depth:
                path_BD[:, step + 1] = node_B
            if step == draft.reach or (can_sync(going_B) and not going_B.any()):
                path_BD[:, step + 1 :] = node_B[:, None]
                break
        return Verdict(path_BD, accepted_B, tokens_BD, offered_B, fault_B)


def verify_everywhere(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor
) -> Verdict | None:
    """Let every node emit its token, by its level's random numbers, then follow those that are children.

    None where the host may look, and so may stop in time, where the root is all there is, or where the distributions of all
    nodes are too much to ask.
    """
    if draft.depth == 0:
        return None
    columns = draft.distributions[0].shape[-1] if draft.distributions else 0
    target_BNV = distributions_everywhere(
        draft, target_distribution, columns if draft.vocabulary is None else draft.vocabulary.size
    )
    if target_BNV is None:
        return None
    (batch, nodes, _), used = target_BNV.shape, scheme.verify_uniforms
    level_BN1 = draft.depths_BN.clamp(max=draft.depth)[..., None]
    uniforms_BDU = uniforms_BU[:, : used * (draft.depth + 1)].reshape(batch, draft.depth + 1, used)
    uniforms_RU = uniforms_BDU.gather(1, level_BN1.expand(-1, -1, used)).flatten(0, 1)
    target_RV, draft_RV = target_BNV.flatten(0, 1), target_BNV.new_empty(batch * nodes, 0)
    if draft.distributions:
        draft_RV = draft.all_distributions().flatten(0, 1)
    fault_BN = fault_of(target_RV, draft_RV).view(batch, nodes)
    if draft.distributions and draft.vocabulary is not None:
        draft_RV = draft.vocabulary.spread(draft_RV)
    token_R = scheme.verify(target_RV, draft_RV, draft.all_children().flatten(0, 1), uniforms_RU)
    verdict = follow_tokens(draft, token_R.view(batch, nodes))
    # Behind the last level nothing was drawn: the token comes from the target's distribution itself.
    last_B11 = verdict.path_BD[:, -1:, None].expand(-1, 1, target_BNV.shape[-1])
    bonus_B = draw_one(target_BNV.gather(1, last_B11)[:, 0], uniforms_BDU[:, -1, 0])
    last_B = bonus_B.where(verdict.accepted_B == draft.depth, verdict.tokens_BD[:, -1])
    tokens_BD = torch.cat([verdict.tokens_BD[:, :-1], last_B[:, None]], dim=1)
    fault_BD = fault_BN.gather(1, verdict.path_BD)
    first_B1 = (fault_BD != Fault.NONE.value).to(torch.uint8).argmax(-1, keepdim=True)
    fault_B = fault_BD.gather(1, first_B1)[:, 0]
    silent_B = (fault_B == Fault.NONE.value) & (last_B == NO_TOKEN)
    return dataclasses.replace(verdict, tokens_BD=tokens_BD, fault_B=fault_B.masked_fill(silent_B, Fault.SCHEME.value))


def greedy_verdict(draft: DraftTree, distributions: TreeDistributions) -> Verdict:
    """Follow the children that are the target's own tokens, without a distribution, or a random number, in sight.

    Every exact scheme emits the one token that has mass, whatever it drew, so this is what each of them comes to.
    """
    logits_BNV = _ranked(draft, distributions)
    if logits_BNV is not None:
        return _checked(draft, follow_largest(draft, logits_BNV))
    if draft.tokens_BN.shape[1] == 1 and draft.extra_table_BNK is None:
        return lone_root(draft, distributions.likeliest(torch.zeros_like(draft.tokens_BN[:, 0]), draft.tokens_BN[:, :0]))
    tokens_BN = None if can_sync(draft.tokens_BN) else distributions.likeliest_everywhere(draft)
    return _step_by_step(draft, distributions) if tokens_BN is None else follow_tokens(draft, tokens_BN)


def _ranked(draft: DraftTree, distributions: TreeDistributions) -> Tensor | None:
    """Return the logits of all nodes where kernels can take the largest; None elsewhere."""
    logits_BNV = distributions.logits_in_order() if follow_fits(draft) else None
    return logits_BNV if logits_BNV is not None and logits_BNV.dtype.itemsize <= 4 else None


def _step_by_step(draft: DraftTree, distributions: TreeDistributions) -> Verdict:
    node_B = torch.zeros_like(draft.tokens_BN[:, 0])
    nodes: list[Tensor] = [node_B]
    tokens: list[Tensor] = []
    offered: list[Tensor] = []
    going_B = torch.ones_like(node_B, dtype=torch.bool)
    accepted_B = torch.zeros_like(node_B)
    for step in range(draft.depth + 1):
        path_BP = torch.stack(tokens, dim=1) if tokens else draft.tokens_BN[:, :0]
        token_B = distributions.likeliest(node_B, path_BP).where(going_B, NO_TOKEN)
        tokens.append(token_B)
        nodes_BK, children_BK = draft.followers(node_B)
        offered.append((children_BK != NO_TOKEN).any(-1))
        match_BK = (children_BK == token_B[:, None]) & (children_BK != NO_TOKEN)
        going_B = match_BK.any(-1)
        if step == draft.depth or (can_sync(going_B) and not going_B.any()):
            break
        accepted_B = accepted_B + going_B
        child_B = nodes_BK.gather(1, match_BK.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
        node_B = child_B.where(going_B, node_B)
        nodes.append(node_B)
    missing = draft.depth + 1 - len(tokens)
    tokens_BD = torch.nn.functional.pad(torch.stack(tokens, dim=1), (0, missing), value=NO_TOKEN)
    path_BD = torch.stack(nodes + nodes[-1:] * (draft.depth + 1 - len(nodes)), dim=1)
    last_B1, offered_BD = accepted_B[:, None], torch.stack(offered, dim=1)
    fault_B = _fault(draft, tokens_BD.gather(1, last_B1)[:, 0])
    return Verdict(path_BD, accepted_B, tokens_BD, accepted_B + offered_BD.gather(1, last_B1)[:, 0], fault_B)


def follow_tokens(draft: DraftTree, tokens_BN: Tensor) -> Verdict:
    """Return where the tokens that all nodes emit lead: find every node's way on at once, then follow whole numbers."""
    if follow_fits(draft):
        return _checked(draft, follow(draft, tokens_BN))
    table_BNK, children_BNK = draft.all_followers()
    match_BNK = (children_BNK == tokens_BN[..., None]) & (children_BNK != NO_TOKEN)
    # The first match, as everywhere: a token drawn twice has equal subtrees in distribution.
    first_BN1 = match_BNK.to(torch.uint8).argmax(-1, keepdim=True)
    child_BN = table_BNK.gather(2, first_BN1)[..., 0]
    goes_BN = match_BNK.any(-1)
    nodes_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    path_BD = followed(child_BN.where(goes_BN, nodes_N), draft.depth)
    accepted_B = goes_BN.gather(1, path_BD[:, :-1]).cumprod(-1).sum(-1)
    token_BD = tokens_BN.gather(1, path_BD)
    fault_B = _fault(draft, token_BD[:, -1])
    offered_B = accepted_B + (children_BNK != NO_TOKEN).any(-1).gather(1, path_BD[:, -1:])[:, 0]
    return Verdict(path_BD, accepted_B, token_BD, offered_B, fault_B)


def _checked(draft: DraftTree, verdict: Verdict) -> Verdict:
    """Return a verdict of kernels, which know nothing of the draft's distributions, with what is wrong with these."""
    return dataclasses.replace(verdict, fault_B=_fault(draft, verdict.tokens_BD[:, -1])) if draft.distributions else verdict


def _fault(draft: DraftTree, last_B: Tensor) -> Tensor:
    """Return the `Fault` of each row. Only the draft's first distribution is looked at: it shows whether the draft is sound."""
    fault_B = torch.full_like(last_B, Fault.NONE)
    if draft.distributions:
        fault_B = torch.where(draft.distributions[0][:, 0].sum(-1).isnan(), Fault.DRAFT, fault_B)
    return torch.where(last_B == NO_TOKEN, Fault.TARGET, fault_B)
