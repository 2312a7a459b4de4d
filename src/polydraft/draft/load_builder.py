"""Static trees by load: rounds of a batch have the tree that brings most tokens over time, on a GPU."""

from collections.abc import Hashable, Sequence
from typing import Unpack

from polydraft.draft.source import DistributionSource
from polydraft.draft.static_builder import DrawOptions, StaticBuilder
from polydraft.draft.static_plan import TreePlan, plan_passes
from polydraft.draft.tree_choice import TreeChoice
from polydraft.sampling import RowParams
from polydraft.trees import Topology


class LoadBuilder(StaticBuilder):
    """Draw the static tree that pays for the number of rows in a round.

    If rows are neither greedy nor coupled, the text for a seed depends on what pays.

    Parameters
    ----------
    source, params, vocab_size, scheme, draft_temperature
        As for `StaticBuilder`.
    choice : TreeChoice
        Chooses a tree for every round; the last of its trees is the one that was asked for.
    """

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
        self._choice = choice
        self._plans = [plan_passes(tree, source.device, source.lead) for tree in choice.trees]

    @property
    def next_tree(self) -> Topology:
        """The tree that pays."""
        return self._choice.trees[self._choice.place]

    @property
    def plan(self) -> TreePlan:
        """The passes of the next tree."""
        return self._plans[self._choice.place]

    @property
    def kind(self) -> Hashable:
        """The tree."""
        return self._choice.place

    @property
    def num_kinds(self) -> int:
        """One per tree that rounds may have."""
        return len(self._kinds)

    @property
    def _kinds(self) -> list[int]:
        return self._choice.kinds(len(self._greedy_B))

    def rehearse(self, number: int | None) -> None:
        """Give all rounds one tree; number 0 is the largest."""
        kinds = self._kinds
        self._choice.rehearsed = None if number is None else kinds[min(number, len(kinds) - 1)]

    def share(self, loads: Sequence[int]) -> None:
        """Use the largest tree for a row alone."""
        self._choice.alone = len(loads) == 1

    def use(self, params: RowParams) -> None:
        """Set the rows' parameters after the number of rows has changed, and choose a tree for that number."""
        super().use(params)
        self._choice.ladder.fit(len(params), self.scheme.name)

    def begin(self, texts: Sequence[Sequence[int]], rows: Sequence[int], params: RowParams) -> None:
        """Begin new texts; the gap before the next round is not timed."""
        super().begin(texts, rows, params)
        self._choice.ladder.pause()

    def advance(self, emitted: Sequence[Sequence[int]]) -> None:
        """Learn what rounds take and bring."""
        super().advance(emitted)
        self._choice.settle(len(emitted), [len(tokens) - 1 for tokens in emitted if tokens], self.scheme.name)
