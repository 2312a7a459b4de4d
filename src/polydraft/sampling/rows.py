"""Sampling parameters of a batch whose rows need not have the same."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

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
        changed: dict[int, SamplingParams] = {}
        return RowParams(tuple(changed.setdefault(id(row), change(row)) for row in self.rows))

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

    def column(self, field: str, device: torch.device, off: float | None = None) -> Tensor | None:
        """Return one number per row, `[B, 1, 1]`; None where every row has the neutral value.

        Parameters
        ----------
        field : str
            Of `SamplingParams`; its default is the neutral value.
        off : float, optional
            What stands for the neutral value in the tensor, the value itself if not given.
        """
        neutral = DEFAULTS[field]
        values = [getattr(row, field) for row in self.rows]
        if all(value == neutral for value in values):
            return None
        numbers = [off if off is not None and value == neutral else value for value in values]
        dtype = torch.float64 if field == "top_p" else torch.long if field == "top_k" else torch.float32
        return torch.tensor(numbers, device=device, dtype=dtype)[:, None, None]


DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
