"""Verification of one whole path: pick it child by child, then accept as much of it as the whole allows.

References
----------
.. [1] Sun et al. 2024, arXiv:2403.10444 (block verification of a chain).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.trees import DraftTree
from polydraft.verify._native_block import compiled_verdict
from polydraft.verify.arrays import (
    Array,
    arange,
    as_array,
    as_tensor,
    at_least,
    at_most,
    backwards,
    can_sync,
    quietly,
    quotient,
    take,
    xp,
)
from polydraft.verify.fused_block import block_fits, verify_block
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import (
    LEAST_WEIGHT,
    WALKS,
    Fault,
    TargetDistribution,
    Verdict,
    Walk,
    distributions_everywhere,
    fault_of,
    followed,
    lone_root,
)


@dataclass(frozen=True, eq=False)
class Path:
    """Nodes of a tree, each a child picked at the one before, and what was found at the first L of them.

    X are the columns of the draft's distributions, with one more for all tokens that it does not know, where there are such.
    What has few numbers is numpy's on a CPU.
    """

    nodes_BD: Array
    """Root first; a path that cannot go on stays where it is."""
    has_children_BD: Array
    open_BL: Array
    """Whether a child was picked."""
    ratio_BL: Array
    """p(x)/r(x) of the picked child x."""
    mass_BL: Array
    """Sum of the target's distribution, as it came."""
    target_BLX: Tensor
    """p, as it came."""
    distribution_BLX: Tensor
    """r, the distribution of the picked child."""
    fault_BL: Array
    target_after: Callable[[Array], Tensor]
    """`(accepted_B1) -> probs_BV`: the target's distribution, over all tokens, at one node of each row's path."""
    known_D: Tensor | None
    """Tokens of the columns, where they are not all."""

    def weights_after(self, accepted_B1: Array, weight_BD: Array, excess_BLX: Tensor) -> Tensor:
        """Return the weights, over all tokens, of what is emitted after a node: (a p − r)₊."""
        levels = excess_BLX.shape[1]
        at_end_B1 = accepted_B1 == levels
        if can_sync(excess_BLX) and bool(at_end_B1.all()):
            return self.target_after(accepted_B1)
        level_B1 = at_most(accepted_B1, levels - 1)
        weights_BV = _entry(excess_BLX, level_B1)
        ends_below = levels < self.nodes_BD.shape[1]
        if self.known_D is None and not ends_below:
            return weights_BV
        probs_BV = self.target_after(accepted_B1)
        if self.known_D is not None:
            # Tokens that the draft does not know are never picked: all of a p is left of them.
            share_B1 = as_tensor(take(weight_BD[:, :levels] / self.mass_BL, level_B1))
            known_BD = self.known_D.expand(len(probs_BV), -1)
            weights_BV = (probs_BV.double() * share_B1).scatter_(1, known_BD, weights_BV[:, :-1])
        if not ends_below or (can_sync(excess_BLX) and not bool(at_end_B1.any())):
            return weights_BV
        return torch.where(as_tensor(at_end_B1), probs_BV, weights_BV)


@dataclass(frozen=True, eq=False)
class _Picks:
    """What was picked at some nodes, one per row."""

    child_R: Array
    """The child's node, or the node itself where none was picked."""
    has_children_R: Array
    open_R: Array
    ratio_R: Array
    mass_R: Array
    target_RX: Tensor
    distribution_RX: Tensor
    fault_R: Array


