"""Static trees by load: rounds of a batch have the tree that brings most tokens over time, on a GPU."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from polydraft.draft.source import DistributionSource
from polydraft.draft.static_builder import DrawOptions, StaticBuilder
from polydraft.draft.static_plan import LevelPlan, TreePlan, plan_passes
from polydraft.draft.tree_choice import TreeChoice
from polydraft.sampling import NO_TOKEN, RowParams
from polydraft.transfers import assign
from polydraft.trees import Topology
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

    ROW_STATE = (*StaticBuilder.ROW_STATE, "_limited_B", "_steady")
    reads_along = True  # the source's memory keeps its form whatever the tree

    def __init__(
        self,
        source: DistributionSource,
        choice: TreeChoice,
        params: RowParams,
        vocab_size: int,
        **options: Unpack[DrawOptions],
    ) -> None:
        super().__init__(source, choice.trees[-1], params, vocab_size, **options)
        self._choice, self._limits = choice, False
        """`_limits`: whether rehearsed rounds are such as have limited rows."""
        self._plans = [plan_passes(tree, source.device, source.lead) for tree in choice.trees]
        self._limited_B = torch.zeros_like(self._greedy_B)
        """Rows whose trees are the steady one, where others' are larger."""
        self._steady: list[bool] = [False] * len(params)
        """The same, whatever the tree."""

    @property
    def next_tree(self) -> Topology:
        """The one that pays."""
        return self._choice.trees[self._choice.place]

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
