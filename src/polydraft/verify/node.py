"""Verification node by node: each node emits a token, and the walk goes on while that token is one of its children."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from polydraft.devices import can_sync
from polydraft.operations import operation
from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.trees import DraftTree
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import (
    WALKS,
    Fault,
    TargetDistribution,
    TreeDistributions,
    Verdict,
    Walk,
    all_at_once,
    fault_of,
    followed,
    lone_root,
)

Emit = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(level, node_B, path_BP) -> token_B, fault_B`: what one node per row emits, given the tokens of the path below the root."""


@WALKS.register("node")
class NodeWalk(Walk):
    """Emit one token at each node; if it is one of the children, continue from that child, otherwise stop (MCSD §3).

    Each step is exact given the path so far, so the whole walk is. At the last level there are no children, and the token comes
    from the target's distribution itself.
    """

    name = "node"

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Every scheme verifies single nodes."""
        return True

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Enough for one verification per level."""
        return scheme.verify_uniforms * (depth + 1)

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        """Walk all rows in step; at temperature 0, without computing distributions."""
        if isinstance(target_distribution, TreeDistributions) and target_distribution.greedy:
            return greedy_verdict(draft, target_distribution)
        if draft.depth == 0 or (draft.tokens_BN.shape[1] == 1 and scheme.follows_target):  # there is no draft
            root_B = torch.zeros_like(draft.tokens_BN[:, 0])
            return lone_root(draft, draw_one(target_distribution(root_B, draft.tokens_BN[:, :0]), uniforms_BU[:, 0]))
        if all_at_once(target_distribution, draft, _columns(draft)):
            return verify_everywhere(scheme, draft, target_distribution, uniforms_BU)
        return verify_step_by_step(scheme, draft, target_distribution, uniforms_BU)


def _columns(draft: DraftTree) -> int:
    """Return how many columns the float64 tables of this walk have."""
    if not draft.distributions:
        return 0
    return draft.distributions[0].shape[-1] if draft.vocabulary is None else draft.vocabulary.size


def verify_step_by_step(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor
) -> Verdict:
    """Let the nodes on each row's path emit their tokens, level by level."""
    drawn_depth = len(draft.distributions) or draft.depth  # deeper nodes have only n-gram children

    def emit(level: int, node_B: Tensor, path_BP: Tensor) -> tuple[Tensor, Tensor]:
        target_probs_BV = draft_probs_BV = target_distribution(node_B, path_BP)
        uniforms_BX = uniforms_BU[:, scheme.verify_uniforms * level : scheme.verify_uniforms * (level + 1)]
        if level < drawn_depth:
            draft_probs_BV = draft.draft_distribution(level, node_B)
            token_B = scheme.verify(target_probs_BV, draft_probs_BV, draft.children(node_B)[1], uniforms_BX)
        else:
            token_B = draw_one(target_probs_BV, uniforms_BX[:, 0])
        fault_B = fault_of(target_probs_BV, draft_probs_BV)
        return token_B, torch.where((fault_B == Fault.NONE) & (token_B == NO_TOKEN), Fault.SCHEME, fault_B)

    return _step_by_step(draft, emit)