class PathFinder:
    """Pick one path per row: node by node where the host may look, which ends in time; else at all nodes at once."""

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
        target_BNV = self._distributions_everywhere()
        return self._step_by_step() if target_BNV is None else self._at_once(target_BNV)

    def _distributions_everywhere(self) -> Tensor | None:
        """Return the target's distributions at all nodes, where it is worth having them."""
        return distributions_everywhere(self.draft, self.target_distribution, self.draft.distributions[0].shape[-1])

    def _at_once(self, target_BNV: Tensor) -> Path:
        """Pick at every node, as if it were on the path, then see which ones are."""
        draft, (batch, nodes, _) = self.draft, target_BNV.shape
        level_BN1 = draft.depths_BN.clamp(max=draft.depth - 1)[..., None]
        uniforms_BNU = self.uniforms_BLU.gather(1, level_BN1.expand(-1, -1, self.uniforms_BLU.shape[-1]))
        node_N = torch.arange(nodes, device=target_BNV.device)
        picks = self._pick(
            target_BNV.flatten(0, 1),
            draft.all_distributions().flatten(0, 1),
            node_N.repeat(batch),
            draft.child_table_BNK.flatten(0, 1),
            draft.all_children().flatten(0, 1),
            uniforms_BNU.flatten(0, 1),
        )
        nodes_BD = followed(picks.child_R.view(batch, nodes), draft.depth)

        def along(table_R: Tensor) -> Tensor:
            table_BNX = table_R.view(batch, nodes, -1)
            return table_BNX.gather(1, nodes_BD[..., None].expand(-1, -1, table_BNX.shape[-1]))

        def target_after(accepted_B1: Array) -> Tensor:
            return _entry(target_BNV, nodes_BD.gather(1, accepted_B1))

        numbers = (picks.ratio_R, picks.mass_R)
        ratio_BD, mass_BD = along(torch.stack(numbers, dim=1)).unbind(-1)
        flags = (picks.has_children_R, picks.open_R, picks.fault_R)
        has_children_BD, open_BD, fault_BD = along(torch.stack(flags, dim=1)).unbind(-1)
        columns = along(picks.target_RX), along(picks.distribution_RX)
        return Path(nodes_BD, has_children_BD, open_BD > 0, ratio_BD, mass_BD, *columns, fault_BD, target_after, self.known_D)

    def _step_by_step(self) -> Path:
        """Go down all rows in step; those whose path has ended idle along."""
        draft, depth, looking = self.draft, self.draft.depth, can_sync(self.draft.tokens_BN)
        table_BNK, tokens_BN = as_array(draft.child_table_BNK), as_array(draft.tokens_BN)
        where, concatenate, rows_B = xp(tokens_BN).where, xp(tokens_BN).concatenate, arange(len(tokens_BN), tokens_BN)
        node_B, going_B = 0 * rows_B, rows_B >= 0
        weight_B = as_array(torch.ones(len(tokens_BN), dtype=torch.float64, device=draft.tokens_BN.device))
        nodes, path_BP = [node_B], tokens_BN[:, :0]
        distributions: list[Tensor] = []
        steps: list[_Picks] = []
        for level in range(depth):
            nodes_BK = table_BNK[rows_B, node_B]
            children_BK = where(nodes_BK > 0, take(tokens_BN, nodes_BK), NO_TOKEN)
            going_B = going_B & worth_a_look(weight_B, self.least_weight) & (children_BK != NO_TOKEN).any(-1)
            if level and looking and not bool(going_B.any()):
                break
            distributions.append(self.target_distribution(as_tensor(node_B), as_tensor(path_BP)))
            distribution_BD, uniforms_BU = self._draft_distribution(level, node_B), self.uniforms_BLU[:, level]
            steps.append(self._pick(distributions[-1], distribution_BD, node_B, nodes_BK, children_BK, uniforms_BU))
            going_B = going_B & steps[-1].open_R
            weight_B = at_most(weight_B * steps[-1].ratio_R, 1.0)
            node_B = where(going_B, steps[-1].child_R, node_B)
            nodes.append(node_B)
            token_B1 = where(going_B, tokens_BN[rows_B, node_B], NO_TOKEN)[:, None]
            path_BP = concatenate([path_BP, token_B1], 1)
        nodes_BD = xp(node_B).stack(nodes + nodes[-1:] * (depth + 1 - len(nodes)), 1)
        last_BK = table_BNK[rows_B, node_B]
        last_B = ((last_BK > 0) & (take(tokens_BN, last_BK) != NO_TOKEN)).any(-1)

        def target_after(accepted_B1: Array) -> Tensor:
            accepted_B, levels = accepted_B1[:, 0], len(distributions)
            if looking and len(accepted_B) == 1 and int(accepted_B[0]) < levels:
                return distributions[int(accepted_B[0])]
            path_BL = where(arange(levels, accepted_B) < accepted_B1, path_BP, NO_TOKEN)
            last_BV = self.target_distribution(as_tensor(nodes_BD[rows_B, accepted_B]), as_tensor(path_BL))
            return torch.stack([*distributions, last_BV])[as_tensor(accepted_B), as_tensor(rows_B)]

        def stacked(name: str) -> Array:
            parts = [getattr(step, name) for step in steps]
            return parts[0][:, None] if len(parts) == 1 else xp(parts[0]).stack(parts, 1)

        return Path(
            nodes_BD,
            concatenate([stacked("has_children_R"), last_B[:, None]], 1),
            stacked("open_R"),
            stacked("ratio_R"),
            stacked("mass_R"),
            stacked("target_RX"),
            stacked("distribution_RX"),
            stacked("fault_R"),
            target_after,
            self.known_D,
        )

    def _draft_distribution(self, level: int, node_B: Array) -> Tensor:
        """Return the distribution that the children of one node per row were drawn from, in columns of the draft's own."""
        rows_BN, distributions_BGD = self.draft.distribution_rows_BN, self.draft.distributions[level]
        if rows_BN is None or len(node_B) > 1 or not can_sync(distributions_BGD):
            return self.draft.short_distribution(level, as_tensor(node_B))
        return distributions_BGD[:, min(int(rows_BN[0, node_B[0]]), distributions_BGD.shape[1] - 1)]

    @quietly
    def _pick(
        self,
        target_RV: Tensor,
        draft_RD: Tensor,
        node_R: Array,
        nodes_RK: Array,
        children_RK: Array,
        uniforms_RU: Tensor,
    ) -> _Picks:
        """Let the scheme pick a child of each node.

        The tokens that a draft does not know are one token to the scheme: it proposes none of them, so it need not tell them
        apart, and what is left for that one token is theirs in proportion to p.
        """
        vocabulary, fault_R1 = self.draft.vocabulary, as_array(fault_of(target_RV, draft_RD))
        column_RK, target_RX, draft_RX = children_RK, target_RV, draft_RD
        if vocabulary is not None:
            column_RK = as_array(vocabulary.columns(as_tensor(children_RK)))
            target_RX, draft_RX = vocabulary.lumped(target_RV), torch.nn.functional.pad(draft_RD, (0, 1))
        picked = self.scheme.select(target_RX, draft_RX, as_tensor(column_RK), uniforms_RU)
        column_R1, where = as_array(picked.token_R)[:, None], xp(column_RK).where
        token_R1, open_R1 = at_least(column_R1, 0), (column_R1 != NO_TOKEN) & (fault_R1 == Fault.NONE.value)
        mass_R1 = as_array(target_RX.sum(-1, keepdim=True, dtype=torch.float64))
        chance_R1 = take(as_array(picked.distribution_RV), token_R1) * mass_R1
        ratio_R1 = where(chance_R1 > 0, quotient(take(as_array(target_RX), token_R1), chance_R1), 0.0)
        # The first match: a token drawn twice has equal subtrees in distribution.
        match_R1 = (1 * (column_RK == column_R1)).argmax(-1, keepdims=True)
        child_R1 = where(open_R1, take(nodes_RK, match_R1), node_R[:, None])
        has_children_R = (children_RK != NO_TOKEN).any(-1)
        numbers = (child_R1[:, 0], has_children_R, open_R1[:, 0], ratio_R1[:, 0], mass_R1[:, 0])
        return _Picks(*numbers, target_RX, picked.distribution_RV, fault_R1[:, 0])


