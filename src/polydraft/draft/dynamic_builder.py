"""Trees whose shape follows the draft's path probabilities in every round, on a CPU.

References
----------
.. [1] Wang et al. 2024, OPT-Tree, arXiv:2406.17276.
.. [2] Li et al. 2024, EAGLE-2, arXiv:2406.16858.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.draft.builder import DraftDistributions
from polydraft.draft.candidates import (
    Front,
    Level,
    best,
    best_children,
    drawn_children,
    fixed_shares,
    gains,
    room_of_levels,
    total,
)
from polydraft.draft.growth import Growing, Grown
from polydraft.draft.policy import RowPolicy
from polydraft.draft.shaped_builder import ShapedBuilder
from polydraft.draft.source import DistributionSource
from polydraft.draft.static_builder import DEFAULT_SCHEME
from polydraft.draft.stopping_builder import DECISION_OBSTACLE, Decision
from polydraft.sampling import NO_TOKEN, RowParams
from polydraft.trees import DraftTree, DynamicShape
from polydraft.verify import SCHEMES, Scheme
from polydraft.verify.weights import largest


class Candidates(ABC):
    """How the candidates of a level are made, and which candidates of all levels are kept.

    Parameters
    ----------
    shape : DynamicShape
    distributions : DraftDistributions
    policy : RowPolicy
    """

    scheme: Scheme
    num_uniforms: int = 0

    def __init__(self, shape: DynamicShape, distributions: DraftDistributions, policy: RowPolicy) -> None:
        self.shape, self.distributions, self.policy = shape, distributions, policy

    @abstractmethod
    def width(self, depth: int) -> int:
        """Return how many nodes of a level get children."""

    @property
    @abstractmethod
    def branch(self) -> int:
        """Most children of a node."""

    @abstractmethod
    def children(self, growing: Growing, logits_BWV: Tensor, uniforms_BU: Tensor) -> tuple[Level, Tensor | None]:
        """Return candidates below the nodes that get children now, and the tokens they promise, if known."""

    @abstractmethod
    def gained(self, levels: list[Level], promise_B: Tensor | None) -> Tensor:
        """Return what the last level adds to a tree, less the cost of its nodes."""

    @abstractmethod
    def room(self, growing: Growing) -> Tensor:
        """Say which rows have room for another level."""

    @abstractmethod
    def kept(self, growing: Growing) -> tuple[Tensor, Tensor]:
        """Return which candidates of all levels make the tree, and how many."""

    def dressed(self, grown: Grown) -> DraftTree:
        """Return the tree, with the distributions that it was drawn from."""
        return grown.draft

    def _tokens(self, level: Level) -> Level:
        """Turn columns of the draft's distributions into tokens."""
        return dataclasses.replace(level, tokens_BX=self.distributions.tokens(level.tokens_BX))


class Likeliest(Candidates):
    """The likeliest paths, as many as pay [1, 2].

    They are chosen by rank, not drawn, so naive sampling is an exact verification. If the target is greedy, no exact verifier
    accepts more.
    """

    scheme = SCHEMES.get("top")()

    def width(self, depth: int) -> int:
        """Return the shape's beam."""
        return self.shape.beam

    @property
    def branch(self) -> int:
        """Return the shape's limit."""
        return self.shape.branch

    def children(self, growing: Growing, logits_BWV: Tensor, uniforms_BU: Tensor) -> tuple[Level, Tensor | None]:
        """Choose the likeliest children."""
        logits_BWV = self.distributions.prepared(logits_BWV, growing.paths_BWP, len(growing.levels))
        probs_BWV = self.distributions.probs(logits_BWV, growing.paths_BWP)
        return self._tokens(best_children(growing.scores_BW, probs_BWV, self.shape.branch, self.shape.nodes - 1)), None

    def gained(self, levels: list[Level], promise_B: Tensor | None) -> Tensor:
        """Compare the best tree of all levels with the best one without the last."""
        return self._promise(levels) - self._promise(levels[:-1])

    def _promise(self, levels: list[Level]) -> Tensor:
        scores_BC = torch.cat([level.scores_BX for level in levels], 1)
        return self.policy.net(best(scores_BC, self.shape.nodes - 1)[0].exp())

    def room(self, growing: Growing) -> Tensor:
        """There is always room: better candidates replace others."""
        return torch.ones(len(growing.scores_BW), dtype=torch.bool)

    def kept(self, growing: Growing) -> tuple[Tensor, Tensor]:
        """Keep the likeliest, as many as pay."""
        scores_BC = growing.scores_BC
        best_BM, index_BM = best(scores_BC, self.shape.nodes - 1)
        counts_B = torch.minimum(self.policy.counts(best_BM.exp()), (best_BM > -torch.inf).sum(-1))
        chosen_BM = torch.arange(best_BM.shape[1]) < counts_B[:, None]
        return torch.zeros_like(scores_BC, dtype=torch.bool).scatter_(1, index_BM, chosen_BM), counts_B


