"""Verification from the leaves up.

References
----------
.. [1] Weng et al. 2025, arXiv:2505.12398 (traversal verification).
"""

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, draw_one
from polydraft.trees import DraftTree
from polydraft.verify.arrays import can_sync, ratio
from polydraft.verify.rejection import RejectionWithoutReplacement, RejectionWithReplacement
from polydraft.verify.scheme import Scheme
from polydraft.verify.walk import LEAST_WEIGHT, WALKS, Fault, TargetDistribution, Verdict, Walk, fault_of

_BELOW_ONE = 1 - 2**-53


@WALKS.register("traversal")
class TraversalWalk(Walk):
    """Try the leaves first, and each node once all its children have failed; the first that is accepted is kept.

    Traversal verification [1]: depth first, children in draw order. At a node the walk may still emit w: at the root the
    target's distribution p, at a child x of a node, drawn from q, the target's distribution there times a = min(1, w(x)/q(x)).

    - A leaf, or a node whose children have all failed, is accepted with chance Σw; the token after it comes from w.
    - A child that fails, its whole subtree with it, takes its share along: w ← (w − q)₊/(1 − Σmin(w, q)). Without
      replacement it leaves q too, which is renormalised.

    Guarantee: given a node and its w, the walk ends in that subtree and goes on as y with chance w(y); by induction from the
    leaves, whatever the number of children, as long as each follows q given the earlier ones. Recursive rejection decides
    on a child before it has seen that child's children, and never accepts more in the mean (tests/walks).

    Deviations: of [1] only the abstract was at hand, the rules are our own. One random number serves all decisions: what
    is left of it after a rejection is uniform again. Below a node whose weight is too small to be worth it nothing is tried.
    """

    name = "traversal"

    def __init__(self, least_weight: float = LEAST_WEIGHT) -> None:
        self.least_weight = least_weight

    @classmethod
    def fits(cls, scheme: Scheme | type[Scheme]) -> bool:
        """Recursive rejection of children that follow the draft distribution, which this is a better order for."""
        kind = scheme if isinstance(scheme, type) else type(scheme)
        return issubclass(kind, RejectionWithReplacement | RejectionWithoutReplacement)

    def uniforms(self, scheme: Scheme, depth: int) -> int:
        """One for where to stop and one for the token there."""
        return 2

    def run(self, scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor) -> Verdict:
        """Let each row take its own way through its tree, one node to open or to try at a time."""
        descent = _Descent(draft, target_distribution, bool(scheme.replacement), self.least_weight, uniforms_BU[:, 0])
        # Each node is tried once at most and opened once at most; the root is open from the start.
        for _ in range(2 * draft.tokens_BN.shape[1] - 1):
            descent.step()
            if descent.can_sync and not bool(descent.going_B1.any()):
                break
        return descent.verdict(uniforms_BU[:, 1])