def _entry(table_BNX: Tensor, index_B1: Array) -> Tensor:
    """Return one entry per row, `[B, X]`."""
    if len(index_B1) == 1 and can_sync(table_BNX):
        return table_BNX[:, int(index_B1[0, 0])]
    return table_BNX.gather(1, as_tensor(index_B1)[..., None].expand(-1, 1, table_BNX.shape[-1]))[:, 0]


def worth_a_look(weight: Array, least_weight: float) -> Array:
    """Return where a path may be believed enough to look further."""
    return (weight >= least_weight) & (weight > 0)


@WALKS.register("block")
class BlockWalk(Walk):
    """Pick one path down to a leaf, then accept as long a prefix of it as the whole path allows.

    At each node the scheme picks one child without accepting it, so the path is a chain whose tokens follow the picked
    children's distributions r, and block verification [1] applies. Below, p is the target's distribution after the first i
    tokens of the path, x the next token:

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
    its distribution, with one random number instead of one per depth.
    """

    name = "block"

    def __init__(self, least_weight: float = LEAST_WEIGHT) -> None:
        self.least_weight = least_weight

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Only schemes that pick before they accept have a path's distribution."""
        return scheme.select_uniforms is not None

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """Enough to pick a child per level; one for where to stop and one for the token there."""
        assert scheme.select_uniforms is not None
        return scheme.select_uniforms * depth + 2

    def has_kernels(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution) -> bool:
        """For `hybrid` on a GPU, unless the tree is only a root."""
        return draft.tokens_BN.shape[1] > 1 and block_fits(scheme, draft)

    @quietly
    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        """Pick the paths of all rows, then draw once where each stops and once what follows."""
        if draft.tokens_BN.shape[1] == 1:
            return _root_alone(draft, target_distribution, uniforms_BU[:, -1])
        verdict = compiled_verdict(scheme, draft, target_distribution, uniforms_BU, self.least_weight)
        if verdict is not None:
            return verdict
        if self.has_kernels(scheme, draft, target_distribution):
            target_BNV = distributions_everywhere(draft, target_distribution, draft.distributions[0].shape[-1])
            if target_BNV is not None:
                return verify_block(scheme, draft, target_BNV, uniforms_BU, self.least_weight)
        path = PathFinder(scheme, draft, target_distribution, uniforms_BU, self.least_weight).path()
        weight_BD, going_BL = _weights(path, self.least_weight)
        excess_BLX = _excess(path, weight_BD, going_BL)
        # After the last distribution that was looked at nothing is picked either: the excess there is the target's whole
        # distribution.
        levels, concatenate = going_BL.shape[1], xp(weight_BD).concatenate
        mass_BD = concatenate([as_array(excess_BLX.sum(-1)), weight_BD[:, levels:]], 1)
        stop_B1 = as_array(draw_one(as_tensor(_stop_distribution(weight_BD, mass_BD)), uniforms_BU[:, -2]))[:, None]
        accepted_B1 = at_least(stop_B1, 0)
        token_B1 = as_array(draw_one(path.weights_after(accepted_B1, weight_BD, excess_BLX), uniforms_BU[:, -1]))[:, None]
        places_D = arange(draft.depth + 1, accepted_B1)
        path_BD = take(path.nodes_BD, xp(accepted_B1).minimum(places_D, accepted_B1))
        # Without a fault so far there is something to draw, unless it is that last distribution which is not a number.
        fault_B1, where = _first_fault(path.fault_BL, going_BL), xp(accepted_B1).where
        unknown_B1 = (fault_B1 == Fault.NONE.value) & ((stop_B1 == NO_TOKEN) | (token_B1 == NO_TOKEN))
        below_BD = concatenate([path.nodes_BD[:, 1:], 0 * accepted_B1], 1)
        tokens_BD = where(places_D == accepted_B1, token_B1, take(as_array(draft.tokens_BN), below_BD))
        return Verdict(
            path_BD=as_tensor(path_BD),
            accepted_B=as_tensor(accepted_B1)[:, 0],
            tokens_BD=as_tensor(tokens_BD),
            offered_B=as_tensor(accepted_B1 + take(path.has_children_BD, accepted_B1))[:, 0],
            fault_B=as_tensor(where(unknown_B1, Fault.TARGET.value, fault_B1))[:, 0],
        )