class Drawn(Candidates):
    """Drawn children: if the target samples, they are accepted more often than the likeliest ones.

    How many children a node draws (few if the draft is sure), and which of them get children, depends only on the draft's
    distributions and the tokens so far, and no drawn child is dropped. So children have the distribution that verification
    assumes.
    """

    scheme = SCHEMES.get(DEFAULT_SCHEME)()

    def __init__(self, shape: DynamicShape, distributions: DraftDistributions, policy: RowPolicy) -> None:
        super().__init__(shape, distributions, policy)
        limits = [limit for limit in (self.scheme.max_children, distributions.num_columns) if limit is not None]
        self._room = room_of_levels(shape, min(limits))
        self._shares = fixed_shares(shape, self._room)
        self.num_uniforms = sum(level.total for level in self._room)
        """One per candidate that the levels have room for."""
        self._level_probs: list[Tensor] = []
        self.greedy_B: Tensor | None = None
        """Greedy rows, whose candidates are the likeliest tokens after all; None if there are none."""

    def width(self, depth: int) -> int:
        """Let a few nodes draw."""
        return self._room[depth].nodes

    @property
    def branch(self) -> int:
        """Return the most that any level has room for."""
        return max(level.children for level in self._room)

    def children(self, growing: Growing, logits_BWV: Tensor, uniforms_BU: Tensor) -> tuple[Level, Tensor | None]:
        """Draw as many children as pay."""
        depth, scores_BW = len(growing.levels), growing.scores_BW
        if depth == 0:
            self._level_probs = []
        probs_BWV = self.distributions.probs(logits_BWV, growing.paths_BWP)
        self._level_probs.append(probs_BWV)
        most, used = self._room[depth].children, sum(level.total for level in self._room[:depth])
        own_BU = uniforms_BU[:, used : used + scores_BW.shape[1] * most]
        # How many children pay, and which are certain, both follow from the likeliest tokens, which are found once.
        ranked = largest(probs_BWV.flatten(0, 1), most)
        gain_BWK = gains(ranked[0], scores_BW.exp(), self.policy.belief)
        counts_BW, promise_B = self.policy.allot(gain_BWK, self._nodes(growing), self._shares[depth], least=int(depth == 0))
        level = drawn_children(self.scheme, scores_BW, probs_BWV, ranked, counts_BW, own_BU, self.greedy_B, self.policy.belief)
        return self._tokens(level), promise_B

    def _nodes(self, growing: Growing) -> Tensor:
        """Return how many candidates each row has."""
        if not growing.levels:
            return torch.zeros(len(growing.scores_BW), dtype=torch.long)
        return (growing.tokens_BC != NO_TOKEN).sum(-1)

    def gained(self, levels: list[Level], promise_B: Tensor | None) -> Tensor:
        """Return what the drawn children promise."""
        assert promise_B is not None
        return promise_B

    def room(self, growing: Growing) -> Tensor:
        """Stop when the tree is full, because drawn children are never replaced."""
        return self._nodes(growing) < self.shape.nodes - 1

    def kept(self, growing: Growing) -> tuple[Tensor, Tensor]:
        """Keep all that was drawn."""
        keep_BC = growing.tokens_BC != NO_TOKEN
        return keep_BC, keep_BC.sum(-1)

    def dressed(self, grown: Grown) -> DraftTree:
        """Add a distribution for each level."""
        probs = tuple(self._level_probs)
        return dataclasses.replace(
            grown.draft,
            distributions=probs + probs[-1:] * (self.shape.depth - len(probs)),
            distribution_rows_BN=grown.slots_BN,
            vocabulary=self.distributions.vocabulary,
        )


