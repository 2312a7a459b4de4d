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
    """The tokens that a draft's short distribution covers; all others have no mass.

    Nearly all of a text is frequent tokens, while a small draft spends most of its time in its output head. Distributions stay
    short even during verification, where all other tokens, which the draft never proposes, count as one.
    """

    tokens_D: Tensor
    """Token id of each column of a short distribution, ascending."""
    size: int
    """Size of the full vocabulary."""

    def spread(self, short_RD: Tensor, fill: float = 0.0) -> Tensor:
        """Return rows over the full vocabulary, with `fill` for tokens that the draft does not know."""
        full_RV = short_RD.new_full((*short_RD.shape[:-1], self.size), fill)
        return full_RV.scatter_(-1, self.tokens_D.expand_as(short_RD), short_RD)

    def tokens(self, columns: Tensor) -> Tensor:
        """Return the token ids of columns; `NO_TOKEN` stays."""
        known = columns != NO_TOKEN
        return self.tokens_D[columns.clamp(min=0)].where(known, columns)

    def columns(self, tokens: Tensor) -> Tensor:
        """Return the columns of token ids; `NO_TOKEN` for tokens that the draft does not know."""
        return self.column_X[tokens]

    def lumped(self, weights_RV: Tensor) -> Tensor:
        """Return the weights of the known tokens and, in one more column, the sum of all others, as float64."""
        if weights_RV.ndim == 2 and is_host(weights_RV.device) and not torch.compiler.is_compiling():
            return torch.from_numpy(self._lumped(weights_RV.double().numpy()))
        weights_RV = weights_RV.double()
        lumped_RX = weights_RV.index_select(-1, self._token_X)
        # Summed up, not all minus the known ones: the sum must be 0 if the weights are.
        lumped_RX[..., -1] = weights_RV @ self._others_V
        return lumped_RX

    def _lumped(self, weights_RV: np.ndarray) -> np.ndarray:
        """Do the same in numpy, whose calls take less time than torch's."""
        lumped_RX = weights_RV.take(self._token_X.numpy(), 1)
        # Not a matrix product, whose library would keep threads spinning on the cores that torch computes on.
        lumped_RX[:, -1] = (weights_RV * self._others_V.numpy()).sum(1)
        return lumped_RX

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses, for C code, of the columns' tokens, the tokens' columns, and the mask of unknown tokens."""
        return self.tokens_D.data_ptr(), self.column_X.data_ptr(), self._others_V.data_ptr()

    @cached_property
    def _token_X(self) -> Tensor:
        """Token of every column; the last column, for all others, has an arbitrary one."""
        return torch.nn.functional.pad(self.tokens_D, (0, 1))

    @cached_property
    def column_X(self) -> Tensor:
        """Column of every token; the last entry is that of `NO_TOKEN`, which is -1."""
        column_X = torch.full((self.size + 1,), NO_TOKEN, device=self.tokens_D.device)
        return column_X.scatter_(0, self.tokens_D, torch.arange(len(self.tokens_D), device=self.tokens_D.device))

    @cached_property
    def _others_V(self) -> Tensor:
        """1 for tokens that the draft does not know, 0 for the others."""
        return torch.ones(self.size, dtype=torch.float64, device=self.tokens_D.device).scatter_(0, self.tokens_D, 0.0)
