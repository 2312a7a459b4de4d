"""Block verification: pick a path child by child, then accept as much of it as the whole path allows.

References
----------
.. [1] Sun et al. 2024, arXiv:2403.10444 (block verification of a chain).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.devices import can_sync
from polydraft.operations import operation
from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.trees import DraftTree
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import (
    LEAST_WEIGHT,
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
from polydraft.verify.weights import quotient


@WALKS.register("block")
class BlockWalk(Walk):
    """Pick one path down to a leaf, then accept as long a prefix of it as the whole path allows.

    At each node the scheme picks one child without accepting it, so the path is a chain whose tokens follow the picked
    children's distributions r, and block verification [1] applies. Below, p is the target's distribution after the first i
    tokens of the path, and x is the next token:

    - a₀ = 1, and a ← min(1, a p(x)/r(x)) for each token: the weight of the path so far.
    - sᵢ = Σ(aᵢ p − r)₊: the target's excess at depth i.
    - From the path's end upwards, stop at depth i with chance hᵢ = sᵢ/(sᵢ + 1 − aᵢ); the next token comes from (aᵢ p − r)₊.

    At the end of a path nothing is picked, so r = 0, sᵢ = aᵢ = hᵢ, and the token comes from p itself. Below the end a = 0, so
    the same formulas hold for paths of all lengths. A path ends at a leaf, or where a is too small for looking further to pay.

    Guarantee: given a path down to depth i, the walk keeps at least i of its tokens and goes on with y with chance aᵢ p(y), by
    induction from the end of the path; and a₀ = 1. Which node a path takes, and whether it ends there, may depend on all that
    was drawn above, so trees of any shape are exact, even with repeated children.

    Deviations: only the abstract of [1] was available, so the formulas are our own derivation. The stopping depth is drawn
    directly from its distribution, with one random number instead of one per depth.
    """

    name = "block"

    def __init__(self, least_weight: float = LEAST_WEIGHT) -> None:
        self.least_weight = least_weight

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Only schemes that pick a child before accepting it give a path a distribution."""
        return scheme.select_uniforms is not None

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Enough to pick a child per level, one for where to stop, and one for the token there."""
        assert scheme.select_uniforms is not None
        return scheme.select_uniforms * depth + 2

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        """Pick the paths of all rows, then draw once where each stops and once what follows."""
        if draft.tokens_BN.shape[1] > 1:
            return verify_block(scheme, draft, target_distribution, uniforms_BU, self.least_weight)
        # No draft: draw from the target's distribution with the random number that a whole walk would use for its last token.
        root_B = torch.zeros_like(draft.tokens_BN[:, 0])
        distribution_BV = target_distribution(root_B, draft.tokens_BN[:, :0])
        return lone_root(draft, draw_one(distribution_BV, uniforms_BU[:, -1]))


@operation
def verify_block(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> Verdict:
    """Verify trees with candidates, as `BlockWalk` describes."""
    path = PathFinder(scheme, draft, target_distribution, uniforms_BU, least_weight).path()
    weight_BD, going_BL = _weights(path, least_weight)
    excess_BLX = _excess(path, weight_BD, going_BL)
    # Beyond the last distribution that was looked at nothing is picked, so the excess is the target's whole distribution.
    mass_BD = torch.cat([excess_BLX.sum(-1), weight_BD[:, going_BL.shape[1] :]], dim=1)
    stop_B1 = draw_one(_stop_distribution(weight_BD, mass_BD), uniforms_BU[:, -2])[:, None]
    accepted_B1 = stop_B1.clamp(min=0)
    token_B1 = draw_one(path.weights_after(accepted_B1, weight_BD, excess_BLX), uniforms_BU[:, -1])[:, None]
    place_D = torch.arange(draft.depth + 1, device=accepted_B1.device)
    below_BD = torch.nn.functional.pad(path.nodes_BD[:, 1:], (0, 1))
    # Count a fault only if the path had not ended before; a distribution that is NaN ends the path.
    arrived_BL = torch.nn.functional.pad(going_BL[:, :-1], (1, 0), value=1)
    fault_B = (path.fault_BL * arrived_BL).amax(-1)
    # Without a fault so far there is something to draw, unless the last distribution is NaN.
    unknown_B = (fault_B == Fault.NONE) & ((stop_B1 == NO_TOKEN) | (token_B1 == NO_TOKEN))[:, 0]
    return Verdict(
        path_BD=path.nodes_BD.gather(1, torch.minimum(place_D, accepted_B1)),
        accepted_B=accepted_B1[:, 0],
        tokens_BD=torch.where(place_D == accepted_B1, token_B1, draft.tokens_BN.gather(1, below_BD)),
        offered_B=(accepted_B1 + path.has_children_BD.gather(1, accepted_B1))[:, 0],
        fault_B=torch.where(unknown_B, Fault.TARGET, fault_B),
    )


def _weights(path: "Path", least_weight: float) -> tuple[Tensor, Tensor]:
    """Return a at each node (0 below a path's end), and at which nodes the path goes on."""
    weights = [torch.ones_like(path.ratio_BL[:, 0])]
    for ratio_B in path.ratio_BL.unbind(1):
        weights.append(_next_weight(weights[-1], ratio_B))
    weight_BD = torch.stack(weights, dim=1)
    going_BL = (path.open_BL & _worth_a_look(weight_BD[:, :-1], least_weight)).cumprod(-1)
    return torch.cat([weight_BD[:, :1], weight_BD[:, 1:].where(going_BL > 0, 0.0)], dim=1), going_BL


def _next_weight(weight_B: Tensor, ratio_B: Tensor) -> Tensor:
    """Return min(1, a p(x)/r(x))."""
    return (weight_B * ratio_B).clamp(max=1.0)


def _worth_a_look(weight: Tensor, least_weight: float) -> Tensor:
    """Return where a path has enough weight to look further."""
    return (weight >= least_weight) & (weight > 0)


def _excess(path: "Path", weight_BD: Tensor, going_BL: Tensor) -> Tensor:
    """Return (a p − r)₊ at each node: what may be emitted instead of the picked child. At a path's end r is 0."""
    share_BL1 = (weight_BD[:, :-1] / path.mass_BL)[..., None]
    excess_BLX = torch.addcmul(path.target_BLX * share_BL1, path.distribution_BLX, going_BL[..., None], value=-1)
    return excess_BLX.clamp_(min=0)


def _stop_distribution(weight_BD: Tensor, mass_BD: Tensor) -> Tensor:
    """Return the chance of stopping at each depth: hᵢ = sᵢ/(sᵢ + 1 − aᵢ), times 1 − hⱼ for all deeper j, which are tried first.

    If p = r and a = 1, h is 0/0. Such a depth is reached only by rounding, and there is nothing to emit there, so h = 0.
    """
    rest_BD = mass_BD + (1 - weight_BD)
    chance_BD = torch.where(rest_BD != 0, mass_BD / rest_BD, 0.0)
    passed_BD = (1 - chance_BD).flip(1).cumprod(1).flip(1)
    return torch.cat([chance_BD[:, :-1] * passed_BD[:, 1:], chance_BD[:, -1:]], dim=1)


@dataclass(frozen=True, eq=False)
class Path:
    """The nodes of a path, each a child picked at the one before, and what was found at the first L of them.

    X are the columns of the draft's distributions, plus one for all tokens that the draft does not know, if there are any.
    """

    nodes_BD: Tensor
    """Root first; after its end, a path repeats its last node."""
    has_children_BD: Tensor
    open_BL: Tensor
    """Whether a child was picked."""
    ratio_BL: Tensor
    """p(x)/r(x) of the picked child x."""
    mass_BL: Tensor
    """Sum of the target's distribution before normalisation."""
    target_BLX: Tensor
    """p before normalisation."""
    distribution_BLX: Tensor
    """r, the distribution of the picked child."""
    fault_BL: Tensor
    target_after: Callable[[Tensor], Tensor]
    """`(accepted_B1) -> probs_BV`: the target's distribution, over all tokens, at one node of each row's path."""
    known_D: Tensor | None
    """Tokens of the columns, if they are not all tokens."""

    def weights_after(self, accepted_B1: Tensor, weight_BD: Tensor, excess_BLX: Tensor) -> Tensor:
        """Return weights over all tokens for what is emitted after a node: (a p − r)₊, or p if the path has ended there."""
        levels = excess_BLX.shape[1]
        level_B1 = accepted_B1.clamp(max=levels - 1)
        weights_BV = _entry(excess_BLX, level_B1)
        if self.known_D is None and levels == self.nodes_BD.shape[1]:
            return weights_BV
        probs_BV = self.target_after(accepted_B1)
        if self.known_D is not None:
            # Tokens that the draft does not know are never picked, so all of a p is left for them.
            share_B1 = (weight_BD[:, :levels] / self.mass_BL).gather(1, level_B1)
            known_BD = self.known_D.expand(len(probs_BV), -1)
            weights_BV = (probs_BV.double() * share_B1).scatter_(1, known_BD, weights_BV[:, :-1])
        return torch.where(accepted_B1 == levels, probs_BV, weights_BV)


def _entry(table_BLX: Tensor, index_B1: Tensor) -> Tensor:
    """Return one entry per row, `[B, X]`."""
    return table_BLX.gather(1, index_B1[..., None].expand(-1, 1, table_BLX.shape[-1]))[:, 0]


@dataclass(frozen=True, eq=False)
class _Picks:
    """What was picked at some nodes, one per row."""

    child_R: Tensor
    """The child's node, or the node itself if none was picked."""
    has_children_R: Tensor
    open_R: Tensor
    ratio_R: Tensor
    mass_R: Tensor
    target_RX: Tensor
    distribution_RX: Tensor
    fault_R: Tensor


class PathFinder:
    """Picks one path per row: level by level if the host may look at values, to stop early; else at all nodes at once."""

    def __init__(
        self,
        scheme: Scheme,
        draft: DraftTree,
        target_distribution: TargetDistribution,
        uniforms_BU: Tensor,
        least_weight: float,
    ) -> None:
        assert scheme.select_uniforms is not None and draft.depth
        self.scheme, self.draft, self.target_distribution = scheme, draft, target_distribution
        self.least_weight = least_weight
        uniforms_BU = uniforms_BU[:, : scheme.select_uniforms * draft.depth]
        self.uniforms_BLU = uniforms_BU.reshape(len(uniforms_BU), draft.depth, scheme.select_uniforms)
        self.known_D = None if draft.vocabulary is None else draft.vocabulary.tokens_D

    def path(self) -> Path:
        """Return the paths."""
        if all_at_once(self.target_distribution, self.draft, self.draft.distributions[0].shape[-1]):
            return self._at_once(self.target_distribution)
        return self._level_by_level()

    def _at_once(self, target_distributions: TreeDistributions) -> Path:
        """Pick at every node as if it were on the path, then follow the picks."""
        draft, target_BNV = self.draft, target_distributions.everywhere(self.draft)
        batch, nodes, _ = target_BNV.shape
        level_BN1 = draft.depths_BN.clamp(max=draft.depth - 1)[..., None]
        uniforms_BNU = self.uniforms_BLU.gather(1, level_BN1.expand(-1, -1, self.uniforms_BLU.shape[-1]))
        picks = self._pick(
            target_BNV.flatten(0, 1),
            draft.all_distributions().flatten(0, 1),
            torch.arange(nodes, device=target_BNV.device).repeat(batch),
            draft.child_table_BNK.flatten(0, 1),
            draft.all_children().flatten(0, 1),
            uniforms_BNU.flatten(0, 1),
        )
        nodes_BD = followed(picks.child_R.view(batch, nodes), draft.depth)

        def along(table_R: Tensor) -> Tensor:
            table_BNX = table_R.view(batch, nodes, -1)
            return table_BNX.gather(1, nodes_BD[..., None].expand(-1, -1, table_BNX.shape[-1]))

        def target_after(accepted_B1: Tensor) -> Tensor:
            return _entry(target_BNV, nodes_BD.gather(1, accepted_B1))

        ratio_BD, mass_BD = along(torch.stack([picks.ratio_R, picks.mass_R], dim=1)).unbind(-1)
        flags_RX = torch.stack([picks.has_children_R, picks.open_R, picks.fault_R], dim=1)
        has_children_BD, open_BD, fault_BD = along(flags_RX).unbind(-1)
        columns = along(picks.target_RX), along(picks.distribution_RX)
        return Path(nodes_BD, has_children_BD, open_BD > 0, ratio_BD, mass_BD, *columns, fault_BD, target_after, self.known_D)

    def _level_by_level(self) -> Path:
        """Go down all rows in step; rows whose path has ended stay where they are."""
        draft = self.draft
        node_B = torch.zeros_like(draft.tokens_BN[:, 0])
        going_B, weight_B = torch.ones_like(node_B, dtype=torch.bool), torch.ones_like(node_B, dtype=torch.float64)
        nodes, path_BP = [node_B], draft.tokens_BN[:, :0]
        targets: list[Tensor] = []
        steps: list[_Picks] = []
        for level in range(draft.depth):
            nodes_BK, children_BK = draft.children(node_B)
            going_B = going_B & _worth_a_look(weight_B, self.least_weight) & (children_BK != NO_TOKEN).any(-1)
            if level and can_sync(going_B) and not going_B.any():
                break
            targets.append(self.target_distribution(node_B, path_BP))
            draft_BD = draft.short_distribution(level, node_B)
            picks = self._pick(targets[-1], draft_BD, node_B, nodes_BK, children_BK, self.uniforms_BLU[:, level])
            going_B, weight_B = going_B & picks.open_R, _next_weight(weight_B, picks.ratio_R)
            node_B = picks.child_R.where(going_B, node_B)
            token_B1 = draft.tokens_BN.gather(1, node_B[:, None]).where(going_B[:, None], NO_TOKEN)
            path_BP = torch.cat([path_BP, token_B1], dim=1)
            nodes.append(node_B)
            steps.append(picks)
        nodes_BD = torch.stack(nodes + nodes[-1:] * (draft.depth + 1 - len(nodes)), dim=1)

        def target_after(accepted_B1: Tensor) -> Tensor:
            before_BP = torch.arange(len(targets), device=accepted_B1.device) < accepted_B1
            if can_sync(accepted_B1) and bool((accepted_B1 < len(targets)).all()):
                known_LBV = torch.stack(targets)
            else:
                last_B = nodes_BD.gather(1, accepted_B1)[:, 0]
                known_LBV = torch.stack([*targets, self.target_distribution(last_B, path_BP.where(before_BP, NO_TOKEN))])
            return known_LBV[accepted_B1[:, 0], torch.arange(len(accepted_B1), device=accepted_B1.device)]

        last_B = (draft.children(node_B)[1] != NO_TOKEN).any(-1)
        return Path(
            nodes_BD,
            torch.stack([*(picks.has_children_R for picks in steps), last_B], dim=1),
            torch.stack([picks.open_R for picks in steps], dim=1),
            torch.stack([picks.ratio_R for picks in steps], dim=1),
            torch.stack([picks.mass_R for picks in steps], dim=1),
            torch.stack([picks.target_RX for picks in steps], dim=1),
            torch.stack([picks.distribution_RX for picks in steps], dim=1),
            torch.stack([picks.fault_R for picks in steps], dim=1),
            target_after,
            self.known_D,
        )

    def _pick(
        self,
        target_RV: Tensor,
        draft_RD: Tensor,
        node_R: Tensor,
        nodes_RK: Tensor,
        children_RK: Tensor,
        uniforms_RU: Tensor,
    ) -> _Picks:
        """Let the scheme pick a child of each node.

        To the scheme, all tokens that the draft does not know are one token: the draft proposes none of them, and what is left
        for that one token is shared out in proportion to p.
        """
        vocabulary, fault_R = self.draft.vocabulary, fault_of(target_RV, draft_RD)
        column_RK, target_RX, draft_RX = children_RK, target_RV, draft_RD
        if vocabulary is not None:
            column_RK = vocabulary.columns(children_RK)
            target_RX, draft_RX = vocabulary.lumped(target_RV), torch.nn.functional.pad(draft_RD, (0, 1))
        picked = self.scheme.select(target_RX, draft_RX, column_RK, uniforms_RU)
        column_R1 = picked.token_R[:, None]
        token_R1, open_R = column_R1.clamp(min=0), (picked.token_R != NO_TOKEN) & (fault_R == Fault.NONE)
        mass_R = target_RX.sum(-1, dtype=torch.float64)
        chance_R = picked.distribution_RV.gather(1, token_R1)[:, 0] * mass_R
        ratio_R = quotient(target_RX.gather(1, token_R1)[:, 0], chance_R).where(chance_R > 0, 0.0)
        # The first match: a token drawn twice has equal subtrees in distribution.
        match_R1 = (column_RK == column_R1).to(torch.uint8).argmax(-1, keepdim=True)
        child_R = nodes_RK.gather(1, match_R1)[:, 0].where(open_R, node_R)
        has_children_R = (children_RK != NO_TOKEN).any(-1)
        return _Picks(child_R, has_children_R, open_R, ratio_R, mass_R, target_RX, picked.distribution_RV, fault_R)
