"""Growing a tree by the draft's path probabilities, whatever computes the laws.

References
----------
.. [1] Wang et al. 2024, OPT-Tree, arXiv:2406.17276.
.. [2] Li et al. 2024, EAGLE-2, arXiv:2406.16858.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polydraft.decision import Decision
from polydraft.drafters.candidates import Assembled, Front, Level, assemble, best_children
from polydraft.drafters.columns import Columns
from polydraft.drafters.drawn_children import drawn_children, schedule
from polydraft.drafters.growth import DEFAULT_SCHEME
from polydraft.drafters.policy import Plan, RowPolicy
from polydraft.sampling import NO_TOKEN, PartialVocabulary, SamplingParams, Warper
from polydraft.schemes import SCHEMES
from polydraft.schemes.arrays import looks
from polydraft.theory import Costs
from polydraft.trees import Block, DraftTree, DynamicShape, Topology

Expand = Callable[[Tensor, Tensor, Block], tuple[Tensor, Tensor]]
"""`(tokens_BW, parents_BW, block) -> features_BWF, logits_BWV`: pass nodes through the draft; parents by place above."""

_GREEDY_DRAFT_TEMPERATURE = 1.0
"""Of the laws that rank candidates where the target is greedy: there they estimate which token is the likeliest."""


class PathGrowth:
    """Grow trees whose shape follows the draft's confidence.

    Where the target is greedy, each level takes the `beam` likeliest paths further, and of all candidates of all levels the
    likeliest make the tree [1, 2]. Children are then chosen by rank, not drawn: verification by naive sampling is exact, and
    accepts as much as any exact verifier could. Above temperature 0 drawn children are accepted more often: how many a node
    draws is laid out beforehand, and which of them draw further is decided by the draft's probabilities and the tokens so
    far, which leaves the law of whatever is drawn as verification assumes it; no child that was drawn is left out again.

    Parameters
    ----------
    shape : DynamicShape
    costs : Costs
    params : SamplingParams
        The target's.
    draft_temperature : float, optional
        Temperature of the laws that rank candidates; the target's otherwise, 1 where that is 0.
    batch_size, vocab_size : int
    vocabulary : PartialVocabulary, optional
        What the columns of the draft's logits mean, where they are not all tokens.
    device : torch.device
    lead : int
        Places before the root in the drafter's passes.
    decision : Decision, optional
        Lets rows stop before what their policy wants.
    """

    def __init__(
        self,
        shape: DynamicShape,
        costs: Costs,
        params: SamplingParams,
        draft_temperature: float | None,
        batch_size: int,
        vocab_size: int,
        vocabulary: PartialVocabulary | None,
        device: torch.device,
        lead: int,
        decision: Decision | None = None,
    ) -> None:
        self.shape = shape
        self._drawn = params.temperature > 0 and draft_temperature != 0
        self.scheme = SCHEMES.get(DEFAULT_SCHEME if self._drawn else "top")()
        limits = [limit for limit in (self.scheme.max_children, vocab_size) if limit is not None]
        self._widths = schedule(costs, shape.nodes, shape.depth, min(limits)) if self._drawn else ()
        self.num_uniforms = sum(level.total for level in self._widths)
        """Random numbers a row that `grow` uses."""
        temperature = draft_temperature or params.temperature or _GREEDY_DRAFT_TEMPERATURE
        truncation: Any = {} if params.temperature > 0 else {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        self._params = dataclasses.replace(params, temperature=temperature, **truncation)
        self._vocab_size, self._device, self._lead = vocab_size, device, lead
        self._columns = Columns(vocabulary, vocab_size, params)
        self._vocabulary = self._columns.vocabulary
        self.policy = RowPolicy(costs, batch_size, shape.nodes, device, shape.adaptive)
        self._decision = decision
        self.resting = False
        """Whether every row rests, as the host knows it."""
        self._warper: Warper | None = None
        self._plan: Plan | None = None
        self._laws: list[Tensor] = []
        self.places_BN = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        """Where the drafter's memory has each node of the last tree, of those that have children."""

    @property
    def places(self) -> int:
        """Places that a round's passes take, the lead included."""
        width = max([self.shape.beam, *(level.nodes for level in self._widths)])
        return self._lead + 1 + width * (self.shape.depth - 1)

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """Take note of the certain texts, as penalties need them."""
        self._warper = Warper(self._params, self._vocab_size, texts, self._device)
        self.policy.begin()
        self.resting = False

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Add newly emitted tokens to the certain texts."""
        assert self._warper is not None, "begin() comes first"
        self._warper.advance(emitted)

    def bare(self, root_B: Tensor) -> DraftTree:
        """Return a tree of the root alone, for a round in which all rows rest; it verifies as deep trees do."""
        self._plan = None
        # No child was drawn, so any law will do.
        law_1 = torch.full((1,), 1 / self._vocab_size, device=root_B.device)
        laws = (law_1.expand(len(root_B), 1, self._vocab_size),) * self.shape.depth if self._drawn else ()
        tree = DraftTree.from_topology(Topology(), root_B[:, None], laws, torch.zeros_like(root_B[:1]))
        return dataclasses.replace(tree, depth=self.shape.depth)

    def grow(
        self,
        root_B: Tensor,
        features_B1F: Tensor,
        logits_B1V: Tensor,
        visible_BU: Tensor,
        depth_B: Tensor,
        expand: Expand,
        uniforms_BU: Tensor,
    ) -> DraftTree:
        """Grow the trees of a round.

        Parameters
        ----------
        root_B : Tensor
            Pending tokens.
        features_B1F, logits_B1V : Tensor
            The draft's at the root.
        visible_BU : Tensor
            Which of the `lead + 1` places up to the root the nodes see.
        depth_B : Tensor
            Position of the root among the drafter's uncommitted places.
        expand : callable
            Passes a level through the draft.
        uniforms_BU : Tensor
            Random numbers, where children are drawn.
        """
        going_B = self.policy.drafting_B
        levels_B, fronts, self._laws = going_B.long(), list[Front](), []
        scores_B1 = torch.zeros(len(root_B), 1, device=root_B.device)
        paths_BWP = root_B.new_empty(len(root_B), 1, 0)
        levels = [self._children(0, scores_B1, logits_B1V, paths_BWP, uniforms_BU).masked(going_B)]
        visible_BWU, features, logits = visible_BU[:, None], features_B1F, logits_B1V
        while len(levels) < self._depth:
            front = Front.of(levels[-1], self._widths[len(levels)].nodes if self._drawn else self.shape.beam)
            going_B = going_B & self.policy.wants_level(front.mass_B) & self._goes_on(features, logits, going_B)
            if looks(going_B) and not going_B.any():
                break
            paths_BWP = torch.cat([_picked(paths_BWP, front.parents_BW), front.tokens_BW[..., None]], dim=-1)
            visible_BWU = _seen(_picked(visible_BWU, front.parents_BW))
            depths_BW = (depth_B[:, None] + len(levels)).expand(-1, front.tokens_BW.shape[1])
            block = Block(visible_BWU.shape[-1] - visible_BWU.shape[1], depths_BW, visible_BWU)
            features, logits = expand(front.tokens_BW, front.parents_BW, block)
            level = self._children(len(levels), front.scores_BW, logits, paths_BWP, uniforms_BU).masked(going_B)
            self.policy.saw_level(
                front.mass_B, level.scores_BX.topk(min(8, level.scores_BX.shape[1])).values.exp().sum(-1), going_B
            )
            fronts.append(front)
            levels.append(level)
            levels_B = levels_B + going_B
        return self._tree(root_B, levels, fronts, levels_B)

    @property
    def _depth(self) -> int:
        return len(self._widths) if self._drawn else self.shape.depth

    def _goes_on(self, features_BWF: Tensor, logits_BWV: Tensor, going_B: Tensor) -> Tensor:
        return going_B if self._decision is None else self._decision.goes_on(features_BWF, logits_BWV)

    def _tree(self, root_B: Tensor, levels: list[Level], fronts: list[Front], levels_B: Tensor) -> DraftTree:
        """Keep all children that were drawn, or of the likeliest as many as pay."""
        scores_BC = torch.cat([level.scores_BX for level in levels], dim=1)
        if self._drawn:
            keep_BC = torch.cat([level.tokens_BX for level in levels], dim=1) != NO_TOKEN
            counts_B = keep_BC.sum(-1)
        else:
            best_BM, index_BM = scores_BC.topk(min(self.shape.nodes - 1, scores_BC.shape[1]), dim=1)
            counts_B = torch.minimum(self.policy.counts(best_BM.exp()), (best_BM > -torch.inf).sum(-1))
            wanted_BM = torch.arange(best_BM.shape[1], device=root_B.device) < counts_B[:, None]
            keep_BC = torch.zeros_like(scores_BC, dtype=torch.bool).scatter_(1, index_BM, wanted_BM)
        most = max(int(counts_B.max()), 1) if looks(counts_B) else min(self.shape.nodes - 1, keep_BC.shape[1])
        self._plan = Plan(torch.where(keep_BC, scores_BC.exp(), 0.0).sum(-1), counts_B, levels_B)
        branch = max([level.children for level in self._widths], default=self.shape.branch)
        grown = assemble(root_B, levels, fronts, keep_BC, most, branch, self.shape.depth)
        self.places_BN = self._places(grown, fronts)
        if not self._drawn:
            return grown.draft
        laws = tuple(self._laws)
        return dataclasses.replace(
            grown.draft,
            laws=laws + laws[-1:] * (self.shape.depth - len(laws)),
            law_rows_BN=grown.slots_BN,
            vocabulary=self._vocabulary,
        )

    def _places(self, grown: Assembled, fronts: list[Front]) -> Tensor:
        """Return where the drafter has each node; any place for nodes that did not go through it, which have no children."""
        first, firsts = self._lead + 1, [self._lead]
        for front in fronts:
            firsts.append(first)
            first += front.tokens_BW.shape[1]
        firsts += [first] * (self.shape.depth + 1 - len(firsts))
        starts_D = torch.tensor(firsts, device=self._device)
        return (starts_D[grown.draft.depths_BN] + grown.slots_BN).clamp(max=self.places - 1)

    def learn(self, accepted_B: Tensor, active_B: Tensor) -> Tensor:
        """Let the policy compare the round with its plan; return which rows want drafts next, for the host."""
        if self._plan is None:
            zero_B = torch.zeros_like(accepted_B)
            self._plan = Plan(zero_B.float(), zero_B, zero_B)
        self.policy.learn(self._plan, accepted_B, active_B)
        return (self.policy.drafting_B & active_B).long()[:, None]

    def receive(self, drafting: Sequence[bool]) -> None:
        """Take note on the host of which rows want drafts."""
        self.resting = not any(drafting)

    def _children(self, depth: int, scores_BW: Tensor, logits_BWV: Tensor, paths_BWP: Tensor, uniforms_BU: Tensor) -> Level:
        """Return the candidates below some nodes, drawn or chosen."""
        assert self._warper is not None, "begin() comes first"
        probs_BWV = self._warper.probs(self._columns.aligned(logits_BWV), paths_BWP)
        if self._drawn:
            widths, used = self._widths[depth], sum(level.total for level in self._widths[:depth])
            level = drawn_children(
                self.scheme, widths, scores_BW, probs_BWV, uniforms_BU[:, used : used + scores_BW.shape[1] * widths.children]
            )
            self._laws.append(probs_BWV)
        else:
            level = best_children(scores_BW, probs_BWV, self.shape.branch, self.shape.nodes - 1)
        if self._vocabulary is None:
            return level
        return dataclasses.replace(level, tokens_BX=self._vocabulary.tokens(level.tokens_BX))


def _picked(values_BWX: Tensor, index_BW: Tensor) -> Tensor:
    """Return each node's parent's row."""
    return values_BWX.gather(1, index_BW[..., None].expand(-1, -1, values_BWX.shape[-1]))


def _seen(above_BWU: Tensor) -> Tensor:
    """Let nodes see what their parents see, and themselves."""
    batch_size, width, _ = above_BWU.shape
    own_WW = torch.eye(width, dtype=torch.bool, device=above_BWU.device)
    return torch.cat([above_BWU, own_WW.expand(batch_size, -1, -1)], dim=-1)