def _root_alone(draft: DraftTree, target_distribution: TargetDistribution, uniform_B: Tensor) -> Verdict:
    """Draw from the target's distribution, where nobody drafted, by the very number that the whole walk would use."""
    root_B = torch.zeros_like(draft.tokens_BN[:, 0])
    distribution_BV = target_distribution(root_B, draft.tokens_BN[:, :0])
    return lone_root(draft, draw_one(distribution_BV, uniform_B))


def _weights(path: Path, least_weight: float) -> tuple[Array, Array]:
    """Return a at each node, 0 below a path's end, and at which nodes the path goes on."""
    weights = [xp(path.ratio_BL).ones_like(path.ratio_BL[:, :1])]
    for level in range(path.ratio_BL.shape[1]):
        weights.append(_next_weight(weights[-1], path.ratio_BL[:, level : level + 1]))
    concatenate, where = xp(path.ratio_BL).concatenate, xp(path.ratio_BL).where
    weight_BD = concatenate(weights, 1)
    going_BL = (path.open_BL & worth_a_look(weight_BD[:, :-1], least_weight)).cumprod(-1)
    return concatenate([weights[0], where(going_BL > 0, weight_BD[:, 1:], 0.0)], 1), going_BL


def _next_weight(weight_B1: Array, ratio_B1: Array) -> Array:
    """Return min(1, a p(x)/r(x))."""
    return at_most(weight_B1 * ratio_B1, 1.0)


def _excess(path: Path, weight_BD: Array, going_BL: Array) -> Tensor:
    """Return (a p − r)₊ at each node, what may be emitted in place of the picked child; at a path's end r is 0."""
    share_BL1 = as_tensor(weight_BD[:, :-1] / path.mass_BL)[..., None]
    return torch.addcmul(path.target_BLX * share_BL1, path.distribution_BLX, as_tensor(going_BL)[..., None], value=-1).clamp_(
        min=0
    )


def _stop_distribution(weight_BD: Array, mass_BD: Array) -> Array:
    """Return the chance of stopping at each depth: hᵢ = sᵢ/(sᵢ + 1 − aᵢ), times 1 − hⱼ of all deeper ones, tried before.

    Where p = r and a = 1, h is 0/0 and the depth is reached by rounding only: there is nothing to emit there, so h = 0.
    """
    rest_BD = mass_BD + (1 - weight_BD)
    chance_BD = xp(rest_BD).where(rest_BD != 0, mass_BD / rest_BD, 0.0)
    passed_BD = backwards(backwards(1 - chance_BD).cumprod(1))
    return xp(rest_BD).concatenate([chance_BD[:, :-1] * passed_BD[:, 1:], chance_BD[:, -1:]], 1)


def _first_fault(fault_BL: Array, going_BL: Array) -> Array:
    """Return the `Fault` of the first distribution on the path that is not a number, `[B, 1]`."""
    # A distribution was looked at where the path had not ended before; where it is not a number, the path ends.
    arrived_BL = xp(going_BL).concatenate([0 * going_BL[:, :1] + 1, going_BL[:, :-1]], 1)
    return xp(going_BL).amax(fault_BL * arrived_BL, -1, keepdims=True)
