"""Verification of one whole path.

References
----------
.. [1] Sun et al. 2024, arXiv:2403.10444 (block verification of a chain).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.schemes import Scheme, Selection
from polydraft.schemes.arithmetic import ratio
from polydraft.schemes.arrays import looks
from polydraft.trees import DraftTree
from polydraft.walks.target_law import TargetLaw
from polydraft.walks.walk import LEAST_WEIGHT, WALKS, Fault, Verdict, Walk, fault_of


@WALKS.register("block")
class BlockWalk(Walk):
    """Pick one path down to a leaf, then accept as long a beginning of it as the whole of it allows.

    At each node the scheme picks one child without accepting it, so the path is a chain whose tokens follow the picked
    children's laws r, and block verification [1] applies. Below, p is the target's law after the first i tokens of the path,
    x the next token:

    - a₀ = 1, and a ← min(1, a p(x)/r(x)) for each token: how far the path may be believed.
    - sᵢ = Σ(aᵢ p − r)₊: what the target has in excess there.
    - From the path's end upwards, stop at depth i with chance hᵢ = sᵢ/(sᵢ + 1 − aᵢ); the token after it comes from
      (aᵢ p − r)₊.

    Where a path ends nothing is picked, r = 0: then sᵢ = aᵢ = hᵢ, and the token comes from p itself. Below its end a = 0, so
    paths of all lengths go through the same formulas. A path ends at a leaf, or where a is too small to be worth a look at
    what comes below.

    Guarantee: given a path down to depth i, the walk keeps i or more of its tokens and goes on as y with chance aᵢ p(y); by
    induction from the end of the path, and a₀ = 1. Which node a path takes, and whether it ends there, may depend on all
    that was drawn above: trees of any shape are exact, repeated children among them.

    Deviations: of [1] only the abstract was at hand, the formulas are derived anew. The stopping depth is drawn at once from
    its law, with one random number instead of one a depth.
    """

    name = "block"

    def __init__(self, least_weight: float = LEAST_WEIGHT) -> None:
        self.least_weight = least_weight

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Only schemes that pick before they accept have a path's law."""
        return scheme.select_uniforms is not None

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Enough to pick a child a level; one for where to stop and one for the token there."""
        assert scheme.select_uniforms is not None
        return scheme.select_uniforms * depth + 2

    def run(self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor) -> Verdict:
        """Pick the paths of all rows, then draw once where each stops and once what follows."""
        path = _pick(scheme, draft, target_law, uniforms_BU, self.least_weight)
        rows_B = torch.arange(len(uniforms_BU), device=uniforms_BU.device)
        stop_B1 = draw_one(_stop_law(path.weight_BD, path.mass_BD), uniforms_BU[:, -2])[:, None]
        accepted_B1 = stop_B1.clamp(min=0)
        places_BD = torch.arange(draft.depth + 1, device=rows_B.device).expand_as(path.nodes_BD)
        path_BD = path.nodes_BD.gather(1, torch.minimum(places_BD, accepted_B1))
        probs_BV = path.excess_BDV[rows_B, accepted_B1[:, 0].clamp(max=draft.depth - 1)]
        at_end_B1 = accepted_B1 == path.end_B1
        # The law after a path's end is needed only here.
        if not looks(at_end_B1) or bool(at_end_B1.any()):
            tokens_BP = torch.where(places_BD < accepted_B1, path.tokens_BD, NO_TOKEN)[:, :-1]
            probs_BV = torch.where(at_end_B1, target_law(path_BD[:, -1], tokens_BP), probs_BV)
        token_B1 = draw_one(probs_BV, uniforms_BU[:, -1])[:, None]
        # Without a fault so far there is something to draw, unless it is that last law which is not a number.
        unknown_B1 = (path.fault_B1 == Fault.NONE) & ((stop_B1 == NO_TOKEN) | (token_B1 == NO_TOKEN))
        has_candidates_B1 = (draft.children(path_BD[:, -1])[1] != NO_TOKEN).any(-1, keepdim=True)
        return Verdict(
            path_BD=path_BD,
            accepted_B=accepted_B1[:, 0],
            tokens_BD=path.tokens_BD.scatter(1, accepted_B1, token_B1),
            offered_B=(accepted_B1 + has_candidates_B1)[:, 0],
            fault_B=torch.where(unknown_B1, Fault.TARGET, path.fault_B1)[:, 0],
        )


@dataclass(frozen=True, eq=False)
class _Path:
    """One path a row, root first; what lies below its end has weight 0."""

    nodes_BD: Tensor
    tokens_BD: Tensor
    """Token picked at each node."""
    end_B1: Tensor
    """Depth of the last node."""
    weight_BD: Tensor
    """a at each node."""
    mass_BD: Tensor
    """s at each node."""
    excess_BDV: Tensor
    """(a p − r)₊ at each node above the end, for every token."""
    fault_B1: Tensor
    """`Fault` of the first law on the path that is not a number."""


def _pick(scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor, least_weight: float) -> _Path:
    """Go down all rows in step; those whose path has ended idle along."""
    assert scheme.select_uniforms is not None and draft.depth
    node_B = torch.zeros_like(draft.tokens_BN[:, 0])
    end_B1 = torch.zeros_like(node_B)[:, None]
    fault_B1, going_B1 = torch.full_like(end_B1, Fault.NONE), torch.ones_like(end_B1, dtype=torch.bool)
    nodes_BD = end_B1.repeat(1, draft.depth + 1)
    tokens_BD = torch.full_like(nodes_BD, NO_TOKEN)
    weight_BD, mass_BD = (torch.zeros_like(nodes_BD, dtype=torch.float64) for _ in range(2))
    weight_BD[:, 0] = 1.0
    target_probs_BV = target_law(node_B, tokens_BD[:, :0])
    excess_BDV = target_probs_BV.new_empty(len(node_B), draft.depth, target_probs_BV.shape[1], dtype=torch.float64)
    for level in range(draft.depth):
        nodes_BK, children_BK = draft.children(node_B)
        weight_B1 = weight_BD[:, level : level + 1]
        arrived_B1, likely_B1 = going_B1, (weight_B1 >= least_weight) & (weight_B1 > 0)
        going_B1 = going_B1 & likely_B1 & (children_BK != NO_TOKEN).any(-1, keepdim=True)
        if level:
            if looks(going_B1) and not bool(going_B1.any()):
                break
            target_probs_BV = target_law(node_B, tokens_BD[:, :level])
        draft_probs_BV = draft.draft_law(level, node_B)
        fault_B1 = torch.where(arrived_B1 & (fault_B1 == Fault.NONE), fault_of(target_probs_BV, draft_probs_BV), fault_B1)
        uniforms_RU = uniforms_BU[:, scheme.select_uniforms * level : scheme.select_uniforms * (level + 1)]
        picked = scheme.select(target_probs_BV, draft_probs_BV, children_BK, uniforms_RU)
        going_B1 = going_B1 & (picked.token_R[:, None] != NO_TOKEN)
        share_B1 = weight_B1 / target_probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
        excess_BDV[:, level] = _excess(share_B1, target_probs_BV, picked.law_RV)
        mass_BD[:, level] = torch.where(going_B1[:, 0], excess_BDV[:, level].sum(-1), 0.0)
        token_B1 = torch.where(going_B1, picked.token_R[:, None], NO_TOKEN)
        weight_BD[:, level + 1 : level + 2] = torch.where(going_B1, _next_weight(share_B1, target_probs_BV, picked), 0.0)
        # The first match: a token drawn twice has equal subtrees in law.
        match_BK = (children_BK == token_B1).to(torch.uint8)
        node_B = torch.where(going_B1, nodes_BK.gather(1, match_BK.argmax(-1, keepdim=True)), node_B[:, None])[:, 0]
        tokens_BD[:, level], nodes_BD[:, level + 1], end_B1 = token_B1[:, 0], node_B, end_B1 + going_B1
    # Nothing is picked at the end of a path: the excess there is the target's whole law.
    mass_BD.scatter_(1, end_B1, weight_BD.gather(1, end_B1))
    return _Path(nodes_BD, tokens_BD, end_B1, weight_BD, mass_BD, excess_BDV, fault_B1)


def _excess(share_B1: Tensor, target_probs_BV: Tensor, picked_BV: Tensor) -> Tensor:
    """Return (a p − r)₊, what may be emitted in place of the picked child; `share` is a over the mass of p as it came."""
    return (target_probs_BV * share_B1).sub_(picked_BV).clamp_(min=0)


def _next_weight(share_B1: Tensor, target_probs_BV: Tensor, picked: Selection) -> Tensor:
    """Return min(1, a p(x)/r(x))."""
    token_B1 = picked.token_R[:, None].clamp(min=0)
    return ratio(share_B1 * target_probs_BV.gather(1, token_B1), picked.law_RV.gather(1, token_B1)).clamp(max=1.0)


def _stop_law(weight_BD: Tensor, mass_BD: Tensor) -> Tensor:
    """Return the chance of stopping at each depth: hᵢ = sᵢ/(sᵢ + 1 − aᵢ), times 1 − hⱼ of all deeper ones, tried before.

    Where p = r and a = 1, h is 0/0 and the depth is reached by rounding only: there is nothing to emit there, so h = 0.
    """
    rest_BD = mass_BD + (1 - weight_BD)
    chance_BD = torch.where(rest_BD == 0, 0.0, mass_BD / rest_BD)
    passed_BD = (1 - chance_BD).flip(1).cumprod(1).flip(1)
    return chance_BD * torch.nn.functional.pad(passed_BD[:, 1:], (0, 1), value=1.0)
