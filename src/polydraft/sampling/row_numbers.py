"""Sampling parameters that are one number per row, as tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor

from polydraft.devices import assign
from polydraft.rows import ByRow
from polydraft.sampling.params import DEFAULTS, RowParams

ALL = 2**40
"""More tokens than any vocabulary has."""
_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
)  # fmt: skip
"""Parameters that are one number per row."""
_OFF = {"top_k": ALL, "top_p": torch.inf}
"""Values that stand for "off" in their tensors, if not the default."""
_DTYPES = {"top_p": torch.float64, "top_k": torch.long, "min_tokens": torch.long}
"""Types of their tensors, if not float32."""


class RowNumber(ByRow):
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
        self._numbers = {name: RowNumber(rows, _DTYPES.get(name, torch.float32), device) for name in _NAMES}
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
        self.used = {name for name in _NAMES if any(getattr(row, name) != DEFAULTS[name] for row in params)}
        for name, number in self._numbers.items():
            values = [getattr(row, name) for row in params]
            number.write([_OFF.get(name, value) if value == DEFAULTS[name] else value for value in values])
