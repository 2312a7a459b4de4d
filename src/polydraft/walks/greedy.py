"""Verification where every law of the target is one token: temperature 0."""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.schemes.arrays import looks
from polydraft.trees import DraftTree
from polydraft.walks.target_law import TreeLaws
from polydraft.walks.walk import Fault, Verdict


def greedy_verdict(draft: DraftTree, laws: TreeLaws) -> Verdict:
    """Follow the children that are the target's own tokens, without a law, or a random number, in sight.

    Every exact scheme emits the one token that has mass, whatever it drew, so this is what each of them comes to.
    """
    tokens_BN = None if looks(draft.tokens_BN) else laws.likeliest_everywhere(draft)
    return _step_by_step(draft, laws) if tokens_BN is None else follow_tokens(draft, tokens_BN)


def _step_by_step(draft: DraftTree, laws: TreeLaws) -> Verdict:
    node_B = torch.zeros_like(draft.tokens_BN[:, 0])
    nodes: list[Tensor] = [node_B]
    tokens: list[Tensor] = []
    offered: list[Tensor] = []
    going_B = torch.ones_like(node_B, dtype=torch.bool)
    accepted_B = torch.zeros_like(node_B)
    for step in range(draft.depth + 1):
        path_BP = torch.stack(tokens, dim=1) if tokens else draft.tokens_BN[:, :0]
        token_B = laws.likeliest(node_B, path_BP).where(going_B, NO_TOKEN)
        tokens.append(token_B)
        nodes_BK, children_BK = draft.followers(node_B)
        offered.append((children_BK != NO_TOKEN).any(-1))
        match_BK = (children_BK == token_B[:, None]) & (children_BK != NO_TOKEN)
        going_B = match_BK.any(-1)
        if step == draft.depth or (looks(going_B) and not going_B.any()):
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
    table_BNK, children_BNK = draft.all_followers()
    match_BNK = (children_BNK == tokens_BN[..., None]) & (children_BNK != NO_TOKEN)
    # The first match, as everywhere: a token drawn twice has equal subtrees in law.
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


def _fault(draft: DraftTree, last_B: Tensor) -> Tensor:
    """Return the `Fault` of each row. The draft's laws do not matter here; its first one shows whether it is sound at all."""
    fault_B = torch.full_like(last_B, Fault.NONE)
    if draft.laws:
        fault_B = torch.where(draft.laws[0][:, 0].sum(-1).isnan(), Fault.DRAFT, fault_B)
    return torch.where(last_B == NO_TOKEN, Fault.TARGET, fault_B)


def followed(next_BN: Tensor, depth: int) -> Tensor:
    """Return the nodes that one comes by from the root, `[B, depth + 1]`, when each node's successor is given."""
    nodes = [torch.zeros_like(next_BN[:, :1])]
    for _ in range(depth):
        nodes.append(next_BN.gather(1, nodes[-1]))
    return torch.cat(nodes, dim=1)
