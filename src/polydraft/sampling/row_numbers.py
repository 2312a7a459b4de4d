"""Sampling parameters that are one number per row, as tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor

from polydraft.rows import ByRow
from polydraft.sampling.params import DEFAULTS, RowParams
from polydraft.transfers import assign

ALL = 2**40
"""More tokens than any vocabulary has."""
_NUMBERS: dict[str, float | None] = {
    "temperature": None,
    "top_k": ALL,
    "top_p": torch.inf,
    "min_p": None,
    "repetition_penalty": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "min_tokens": None,
}
"""Parameters that are one number per row, and the value that stands for "off" in tensors, if not the default itself."""


def _dtype(name: str) -> torch.dtype:
    return torch.float64 if name == "top_p" else torch.long if name in ("top_k", "min_tokens") else torch.float32


class _Number(ByRow):
    """One parameter: a number per row, `[B, 1, 1]`."""

    ROW_STATE = ("values_B11", "_written")

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values_B11 = torch.zeros(rows, 1, 1, dtype=dtype, device=device)
        self._written: list[float] = [0] * rows
        """The host's copy of the values."""

    def new_row(self, name: str) -> float:
        """Return zero."""
        return 0

    def write(self, values: list[float]) -> None:
        """Set the numbers of all rows at work."""
        if self._written != values:  # usually they are the same, and every copy costs a launch
            assign(self.values_B11.view(-1), values)
            self._written = values


class RowNumbers(ByRow):
    """Temperature, top-k and so on of each row, in tensors `[B, 1, 1]`.

    The tensors are allocated once and written in place, because captured rounds read them at their addresses.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._numbers = {name: _Number(rows, _dtype(name), device) for name in _NUMBERS}
        self.used: set[str] = set()
        """Names of the parameters that some row uses."""

    def __getitem__(self, name: str) -> Tensor:
        return self._numbers[name].values_B11

    def row_parts(self) -> Iterable[ByRow]:
        """Return the parts that hold the numbers."""
        return self._numbers.values()

    @property
    def all_rows(self) -> int:
        """Number of rows, sleeping ones included."""
        return len(self._numbers["temperature"].every_row("values_B11"))

    def write(self, params: RowParams) -> None:
        """Set the parameters of all rows at work."""
        self.used = {name for name in _NUMBERS if any(getattr(row, name) != DEFAULTS[name] for row in params)}
        for name, off in _NUMBERS.items():
            values = [getattr(row, name) for row in params]
            self._numbers[name].write([off if off is not None and value == DEFAULTS[name] else value for value in values])