class _Descent:
    """Where each row is: at its deepest open node, the last one on its path whose children are being tried.

    For every open node on the path, root first: `rest_BDV` is its w but for `scale_BD`, and `weight_BD` the mass of w;
    `draft_BDV` is the distribution q of its next child but for its mass `draft_mass_BD`; `rank_BD` children have failed.
    """

    def __init__(
        self,
        draft: DraftTree,
        target_distribution: TargetDistribution,
        replacement: bool,
        least_weight: float,
        uniform_B: Tensor,
    ) -> None:
        self.draft, self.target_distribution, self.replacement = draft, target_distribution, replacement
        self.least_weight, self.uniform_B1 = least_weight, uniform_B[:, None]
        self.rows_B = torch.arange(len(uniform_B), device=uniform_B.device)
        self.can_sync = can_sync(uniform_B)
        self.children_BNK = draft.all_children()
        self.has_children_BN = (self.children_BNK != NO_TOKEN).any(-1)
        root_B1 = torch.zeros_like(self.rows_B)[:, None]
        self.going_B1 = torch.ones_like(root_B1, dtype=torch.bool)
        self.level_B1, self.accepted_B1, self.fault_B1 = root_B1, root_B1, root_B1
        # Rows with nothing to write write to the place after the last.
        self.nowhere = draft.depth + 1
        self.nodes_BD, self.rank_BD = root_B1.repeat(1, draft.depth + 2), root_B1.repeat(1, draft.depth + 2)
        self.weight_BD = torch.zeros_like(self.nodes_BD, dtype=torch.float64)
        self.scale_BD, self.draft_mass_BD = torch.zeros_like(self.weight_BD), torch.zeros_like(self.weight_BD)
        target_probs_BV = target_distribution(root_B1[:, 0], self._path(root_B1))
        draft_probs_BV = self._draft_distribution(root_B1, root_B1) if draft.depth else torch.zeros_like(target_probs_BV)
        shape = (*self.nodes_BD.shape, target_probs_BV.shape[1])
        self.rest_BDV = target_probs_BV.new_empty(shape, dtype=torch.float64)
        self.draft_BDV = draft_probs_BV.new_empty(shape)
        self._open(self.going_B1, root_B1, torch.ones_like(self.uniform_B1), target_probs_BV, draft_probs_BV)

    def step(self) -> None:
        """Open the next child of the deepest open node, or try it if it is a leaf, or try that node if no child is left."""
        node_B1, rank_B1 = self.nodes_BD.gather(1, self.level_B1), self.rank_BD.gather(1, self.level_B1)
        weight_B1 = self.weight_BD.gather(1, self.level_B1)
        width = self.children_BNK.shape[2]
        place_B1 = node_B1 * width + rank_B1.clamp(max=width - 1)
        child_B1 = self.draft.child_table_BNK.flatten(1).gather(1, place_B1)
        token_B1 = self.children_BNK.flatten(1).gather(1, place_B1)
        left_B1 = (rank_B1 < width) & (token_B1 != NO_TOKEN) & self._likely(weight_B1)
        child_weight_B1 = torch.where(left_B1, self._child_weight(token_B1), 0.0)
        opening_B1 = self.going_B1 & left_B1 & self.has_children_BN.gather(1, child_B1) & self._likely(child_weight_B1)
        trying_B1 = self.going_B1 & ~opening_B1
        # The root is the last resort, of weight 1 but for rounding.
        chance_B1 = torch.where(left_B1, child_weight_B1, weight_B1.masked_fill(self.level_B1 == 0, 1.0))
        accepted_B1, self.uniform_B1 = _decide(trying_B1, chance_B1, self.uniform_B1)
        rejected_B1 = trying_B1 & ~accepted_B1
        tried_B1, depth_B1 = torch.where(left_B1, child_B1, node_B1), self.level_B1 + left_B1
        self.nodes_BD.scatter_(1, depth_B1.masked_fill(rejected_B1 | ~self.going_B1, self.nowhere), tried_B1)
        self.accepted_B1 = torch.where(accepted_B1, depth_B1, self.accepted_B1)
        self.going_B1 = self.going_B1 & ~accepted_B1
        if not self.can_sync or bool(rejected_B1.any()):
            self._reject(rejected_B1, (depth_B1 - 1).clamp(min=0), tried_B1)
        if not self.can_sync or bool(opening_B1.any()):
            depth_B1 = depth_B1.masked_fill(~opening_B1, 0)
            distributions = (
                self.target_distribution(child_B1[:, 0], self._path(depth_B1)),
                self._draft_distribution(depth_B1, child_B1),
            )
            self._open(opening_B1, depth_B1, child_weight_B1, *distributions)

    def verdict(self, uniform_B: Tensor) -> Verdict:
        """Draw the token after the accepted node."""
        node_B1, path_BP = self.nodes_BD.gather(1, self.accepted_B1), self._path(self.accepted_B1)
        rest_BV = self.rest_BDV[self.rows_B, self.level_B1[:, 0]]
        # Nothing is left where p = q, in which case only rounding can make a child fail: the target's distribution serves there
        # too.
        open_B1 = (self.accepted_B1 <= self.level_B1) & (self.weight_BD.gather(1, self.level_B1) > 0)
        if not self.can_sync or not bool(open_B1.all()):
            rest_BV = torch.where(open_B1, rest_BV, self.target_distribution(node_B1[:, 0], path_BP))
        token_B1 = draw_one(rest_BV, uniform_B)[:, None]
        # The distribution after a leaf is seen here for the first time.
        fault_B1 = torch.where((self.fault_B1 == Fault.NONE.value) & (token_B1 == NO_TOKEN), Fault.TARGET, self.fault_B1)
        places_BD = torch.arange(self.nowhere, device=node_B1.device).expand(len(node_B1), -1)
        return Verdict(
            path_BD=self.nodes_BD.gather(1, torch.minimum(places_BD, self.accepted_B1)),
            accepted_B=self.accepted_B1[:, 0],
            tokens_BD=torch.nn.functional.pad(path_BP, (0, 1), value=NO_TOKEN).scatter(1, self.accepted_B1, token_B1),
            offered_B=(self.accepted_B1 + self.has_children_BN.gather(1, node_B1))[:, 0],
            fault_B=fault_B1[:, 0],
        )

    def _open(
        self, mask_B1: Tensor, level_B1: Tensor, weight_B1: Tensor, target_probs_BV: Tensor, draft_probs_BV: Tensor
    ) -> None:
        """Make nodes of some rows, one level below, the deepest open ones."""
        target_mass_B1 = target_probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
        draft_mass_B1 = draft_probs_BV.sum(-1, keepdim=True, dtype=torch.float64)
        slot_B1 = level_B1.masked_fill(~mask_B1, self.nowhere)
        self.rest_BDV[self.rows_B, slot_B1[:, 0]] = target_probs_BV.double()
        self.draft_BDV[self.rows_B, slot_B1[:, 0]] = draft_probs_BV
        self.scale_BD.scatter_(1, slot_B1, weight_B1 / target_mass_B1)
        self.weight_BD.scatter_(1, slot_B1, weight_B1)
        self.draft_mass_BD.scatter_(1, slot_B1, draft_mass_B1)
        self.rank_BD.scatter_(1, slot_B1, 0)
        self.level_B1 = torch.where(mask_B1, level_B1, self.level_B1)
        self.fault_B1 = torch.where(mask_B1, fault_of(target_probs_BV, draft_probs_BV), self.fault_B1)
        self.going_B1 = self.going_B1 & (self.fault_B1 == Fault.NONE.value)

    def _child_weight(self, token_B1: Tensor) -> Tensor:
        """Return min(1, w(x)/q(x)) for the next child of the deepest open node."""
        at = self.rows_B, self.level_B1[:, 0], token_B1[:, 0].clamp(min=0)
        factor_B1 = self.scale_BD.gather(1, self.level_B1) * self.draft_mass_BD.gather(1, self.level_B1)
        return ratio(factor_B1 * self.rest_BDV[at][:, None], self.draft_BDV[at][:, None].double()).clamp(max=1.0)

    def _reject(self, mask_B1: Tensor, level_B1: Tensor, child_B1: Tensor) -> None:
        """Go back in some rows to the parent of a child that has failed: w ← (w − q)₊/(1 − Σmin(w, q)), and q without it."""
        scale_B1, draft_mass_B1 = self.scale_BD.gather(1, level_B1), self.draft_mass_BD.gather(1, level_B1)
        slot_B1 = level_B1.masked_fill(~mask_B1, self.nowhere)
        place, slot = (self.rows_B, level_B1[:, 0]), (self.rows_B, slot_B1[:, 0])
        draft_BV, against_B1 = self.draft_BDV[place], ratio(torch.ones_like(scale_B1), scale_B1 * draft_mass_B1)
        rest_BV = self.rest_BDV[place].sub_(draft_BV * against_B1).clamp_(min=0)
        left_B1 = scale_B1 * rest_BV.sum(-1, keepdim=True)
        scale_B1, weight_B1 = _after_failure(scale_B1, self.weight_BD.gather(1, level_B1), left_B1)
        self.rest_BDV[slot] = rest_BV
        self.scale_BD.scatter_(1, slot_B1, scale_B1)
        self.weight_BD.scatter_(1, slot_B1, weight_B1)
        if not self.replacement:
            draft_BV.scatter_(1, self.draft.tokens_BN.gather(1, child_B1).clamp(min=0), 0.0)
            self.draft_BDV[slot] = draft_BV
            self.draft_mass_BD.scatter_(1, slot_B1, draft_BV.sum(-1, keepdim=True, dtype=torch.float64))
        self.rank_BD.scatter_(1, slot_B1, self.rank_BD.gather(1, level_B1) + 1)
        self.level_B1 = torch.where(mask_B1, level_B1, self.level_B1)

    def _likely(self, weight_B1: Tensor) -> Tensor:
        return (weight_B1 >= self.least_weight) & (weight_B1 > 0)

    def _path(self, depth_B1: Tensor) -> Tensor:
        """Return the tokens of each row's path down to a depth."""
        tokens_BP = self.draft.tokens_BN.gather(1, self.nodes_BD[:, 1:-1])
        places_P = torch.arange(tokens_BP.shape[1], device=tokens_BP.device)
        return torch.where(places_P < depth_B1, tokens_BP, NO_TOKEN)

    def _draft_distribution(self, level_B1: Tensor, node_B1: Tensor) -> Tensor:
        """Return the distribution that the children of one node per row were drawn from, nodes being at different levels."""
        levels = sorted(set(level_B1[:, 0].tolist())) if self.can_sync else range(self.draft.depth)
        distributions = [(level, self.draft.draft_distribution(level, node_B1[:, 0])) for level in levels]
        result_BV = distributions[0][1]
        for level, distribution_BV in distributions[1:]:
            result_BV = torch.where(level_B1 == level, distribution_BV, result_BV)
        return result_BV


def _decide(trying_B1: Tensor, chance_B1: Tensor, uniform_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the rows that try succeed, and a random number for the next try: the rest of this one, stretched."""
    accepted_B1 = trying_B1 & (uniform_B1 < chance_B1)
    # Rounding must not make it 1, which would fail even what is certain.
    rest_B1 = ((uniform_B1 - chance_B1) / (1 - chance_B1)).clamp(max=_BELOW_ONE)
    return accepted_B1, torch.where(trying_B1 & ~accepted_B1, rest_B1, uniform_B1)


def _after_failure(scale_B1: Tensor, weight_B1: Tensor, left_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and mass of w after a child's failure, of chance 1 − Σmin(w, q) = 1 − Σw + Σ(w − q)₊."""
    failing_B1 = 1 - weight_B1 + left_B1
    return ratio(scale_B1, failing_B1), ratio(left_B1, failing_B1)