def _step_by_step(draft: DraftTree, emit: Emit) -> Verdict:
    """Walk all rows in step; rows that have stopped stay idle. If the host may look at values, end once all have stopped."""
    node_B = torch.zeros_like(draft.tokens_BN[:, 0])
    accepted_B, offered_B, fault_B = (torch.zeros_like(node_B) for _ in range(3))
    going_B = torch.ones_like(node_B, dtype=torch.bool)
    tokens_BD = node_B.new_full((len(node_B), draft.depth + 1), NO_TOKEN)
    path_BD = torch.zeros_like(tokens_BD)
    # No path is longer than the tree has nodes.
    for level in range(min(draft.depth, draft.tokens_BN.shape[1] - 1) + 1):
        token_B, broken_B = emit(level, node_B, tokens_BD[:, :level])
        tokens_BD[:, level] = token_B.where(going_B, NO_TOKEN)
        fault_B = torch.where(going_B & (fault_B == Fault.NONE), broken_B, fault_B)
        # The token has the target's distribution whatever the scheme drew, so the walk may also go on to an n-gram candidate.
        nodes_BK, children_BK = draft.followers(node_B)
        match_BK = (children_BK == token_B[:, None]) & (children_BK != NO_TOKEN)
        offered_B += going_B & (children_BK != NO_TOKEN).any(-1)
        going_B = going_B & match_BK.any(-1)
        accepted_B += going_B
        # The first match: a token drawn twice has equal subtrees in distribution.
        child_B = nodes_BK.gather(1, match_BK.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
        node_B = torch.where(going_B, child_B, node_B)
        path_BD[:, level + 1 :] = node_B[:, None]
        if level == draft.reach or (can_sync(going_B) and not going_B.any()):
            break
    return Verdict(path_BD, accepted_B, tokens_BD, offered_B, fault_B)


def verify_everywhere(
    scheme: Scheme, draft: DraftTree, target_distributions: TreeDistributions, uniforms_BU: Tensor
) -> Verdict:
    """Let every node emit a token with its level's random numbers, then follow the tokens that are children."""
    target_BNV = target_distributions.everywhere(draft)
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
    # Below the last level nothing was drawn: the token comes from the target's distribution itself.
    last_B11 = verdict.path_BD[:, -1:, None].expand(-1, 1, target_BNV.shape[-1])
    bonus_B = draw_one(target_BNV.gather(1, last_B11)[:, 0], uniforms_BDU[:, -1, 0])
    last_B = bonus_B.where(verdict.accepted_B == draft.depth, verdict.tokens_BD[:, -1])
    tokens_BD = torch.cat([verdict.tokens_BD[:, :-1], last_B[:, None]], dim=1)
    fault_BD = fault_BN.gather(1, verdict.path_BD)
    first_B1 = (fault_BD != Fault.NONE).to(torch.uint8).argmax(-1, keepdim=True)
    fault_B = fault_BD.gather(1, first_B1)[:, 0]
    silent_B = (fault_B == Fault.NONE) & (last_B == NO_TOKEN)
    return replace(verdict, tokens_BD=tokens_BD, fault_B=fault_B.masked_fill(silent_B, Fault.SCHEME.value))


def greedy_verdict(draft: DraftTree, distributions: TreeDistributions) -> Verdict:
    """Follow the children that are the target's likeliest tokens; needs no distributions and no random numbers.

    At temperature 0 every exact scheme emits the one token that has mass, whatever it drew, so this does what they all do.
    """

    def emit(level: int, node_B: Tensor, path_BP: Tensor) -> tuple[Tensor, Tensor]:
        token_B = distributions.likeliest(node_B, path_BP)
        return token_B, torch.where(token_B == NO_TOKEN, Fault.TARGET, Fault.NONE)

    logits_BNV, at_once = distributions.logits_in_order(draft), all_at_once(distributions, draft)
    # On the host it is faster to stop at the first miss, unless compiled code looks at all nodes.
    if logits_BNV is not None and (at_once or follow_largest.chosen(draft, logits_BNV) is not None):
        verdict = follow_largest(draft, logits_BNV)
    elif at_once:
        verdict = follow_tokens(draft, distributions.likeliest_everywhere(draft))
    else:
        verdict = _step_by_step(draft, emit)
    if not draft.distributions:
        return verdict
    # Of the draft's distributions only the first is checked for NaNs.
    broken_B = draft.distributions[0][:, 0].sum(-1).isnan() & (verdict.fault_B == Fault.NONE)
    return replace(verdict, fault_B=torch.where(broken_B, Fault.DRAFT, verdict.fault_B))


@operation
def follow_largest(draft: DraftTree, logits_BNV: Tensor) -> Verdict:
    """Follow the tokens of the largest logits; a node whose largest is infinite or NaN emits `NO_TOKEN`.

    Of equal logits the first one counts.
    """
    best_BN1 = logits_BNV.argmax(-1, keepdim=True)
    tokens_BN1 = best_BN1.where(logits_BNV.gather(-1, best_BN1).abs() < torch.inf, NO_TOKEN)
    return follow_tokens(draft, tokens_BN1[..., 0])


@operation
def follow_tokens(draft: DraftTree, tokens_BN: Tensor) -> Verdict:
    """Follow the tokens that all nodes emit: find every node's successor at once, then follow these.

    If the last token is `NO_TOKEN`, the fault is the target's.
    """
    table_BNK, children_BNK = draft.all_followers()
    match_BNK = (children_BNK == tokens_BN[..., None]) & (children_BNK != NO_TOKEN)
    # The first match: a token drawn twice has equal subtrees in distribution.
    first_BN1 = match_BNK.to(torch.uint8).argmax(-1, keepdim=True)
    child_BN = table_BNK.gather(2, first_BN1)[..., 0]
    goes_BN = match_BNK.any(-1)
    nodes_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    path_BD = followed(child_BN.where(goes_BN, nodes_N), draft.depth)
    accepted_B = goes_BN.gather(1, path_BD[:, :-1]).cumprod(-1).sum(-1)
    token_BD = tokens_BN.gather(1, path_BD)
    fault_B = torch.where(token_BD[:, -1] == NO_TOKEN, Fault.TARGET, Fault.NONE)
    offered_B = accepted_B + (children_BNK != NO_TOKEN).any(-1).gather(1, path_BD[:, -1:])[:, 0]
    return Verdict(path_BD, accepted_B, token_BD, offered_B, fault_B)
