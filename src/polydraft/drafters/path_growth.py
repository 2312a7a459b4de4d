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
from polydraft.drafters.candidates import Level, assemble, best_children
from polydraft.drafters.policy import Plan, RowPolicy
from polydraft.sampling import PartialVocabulary, SamplingParams, Warper
from polydraft.schemes import SCHEMES
from polydraft.theory import Costs
from polydraft.trees import Block, DraftTree, DynamicShape, Topology

Expand = Callable[[Tensor, Tensor, Block], tuple[Tensor, Tensor]]
"""`(tokens_BW, parents_BW, block) -> features_BWF, logits_BWV`: pass nodes through the draft; parents by place above."""

_GREEDY_DRAFT_TEMPERATURE = 1.0
"""Of the laws that rank candidates where the target is greedy: there they estimate which token is the likeliest."""


class PathGrowth:
    """Grow trees whose shape follows the draft's confidence.

    Each level takes the `beam` likeliest paths further; of all candidates of all levels the likeliest make the tree.
    Children are chosen by rank, not drawn: verification by naive sampling is then exact, and accepts as much as any exact
    verifier could (theory of deterministic candidates, docs/theory.md).

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
        self.scheme, self.shape = SCHEMES.get("top")(), shape
        temperature = draft_temperature or params.temperature or _GREEDY_DRAFT_TEMPERATURE
        truncation: Any = {} if params.temperature > 0 else {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        self._params = dataclasses.replace(params, temperature=temperature, **truncation)
        self._vocab_size, self._device, self._lead = vocab_size, device, lead
        # Penalties and biases speak of all tokens, so laws under them are spread out at once.
        short = not (params.needs_history or params.logit_bias)
        self._known, self._vocabulary = vocabulary, vocabulary if short else None
        self.policy = RowPolicy(costs, batch_size, shape.nodes, device, shape.adaptive)
        self._decision = decision
        self.resting = False
        """Whether every row rests, as the host knows it."""
        self._warper: Warper | None = None
        self._plan: Plan | None = None
        self.places_BN = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
        """Where the drafter's memory has each node of the last tree, of those that have children."""

    @property
    def places(self) -> int:
        """Places that a round's passes take, the lead included."""
        return self._lead + 1 + self.shape.beam * (self.shape.depth - 1)

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
        tables = Topology().tables(root_B.device)
        size = len(root_B)
        return DraftTree(
            root_B[:, None],
            tables.depths_N.expand(size, -1),
            tables.ancestors_NN.expand(size, -1, -1),
            tables.child_table_NK.expand(size, -1, -1),
            self.shape.depth,
        )

    def grow(
        self, root_B: Tensor, features_B1F: Tensor, logits_B1V: Tensor, visible_BU: Tensor, depth_B: Tensor, expand: Expand
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
        """
        shape, most = self.shape, self.shape.nodes - 1
        beam = min(shape.beam, most)
        going_B = self.policy.drafting_B
        scores_B1 = torch.zeros(len(root_B), 1, device=root_B.device)
        paths_BWP = root_B.new_empty(len(root_B), 1, 0)
        level = self._children(scores_B1, logits_B1V, paths_BWP, most).masked(going_B)
        levels, levels_B = [level], going_B.long()
        visible_BWU = visible_BU[:, None]
        features, logits = features_B1F, logits_B1V
        while len(levels) < shape.depth:
            front = level.head(beam)
            mass_B = front.scores_BX.exp().sum(-1)
            going_B = going_B & self.policy.wants_level(mass_B) & self._goes_on(features, logits, going_B)
            # On a CPU a look costs nothing and saves levels that nobody wants; elsewhere it would stall the device.
            if self._device.type == "cpu" and not going_B.any():
                break
            paths_BWP = torch.cat([_picked(paths_BWP, front.parents_BX), front.tokens_BX[..., None]], dim=-1)
            visible_BWU = _seen(_picked(visible_BWU, front.parents_BX))
            depths_BW = (depth_B[:, None] + len(levels)).expand(-1, front.tokens_BX.shape[1])
            block = Block(visible_BWU.shape[-1] - visible_BWU.shape[1], depths_BW, visible_BWU)
            features, logits = expand(front.tokens_BX, front.parents_BX, block)
            level = self._children(front.scores_BX, logits, paths_BWP, most).masked(going_B)
            self.policy.saw_level(mass_B, level.head(beam).scores_BX.exp().sum(-1), going_B)
            levels.append(level)
            levels_B = levels_B + going_B
        return self._tree(root_B, levels, levels_B)

    def _goes_on(self, features_BWF: Tensor, logits_BWV: Tensor, going_B: Tensor) -> Tensor:
        return going_B if self._decision is None else self._decision.goes_on(features_BWF, logits_BWV)

    def _tree(self, root_B: Tensor, levels: list[Level], levels_B: Tensor) -> DraftTree:
        """Keep the likeliest candidates, as many as pay."""
        scores_BC = torch.cat([level.scores_BX for level in levels], dim=1)
        probs_BM = scores_BC.topk(min(self.shape.nodes - 1, scores_BC.shape[1]), dim=1).values.exp()
        counts_B = torch.minimum(self.policy.counts(probs_BM), (probs_BM > 0).sum(-1))
        most = max(int(counts_B.max()), 1) if self._device.type == "cpu" else probs_BM.shape[1]
        wanted_BM = torch.arange(probs_BM.shape[1], device=root_B.device) < counts_B[:, None]
        self._plan = Plan((probs_BM * wanted_BM).sum(-1), counts_B, levels_B)
        grown = assemble(root_B, levels, counts_B, most, self.shape.branch, self.shape.depth)
        self.places_BN = self._places(levels, grown.sources_BM)
        return grown.draft

    def _places(self, levels: list[Level], sources_BM: Tensor) -> Tensor:
        """Return where the drafter has each node; any place for nodes that did not go through it, which have no children."""
        first, parts = self._lead + 1, []
        for level in levels:
            size = level.scores_BX.shape[1]
            parts.append(torch.arange(first, first + size, device=self._device))
            first += min(self.shape.beam, size)
        place_C = torch.cat(parts).clamp(max=self.places - 1)
        return torch.nn.functional.pad(place_C[sources_BM], (1, 0), value=self._lead)

    def learn(self, accepted_B: Tensor, active_B: Tensor) -> Tensor:
        """Let the policy compare the round with its plan; return which rows want drafts next, for the host."""
        if self._plan is None:
            zero_B = torch.zeros_like(accepted_B)
            self._plan = Plan(zero_B.float(), zero_B, zero_B)
        self.policy.learn(self._plan, accepted_B, active_B)
        return self.policy.drafting_B.long()[:, None]

    def receive(self, drafting: Sequence[bool]) -> None:
        """Take note on the host of which rows want drafts."""
        self.resting = not any(drafting)

    def _children(self, scores_BW: Tensor, logits_BWV: Tensor, paths_BWP: Tensor, most: int) -> Level:
        assert self._warper is not None, "begin() comes first"
        level = best_children(scores_BW, self._warper.probs(self._aligned(logits_BWV), paths_BWP), self.shape.branch, most)
        if self._vocabulary is None:
            return level
        return dataclasses.replace(level, tokens_BX=self._vocabulary.tokens(level.tokens_BX))

    def _aligned(self, logits_BWV: Tensor) -> Tensor:
        """Return logits whose columns are the target's tokens, or the draft's own few."""
        if self._vocabulary is not None:
            return logits_BWV
        if self._known is not None:
            return self._known.spread(logits_BWV, fill=-torch.inf)
        missing = self._vocab_size - logits_BWV.shape[-1]
        return torch.nn.functional.pad(logits_BWV, (0, missing), value=-torch.inf) if missing else logits_BWV


def _picked(values_BWX: Tensor, index_BW: Tensor) -> Tensor:
    """Return each node's parent's row."""
    return values_BWX.gather(1, index_BW[..., None].expand(-1, -1, values_BWX.shape[-1]))


def _seen(above_BWU: Tensor) -> Tensor:
    """Let nodes see what their parents see, and themselves."""
    batch_size, width, _ = above_BWU.shape
    own_WW = torch.eye(width, dtype=torch.bool, device=above_BWU.device)
    return torch.cat([above_BWU, own_WW.expand(batch_size, -1, -1)], dim=-1)
