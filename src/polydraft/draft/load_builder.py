"""Static trees by load: rounds of a batch have the tree that brings most tokens over time, on a GPU."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from polydraft.draft.budget import keep_likeliest
from polydraft.draft.source import DistributionSource
from polydraft.draft.static_builder import DrawOptions, StaticBuilder
from polydraft.draft.static_plan import LevelPlan, TreePlan, plan_passes
from polydraft.draft.tree_choice import TreeChoice
from polydraft.sampling import NO_TOKEN, RowParams
from polydraft.transfers import assign
from polydraft.trees import DraftTree, Topology
from polydraft.verify import SCHEMES


class LoadBuilder(StaticBuilder):
    """Draw the static tree that pays for as many rows as share a round; steady rows have one tree whatever pays.

    Parameters
    ----------
    source, params, vocab_size, scheme, draft_temperature
        As for `StaticBuilder`.
    choice : TreeChoice
        Chooses among trees, of which the last was asked for, from round to round.
    """

    ROW_STATE = (*StaticBuilder.ROW_STATE, "_limited_B", "_steady", "_working_B", "_working")
    reads_along = True  # the source's memory keeps its form whatever the tree

    def __init__(
        self,
        source: DistributionSource,
        choice: TreeChoice,
        params: RowParams,
        vocab_size: int,
        **options: Unpack[DrawOptions],
    ) -> None:
        super().__init__(source, choice.sizes[-1].tree, params, vocab_size, **options)
        self._choice, self._limits = choice, False
        """`_limits`: whether rehearsed rounds are such as have limited rows."""
        self._plans = [plan_passes(size.tree, source.device, source.lead) for size in choice.sizes]
        self._limited_B = torch.zeros_like(self._greedy_B)
        """Rows whose trees are the steady one, where others' are larger."""
        self._steady: list[bool] = [False] * len(params)
        """The same, whatever the tree."""
        self._working_B = torch.ones_like(self._greedy_B)
        """Rows at work, which share the nodes of a round where these are shared out."""
        self._working = [True] * len(params)
        self._chances: list[Tensor] = []
        """How likely each row's likeliest child is, level by level, where nodes are shared out."""

    @property
    def next_tree(self) -> Topology:
        """The one that pays."""
        return self._choice.sizes[self._choice.place].tree

    @property
    def plan(self) -> TreePlan:
        """Its passes."""
        return self._plans[self._choice.place]

    @property
    def _spine(self) -> tuple[int, ...]:
        """The next tree's nodes that limited rows have, root first; none where no row is limited."""
        choice = self._choice
        if choice.place == choice.steady_place:
            return ()
        mixed = self._limits if choice.rehearsed is not None else choice.steady and choice.mixed
        return choice.spine(choice.place) if mixed else ()

    @property
    def limited(self) -> Mapping[int, Sequence[int]]:
        """Rows that must have the steady tree, in rounds of a larger one."""
        used = [node - 1 for node in self._spine[1:]]
        return {row: used for row, steady in enumerate(self._steady) if steady} if used else {}

    @property
    def kind(self) -> Hashable:
        """The tree, and whether some rows are limited."""
        return (self._choice.place, "limited") if self._spine else self._choice.place

    @property
    def num_kinds(self) -> int:
        """One for each tree that rounds of so many rows may have, and one more where some may be limited to the steady one."""
        return len(self._kinds)

    @property
    def _kinds(self) -> list[tuple[int, bool]]:
        choice, rows = self._choice, len(self._greedy_B)
        return [*((place, False) for place in choice.kinds(rows)), *((place, True) for place in choice.mixed_kinds(rows))]

    def rehearse(self, number: int | None) -> None:
        """Let all rounds have one tree, the largest first."""
        kinds = self._kinds
        self._choice.rehearsed, self._limits = (None, False) if number is None else kinds[min(number, len(kinds) - 1)]

    def share(self, loads: Sequence[int], steady: Sequence[bool | None]) -> None:
        """Keep to one tree for texts that depend on nothing but themselves, and to the largest for a row alone."""
        # Whether fewer children than there is room for verify alike is tested of registered schemes.
        known = self.usual_scheme.name in SCHEMES and type(self.usual_scheme) is SCHEMES.get(self.usual_scheme.name)
        self._choice.alone, self._choice.steady = len(loads) == 1, True in steady
        self._choice.mixed = known and False in steady
        wanted = [bool(one) for one in steady]
        if self._steady != wanted:
            self._steady = wanted
            assign(self._limited_B, wanted)
        working = [one is not None for one in steady]
        if self._working != working:
            self._working = working
            assign(self._working_B, working)

    def new_row(self, name: str) -> bool:
        """Begin with whatever tree pays."""
        return False

    def use(self, params: RowParams) -> None:
        """Take the parameters that the rows have from now on, and choose the tree for as many rows."""
        super().use(params)
        self._choice.ladder.fit(len(params), self.scheme.name)

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts; the time until the next round is not measured."""
        super().begin(texts, rows, params)
        self._choice.ladder.pause()

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Learn what the round brought those that had all of its tree."""
        super().advance(emitted)
        limited = self.limited
        accepted = [len(tokens) - 1 for row, tokens in enumerate(emitted) if tokens and row not in limited]
        self._choice.settle(len(emitted), accepted, self.scheme.name)

    def draw(self, level: LevelPlan, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> Tensor | None:
        """Leave limited rows one child of one node, as the steady tree has: drawn anew, unless it is the likeliest anyway."""
        probs_BGV = super().draw(level, logits_BGV, tokens_BN, uniforms_BU)
        if self._kept is not None:
            self._chances.append(self._chance(logits_BGV, probs_BGV))
        if not (spine := self._spine):
            return probs_BGV
        limited_B1, first = self._limited_B[:, None], None
        if self._drawn < len(spine):
            child = spine[self._drawn]
            first = tokens_BN[:, child : child + 1].clone()
            if probs_BGV is not None:
                first = self._distributions.tokens(self._draw(probs_BGV[:, 0], uniforms_BU[:, child - 1 : child]))
        nodes = level.children
        tokens_BN[:, nodes] = tokens_BN[:, nodes].masked_fill(limited_B1, NO_TOKEN)
        if first is not None:
            tokens_BN[:, child : child + 1] = torch.where(limited_B1, first, tokens_BN[:, child : child + 1])
        return probs_BGV

    def _chance(self, logits_B1V: Tensor, probs_B1V: Tensor | None) -> Tensor:
        """Return how likely the draft finds each row's likeliest child, at its temperature, or at 1 where that is 0."""
        drawn_B = None if probs_B1V is None else probs_B1V[:, 0].amax(-1)
        if drawn_B is not None and not self._distributions.params.mixed:
            return drawn_B
        known_BV = logits_B1V[:, 0, : self._distributions.num_columns].float()
        likeliest_B = (known_BV.amax(-1) - known_BV.logsumexp(-1)).exp()
        return likeliest_B if drawn_B is None else torch.where(self._greedy_B, likeliest_B, drawn_B.float())

    @property
    def _kept(self) -> int | None:
        """How many nodes of all rows the target reads in the next round; None for all."""
        choice = self._choice
        return choice.sizes[choice.place].kept(len(self._greedy_B))

    def plant(self, root_B: Tensor) -> Tensor:
        """Begin new trees."""
        self._chances = []
        return super().plant(root_B)

    def tree(self, tokens_BN: Tensor) -> DraftTree:
        """Return the trees, without the nodes that are not worth the target's time where rows share it out."""
        if (count := self._kept) is None:
            return super().tree(tokens_BN)
        kept_K = keep_likeliest(torch.stack(self._chances, dim=1), self._working_B, count)
        kept_X = torch.zeros_like(tokens_BN, dtype=torch.bool).flatten().index_fill_(0, kept_K, value=True)
        return replace(super().tree(tokens_BN.where(kept_X.view_as(tokens_BN), NO_TOKEN)), kept_K=kept_K)
