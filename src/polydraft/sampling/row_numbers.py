"""Sampling parameters that are one number per row, as tensors."""

import torch
from torch import Tensor

from polydraft.row_storage import RowStorage
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
}
"""Parameters that are one number per row, and what stands for "off" in their tensors where that is not the default itself."""


def _dtype(name: str) -> torch.dtype:
    return torch.float64 if name == "top_p" else torch.long if name == "top_k" else torch.float32


class RowNumbers:
    """Temperature, top-k and the like of each row, in tensors `[B, 1, 1]`.

    They are allocated once and written in place: captured rounds read them where they are.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._tensors = {name: torch.zeros(rows, 1, 1, dtype=_dtype(name), device=device) for name in _NUMBERS}
        self._storage = RowStorage()
        self._written: dict[str, list[float]] = {}
        """What the host last wrote to these tensors."""
        self.used: set[str] = set()
        """Names of those that some row asks for."""

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def all_rows(self) -> int:
        """Rows that there are, sleeping ones included."""
        return len(self._storage.whole("temperature", self._tensors["temperature"]))

    def write(self, params: RowParams) -> None:
        """Take the numbers of all rows at work."""
        self.used = {name for name in _NUMBERS if any(getattr(row, name) != DEFAULTS[name] for row in params)}
        for name, off in _NUMBERS.items():
            values = [getattr(row, name) for row in params]
            values = [off if off is not None and value == DEFAULTS[name] else value for value in values]
            if self._written.get(name) != values:  # most requests ask for the same, and every copy is a launch
                assign(self._tensors[name].view(-1), values)
                self._written[name] = values

    def resize(self, rows: int) -> None:
        """Have so many rows, whose numbers come by `write`."""
        self._tensors = {name: self._storage.resized(name, value, rows) for name, value in self._tensors.items()}
        self._written = {}
