"""Static trees by load: rounds of a batch have the tree that brings most tokens over time, on a GPU."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor

from polydraft.devices import assign
from polydraft.draft.source import DistributionSource
from polydraft.draft.static_builder import DrawOptions, StaticBuilder
from polydraft.draft.static_plan import LevelPlan, TreePlan, plan_passes
from polydraft.draft.tree_choice import TreeChoice
from polydraft.sampling import NO_TOKEN, RowParams
from polydraft.trees import Topology
from polydraft.verify import SCHEMES


class LoadBuilder(StaticBuilder):
    """Draw the static tree that pays for the number of rows in a round; steady rows always have the same tree.

    Parameters
    ----------
    source, params, vocab_size, scheme, draft_temperature
        As for `StaticBuilder`.
    choice : TreeChoice
        Chooses a tree for every round; the last of its trees is the one that was asked for.
    """

    ROW_STATE = (*StaticBuilder.ROW_STATE, "_limited_B", "_steady")
    reads_along = True  # the source's cache must not depend on the tree

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
        """`_limits`: whether rehearsed rounds have limited rows."""
        self._plans = [plan_passes(tree, source.device, source.lead) for tree in choice.trees]
        self._limited_B = torch.zeros_like(self._greedy_B)
        """`_steady` on the device: rows limited to the steady tree in rounds of a larger one."""
        self._steady: list[bool] = [False] * len(params)
        """Rows whose trees must not depend on what pays."""

    @property
    def next_tree(self) -> Topology:
        """The tree that pays."""
        return self._choice.trees[self._choice.place]

    @property
    def plan(self) -> TreePlan:
        """The passes of the next tree."""
        return self._plans[self._choice.place]

    @property
    def _spine(self) -> tuple[int, ...]:
        """The nodes of the next tree that limited rows have, root first; empty if no row is limited."""
        choice = self._choice
        if choice.place == choice.steady_place:
            return ()
        mixed = self._limits if choice.rehearsed is not None else choice.steady and choice.mixed
        return choice.spine(choice.place) if mixed else ()

    @property
    def limited(self) -> Mapping[int, Sequence[int]]:
        """Rows that must have the steady tree in rounds of a larger one."""
        used = [node - 1 for node in self._spine[1:]]
        return {row: used for row, steady in enumerate(self._steady) if steady} if used else {}

    @property
    def kind(self) -> Hashable:
        """The tree, and whether some rows are limited."""
        return (self._choice.place, "limited") if self._spine else self._choice.place

    @property
    def num_kinds(self) -> int:
        """One per tree that rounds may have, and another one if some rows may be limited to the steady tree."""
        return len(self._kinds)

    @property
    def _kinds(self) -> list[tuple[int, bool]]:
        choice, rows = self._choice, len(self._greedy_B)
        return [*((place, False) for place in choice.kinds(rows)), *((place, True) for place in choice.mixed_kinds(rows))]

    def rehearse(self, number: int | None) -> None:
        """Give all rounds one tree; number 0 is the largest."""
        kinds = self._kinds
        self._choice.rehearsed, self._limits = (None, False) if number is None else kinds[min(number, len(kinds) - 1)]

    def share(self, loads: Sequence[int], steady: Sequence[bool | None]) -> None:
        """Use one fixed tree for steady texts, and the largest for a row alone."""
        # Limited rows draw fewer children than there is room for: only registered schemes are tested to verify that alike.
        known = self.usual_scheme.name in SCHEMES and type(self.usual_scheme) is SCHEMES.get(self.usual_scheme.name)
        self._choice.alone, self._choice.steady = len(loads) == 1, True in steady
        self._choice.mixed = known and False in steady
        wanted = [bool(one) for one in steady]
        if self._steady != wanted:
            self._steady = wanted
            assign(self._limited_B, wanted)

    def new_row(self, name: str) -> bool:
        """Start without a limit."""
        return False

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed, and choose a tree for that number."""
        super().use(params)
        self._choice.ladder.fit(len(params), self.scheme.name)

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts; the gap before the next round is not timed."""
        super().begin(texts, rows, params)
        self._choice.ladder.pause()

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Learn from the rows that had the whole tree."""
        super().advance(emitted)
        limited = self.limited
        accepted = [len(tokens) - 1 for row, tokens in enumerate(emitted) if tokens and row not in limited]
        self._choice.settle(len(emitted), accepted, self.scheme.name)

    def draw(self, level: LevelPlan, logits_BGV: Tensor, tokens_BN: Tensor, uniforms_BU: Tensor) -> Tensor | None:
        """Draw one level; limited rows keep one child of one node, drawn again as an only child unless chosen by rank."""
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
