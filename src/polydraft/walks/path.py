"""One path of picked children a row, from the root down, and the laws along it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN
from polydraft.schemes import Scheme
from polydraft.schemes.arithmetic import ratio
from polydraft.schemes.arrays import looks
from polydraft.trees import DraftTree
from polydraft.walks.greedy import followed
from polydraft.walks.target_law import TargetLaw, laws_everywhere
from polydraft.walks.walk import Fault, fault_of


@dataclass(frozen=True, eq=False)
class Path:
    """Nodes of a tree, each a child picked at the one before, and what was found at the first L of them.

    X are the columns of the draft's laws, with one more for all tokens that it does not know, where there are such.
    """

    nodes_BD: Tensor
    """Root first; a path that cannot go on stays where it is."""
    has_children_BD: Tensor
    open_BL: Tensor
    """Whether a child was picked."""
    ratio_BL: Tensor
    """p(x)/r(x) of the picked child x."""
    mass_BL: Tensor
    """Sum of the target's law, as it came."""
    target_BLX: Tensor
    """p, as it came."""
    law_BLX: Tensor
    """r, the law of the picked child."""
    fault_BL: Tensor
    target_after: Callable[[Tensor], Tensor]
    """`(accepted_B1) -> probs_BV`: the target's law, over all tokens, at one node of each row's path."""
    known_D: Tensor | None
    """Tokens of the columns, where they are not all."""

    def weights_after(self, accepted_B1: Tensor, weight_BD: Tensor, excess_BLX: Tensor) -> Tensor:
        """Return the weights, over all tokens, of what is emitted after a node: (a p − r)₊."""
        levels = excess_BLX.shape[1]
        at_end_B1 = accepted_B1 == levels
        if looks(at_end_B1) and bool(at_end_B1.all()):
            return self.target_after(accepted_B1)
        level_B1 = accepted_B1.clamp(max=levels - 1)
        weights_BV = excess_BLX.gather(1, level_B1[..., None].expand(-1, 1, excess_BLX.shape[-1]))[:, 0]
        ends_below = levels < self.nodes_BD.shape[1]
        if self.known_D is None and not ends_below:
            return weights_BV
        probs_BV = self.target_after(accepted_B1)
        if self.known_D is not None:
            # Tokens that the draft does not know are never picked: all of a p is left of them.
            share_B1 = (weight_BD[:, :levels] / self.mass_BL).gather(1, level_B1)
            known_BD = self.known_D.expand(len(probs_BV), -1)
            weights_BV = (probs_BV * share_B1).scatter_(1, known_BD, weights_BV[:, :-1])
        return torch.where(at_end_B1, probs_BV, weights_BV) if ends_below else weights_BV


@dataclass(frozen=True, eq=False)
class _Picks:
    """What was picked at some nodes, one a row."""

    child_R: Tensor
    """The child's node, or the node itself where none was picked."""
    has_children_R: Tensor
    open_R: Tensor
    ratio_R: Tensor
    mass_R: Tensor
    target_RX: Tensor
    law_RX: Tensor
    fault_R: Tensor


