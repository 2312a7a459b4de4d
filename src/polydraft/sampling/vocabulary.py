"""A draft that knows only part of the target's tokens."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polydraft.devices import is_host
from polydraft.sampling.categorical import NO_TOKEN


@dataclass(frozen=True, eq=False)
class PartialVocabulary:
    """Which tokens a draft's short distribution speaks of; all others have no mass.

    Frequent tokens carry nearly all of a text, while the time of a small draft goes mostly into its output head. A distribution
    stays short even while it is verified: the others, which no draft proposes, count as one token there.
    """

    tokens_D: Tensor
    """Token id of each column of a short distribution, ascending."""
    size: int
    """Tokens of the full vocabulary."""

    def spread(self, short_RD: Tensor, fill: float = 0.0) -> Tensor:
        """Return rows over the full vocabulary, `fill` where the draft knows nothing."""
        full_RV = short_RD.new_full((*short_RD.shape[:-1], self.size), fill)
        return full_RV.scatter_(-1, self.tokens_D.expand_as(short_RD), short_RD)

    def tokens(self, columns: Tensor) -> Tensor:
        """Turn columns of a short distribution into token ids; `NO_TOKEN` stays."""
        known = columns != NO_TOKEN
        return self.tokens_D[columns.clamp(min=0)].where(known, columns)

    def columns(self, tokens: Tensor) -> Tensor:
        """Turn token ids into columns of a short distribution; `NO_TOKEN` stands for tokens that the draft does not know."""
        return self.column_X[tokens]

    def lumped(self, weights_RV: Tensor) -> Tensor:
        """Return the weights of the known tokens, and in one more column that of all others together, as float64."""
        if weights_RV.ndim == 2 and is_host(weights_RV.device) and not torch.compiler.is_compiling():
            return torch.from_numpy(self._lumped(weights_RV.double().numpy()))
        weights_RV = weights_RV.double()
        lumped_RX = weights_RV.index_select(-1, self._token_X)
        # A sum of them, and not all less the known ones: it must be 0 where they are.
        lumped_RX[..., -1] = weights_RV @ self._others_V
        return lumped_RX

    def _lumped(self, weights_RV: np.ndarray) -> np.ndarray:
        """Do the same by numpy, whose calls take less time than torch's."""
        lumped_RX = weights_RV.take(self._token_X.numpy(), 1)
        # Not a matrix product: its library's threads would wait in a loop, on the cores that torch computes on.
        lumped_RX[:, -1] = (weights_RV * self._others_V.numpy()).sum(1)
        return lumped_RX

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Where a CPU has the tokens of the columns, the column of every token, and 1 for every token not known."""
        return self.tokens_D.data_ptr(), self.column_X.data_ptr(), self._others_V.data_ptr()

    @cached_property
    def _token_X(self) -> Tensor:
        """Token of every column, any for the last one, which stands for many."""
        return torch.nn.functional.pad(self.tokens_D, (0, 1))

    @cached_property
    def column_X(self) -> Tensor:
        """Column of every token; the last entry is for `NO_TOKEN`, an index from the end."""
        column_X = torch.full((self.size + 1,), NO_TOKEN, device=self.tokens_D.device)
        return column_X.scatter_(0, self.tokens_D, torch.arange(len(self.tokens_D), device=self.tokens_D.device))

    @cached_property
    def _others_V(self) -> Tensor:
        """1 for tokens that are not known."""
        return torch.ones(self.size, dtype=torch.float64, device=self.tokens_D.device).scatter_(0, self.tokens_D, 0.0)
