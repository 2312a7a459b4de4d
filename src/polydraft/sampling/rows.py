"""Sampling parameters of a batch whose rows need not have the same."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from polydraft.sampling.params import SamplingParams


@dataclass(frozen=True)
class RowParams:
    """One `SamplingParams` per row, and what a round has to compute for any of them.

    What no row asks for is left out of a round altogether. What some rows ask for is neutral for the others, bit for bit, so
    that a row's distribution does not depend on its company.
    """

    rows: tuple[SamplingParams, ...]

    @classmethod
    def of(cls, params: "RowParams | SamplingParams | Sequence[SamplingParams]", rows: int) -> "RowParams":
        """Give every row the same parameters, or each its own."""
        if isinstance(params, RowParams):
            return params
        found = (params,) * rows if isinstance(params, SamplingParams) else tuple(params)
        assert len(found) == rows, (len(found), rows)
        return cls(found)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SamplingParams]:
        return iter(self.rows)

    def map(self, change: Callable[[SamplingParams], SamplingParams]) -> "RowParams":
        """Change the parameters of every row."""
        changed = {id(row): change(row) for row in {id(row): row for row in self.rows}.values()}  # most rows share one object
        return RowParams(tuple(changed[id(row)] for row in self.rows))

    @cached_property
    def greedy(self) -> tuple[bool, ...]:
        """Which rows take the likeliest token."""
        return tuple(row.temperature == 0 for row in self.rows)

    @property
    def all_greedy(self) -> bool:
        """Whether every row takes the likeliest token: then no random number matters."""
        return all(self.greedy)

    @property
    def mixed(self) -> bool:
        """Whether some rows take the likeliest token and others draw."""
        return any(self.greedy) and not self.all_greedy

    @cached_property
    def needs_history(self) -> bool:
        """Whether any row's distribution depends on which tokens came before, beyond what the model itself sees."""
        return any(row.needs_history for row in self.rows)

    @cached_property
    def has_processors(self) -> bool:
        """Whether any row has logits processors, which work on the host."""
        return any(row.processors for row in self.rows)

    @cached_property
    def bans(self) -> bool:
        """Whether any row rules tokens out by `logit_bias`: a draft may then know none that are left."""
        return any(-math.inf in row.logit_bias.values() for row in self.rows)

    def replaced(self, changes: Mapping[int, SamplingParams]) -> "RowParams":
        """Give some rows other parameters."""
        return RowParams(tuple(changes.get(row, params) for row, params in enumerate(self.rows)))


DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
"""Neutral values of the parameters."""

IDLE = SamplingParams(temperature=0.0)
"""Of rows without a text: they ask for nothing."""