class DynamicBuilder(ShapedBuilder):
    """Grow trees whose shape follows the draft's confidence, and that are as large as pays.

    Parameters
    ----------
    source, shape, params, vocab_size, draft_temperature
        As for `ShapedBuilder`.
    policy : RowPolicy
    decision : Decision, optional
        Lets rows stop earlier than their policy would.
    """

    learns = elastic = movable = True
    policy: RowPolicy

    def __init__(
        self,
        source: DistributionSource,
        shape: DynamicShape,
        params: RowParams,
        vocab_size: int,
        *,
        policy: RowPolicy,
        draft_temperature: float | None = None,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(source, shape, params, vocab_size, draft_temperature=draft_temperature, belief=policy.belief)
        self.policy, self._decision = policy, decision
        self.obstacle = DECISION_OBSTACLE if decision is not None else "the host decides how dynamic trees grow"
        self._likeliest, self._drawn = Likeliest(shape, self._distributions, policy), Drawn(shape, self._distributions, policy)
        self._note(params)

    def _note(self, params: RowParams) -> None:
        """Choose how candidates are made, by the rows' parameters."""
        drawn = not params.decided and self._draft_temperature != 0
        self._candidates: Candidates = self._drawn if drawn else self._likeliest
        self._drawn.greedy_B = torch.tensor(params.greedy) if drawn and params.mixed else None

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed."""
        self._note(params)
        super().use(params)

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts in some rows, and set the parameters of all rows."""
        self._note(params)
        super().begin(texts, rows, params)

    @property
    def scheme(self) -> Scheme:
        """The default scheme; `top` if no row draws."""
        return self._candidates.scheme

    @property
    def num_uniforms(self) -> int:
        """One per candidate that the levels have room for, if candidates are drawn."""
        return self._candidates.num_uniforms

    def build(self, tail_B2: Tensor, uniforms_BU: Tensor) -> DraftTree:
        """Grow the trees of a round: pass the likeliest paths through the source, level by level."""
        self._grown = None
        if self.resting:
            return self._bare(tail_B2[:, 1])
        candidates, growing = self._candidates, Growing(tail_B2[:, 1], self.passes, torch.float64)
        features_BWF = self.source.root(tail_B2)
        logits_BWV, going_B = self.source.logits(features_BWF), torch.tensor(self.policy.drafting)
        level, _ = candidates.children(growing, logits_BWV, uniforms_BU)
        growing.levels.append(level.masked(going_B))
        levels_B = going_B.long()
        while len(growing.levels) < self.depth:
            front = Front.of(growing.levels[-1], candidates.width(len(growing.levels)))
            mass_B = front.mass_B
            going_B = going_B & self.policy.wants_level(mass_B, len(growing.levels)) & candidates.room(growing)
            if self._decision is not None:
                going_B = going_B & self._decision.goes_on(features_BWF, logits_BWV)
            if not going_B.any():
                break
            block = growing.pass_on(front)
            features_BWF = self.source.expand(front.tokens_BW, front.parents_BW, block)
            logits_BWV = self.source.logits(features_BWF)
            level, promise_B = candidates.children(growing, logits_BWV, uniforms_BU)
            growing.levels.append(level.masked(going_B))
            if self.policy.adaptive:
                self.policy.saw_level(mass_B, candidates.gained(growing.levels, promise_B), going_B)
            levels_B = levels_B + going_B
        return self._tree(growing, levels_B)

    def _tree(self, growing: Growing, levels_B: Tensor) -> DraftTree:
        """Make a tree of the kept candidates, and tell the policy what it promises."""
        keep_BC, counts_B = self._candidates.kept(growing)
        # The batch sets the number of levels; more of them must not change a row's sum, which its policy learns from.
        expected_B = total(growing.scores_BC.exp().where(keep_BC, 0.0))
        self.policy.plan(expected_B.tolist(), counts_B.tolist(), levels_B.tolist())
        most = int(counts_B.max())
        if most == 0:
            return self._bare(growing.root_B)
        self._grown = growing.tree(keep_BC, most, self._candidates.branch, self.depth)
        return self._candidates.dressed(self._grown)