class PathFinder:
    """Pick a path a row: node by node where the host may look, which ends in time; else at all nodes of the tree at once."""

    def __init__(
        self, scheme: Scheme, draft: DraftTree, target_law: TargetLaw, uniforms_BU: Tensor, least_weight: float
    ) -> None:
        assert scheme.select_uniforms is not None and draft.depth
        self.scheme, self.draft, self.target_law = scheme, draft, target_law
        self.least_weight = least_weight
        uniforms_BU = uniforms_BU[:, : scheme.select_uniforms * draft.depth]
        self.uniforms_BLU = uniforms_BU.reshape(len(uniforms_BU), draft.depth, scheme.select_uniforms)
        self.known_D = None if draft.vocabulary is None else draft.vocabulary.tokens_D

    def path(self) -> Path:
        """Return the paths."""
        target_BNV = self._laws_everywhere()
        return self._step_by_step() if target_BNV is None else self._at_once(target_BNV)

    def _laws_everywhere(self) -> Tensor | None:
        """Return the target's laws at all nodes, where it is worth having them."""
        return laws_everywhere(self.draft, self.target_law, self.draft.laws[0].shape[-1])

    def _at_once(self, target_BNV: Tensor) -> Path:
        """Pick at every node, as if it were on the path, then see which ones are."""
        draft, (batch, nodes, _) = self.draft, target_BNV.shape
        level_BN1 = draft.depths_BN.clamp(max=draft.depth - 1)[..., None]
        uniforms_BNU = self.uniforms_BLU.gather(1, level_BN1.expand(-1, -1, self.uniforms_BLU.shape[-1]))
        node_N = torch.arange(nodes, device=target_BNV.device)
        picks = self._pick(
            target_BNV.flatten(0, 1),
            draft.all_laws().flatten(0, 1),
            node_N.repeat(batch),
            draft.child_table_BNK.flatten(0, 1),
            draft.all_children().flatten(0, 1),
            uniforms_BNU.flatten(0, 1),
        )
        nodes_BD = followed(picks.child_R.view(batch, nodes), draft.depth)

        def along(table_R: Tensor) -> Tensor:
            table_BNX = table_R.view(batch, nodes, -1)
            return table_BNX.gather(1, nodes_BD[..., None].expand(-1, -1, table_BNX.shape[-1]))

        def target_after(accepted_B1: Tensor) -> Tensor:
            node_B11 = nodes_BD.gather(1, accepted_B1)[..., None]
            return target_BNV.gather(1, node_B11.expand(-1, 1, target_BNV.shape[-1]))[:, 0]

        numbers = (picks.ratio_R, picks.mass_R)
        ratio_BD, mass_BD = along(torch.stack(numbers, dim=1)).unbind(-1)
        flags = (picks.has_children_R, picks.open_R, picks.fault_R)
        has_children_BD, open_BD, fault_BD = along(torch.stack(flags, dim=1)).unbind(-1)
        columns = along(picks.target_RX), along(picks.law_RX)
        return Path(nodes_BD, has_children_BD, open_BD > 0, ratio_BD, mass_BD, *columns, fault_BD, target_after, self.known_D)

    def _step_by_step(self) -> Path:
        """Go down all rows in step; those whose path has ended idle along."""
        draft, depth = self.draft, self.draft.depth
        node_B = torch.zeros_like(draft.tokens_BN[:, 0])
        going_B, weight_B = torch.ones_like(node_B, dtype=torch.bool), torch.ones_like(node_B, dtype=torch.float64)
        nodes, path_BP = [node_B], draft.tokens_BN[:, :0]
        laws: list[Tensor] = []
        steps: list[_Picks] = []
        for level in range(depth):
            nodes_BK, children_BK = draft.children(node_B)
            going_B = going_B & worth_a_look(weight_B, self.least_weight) & (children_BK != NO_TOKEN).any(-1)
            if level and looks(going_B) and not bool(going_B.any()):
                break
            laws.append(self.target_law(node_B, path_BP))
            law_BD, uniforms_BU = draft.short_law(level, node_B), self.uniforms_BLU[:, level]
            steps.append(self._pick(laws[-1], law_BD, node_B, nodes_BK, children_BK, uniforms_BU))
            going_B = going_B & steps[-1].open_R
            weight_B = (weight_B * steps[-1].ratio_R).clamp(max=1.0)
            node_B = steps[-1].child_R.where(going_B, node_B)
            nodes.append(node_B)
            token_B1 = draft.tokens_BN.gather(1, node_B[:, None]).where(going_B[:, None], NO_TOKEN)
            path_BP = torch.cat([path_BP, token_B1], dim=1)
        nodes_BD = torch.stack(nodes + nodes[-1:] * (depth + 1 - len(nodes)), dim=1)
        last_B = (draft.children(nodes[-1])[1] != NO_TOKEN).any(-1)

        def target_after(accepted_B1: Tensor) -> Tensor:
            accepted_B, levels = accepted_B1[:, 0], len(laws)
            if looks(accepted_B) and len(accepted_B) == 1 and int(accepted_B) < levels:
                return laws[int(accepted_B)]
            places_P = torch.arange(levels, device=accepted_B.device)
            last_BV = self.target_law(nodes_BD.gather(1, accepted_B1)[:, 0], path_BP.where(places_P < accepted_B1, NO_TOKEN))
            return torch.stack([*laws, last_BV])[accepted_B, torch.arange(len(accepted_B), device=accepted_B.device)]

        def stacked(parts: list[Tensor]) -> Tensor:
            return parts[0][:, None] if len(parts) == 1 else torch.stack(parts, dim=1)

        return Path(
            nodes_BD,
            torch.stack([*(step.has_children_R for step in steps), last_B], dim=1),
            stacked([step.open_R for step in steps]),
            stacked([step.ratio_R for step in steps]),
            stacked([step.mass_R for step in steps]),
            stacked([step.target_RX for step in steps]),
            stacked([step.law_RX for step in steps]),
            stacked([step.fault_R for step in steps]),
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

        The tokens that a draft does not know are one token to the scheme: it proposes none of them, so it need not tell them
        apart, and what is left for that one token is theirs in proportion to p.
        """
        vocabulary, fault_R1 = self.draft.vocabulary, fault_of(target_RV, draft_RD)
        column_RK, target_RX, draft_RX = children_RK, target_RV, draft_RD
        if vocabulary is not None:
            column_RK = vocabulary.columns(children_RK)
            target_RX, draft_RX = vocabulary.lumped(target_RV), torch.nn.functional.pad(draft_RD, (0, 1))
        picked = self.scheme.select(target_RX, draft_RX, column_RK, uniforms_RU)
        column_R1 = picked.token_R[:, None]
        token_R1, open_R1 = column_R1.clamp(min=0), (column_R1 != NO_TOKEN) & (fault_R1 == Fault.NONE.value)
        mass_R1 = target_RX.sum(-1, keepdim=True, dtype=torch.float64)
        ratio_R1 = ratio(target_RX.gather(1, token_R1), mass_R1 * picked.law_RV.gather(1, token_R1))
        # The first match: a token drawn twice has equal subtrees in law.
        match_R1 = (column_RK == column_R1).to(torch.uint8).argmax(-1, keepdim=True)
        child_R1 = nodes_RK.gather(1, match_R1).where(open_R1, node_R[:, None])
        has_children_R = (children_RK != NO_TOKEN).any(-1)
        small = (child_R1[:, 0], has_children_R, open_R1[:, 0], ratio_R1[:, 0], mass_R1[:, 0])
        return _Picks(*small, target_RX, picked.law_RV, fault_R1[:, 0])


def worth_a_look(weight: Tensor, least_weight: float) -> Tensor:
    """Return where a path may be believed enough to look further."""
    return (weight >= least_weight) & (weight > 0)
