"""Exact draws from unnormalised weights, one uniform number per token, and the generators of those numbers.

Inverse-CDF sampling takes one random number per draw, few enough for each row to have a generator of its own on the host. So a
row's text depends neither on its neighbours in the batch nor on the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polydraft.devices import captures
from polydraft.operations import operation
from polydraft.rows import ByRow

NO_TOKEN = -1
"""Marks a missing child: the tree has none there, or the draft distribution's support is exhausted."""

_BLOCK = 256
BELOW_ONE = 1 - 2**-53
"""The largest number below 1. Its product with any sum of weights is below that sum."""


class _BlockedWeights:
    """Weights in blocks: a look-up scans the sums of the blocks, then one block, instead of a whole vocabulary.

    Short sums also keep rounding errors small; a float32 running sum over 50k tokens would distort the distribution.
    """

    def __init__(self, weights_RV: Tensor) -> None:
        rows, vocabulary = weights_RV.shape
        self.blocks = -(-vocabulary // _BLOCK)
        padding = self.blocks * _BLOCK - vocabulary if self.blocks > 1 else 0
        padded_RV = torch.nn.functional.pad(weights_RV, (0, padding)) if padding else weights_RV
        self.weights_RMC = padded_RV.reshape(rows, self.blocks, -1)
        self.sums_RM = self.weights_RMC.sum(-1).double()

    def draw(self, uniforms_RK: Tensor) -> Tensor:
        """Draw one token per uniform number; `NO_TOKEN` where all weights are zero."""
        uniforms_RK = uniforms_RK.double().clamp(max=BELOW_ONE)
        if self.blocks == 1:
            running_RC = self.weights_RMC[:, 0].cumsum(-1, dtype=torch.float64)
            total_R1 = running_RC[:, -1:]
            return torch.searchsorted(running_RC, uniforms_RK * total_R1, right=True).where(total_R1 > 0, NO_TOKEN)
        cumulative_RM = self.sums_RM.cumsum(-1)
        total_R1 = cumulative_RM[:, -1:]
        # Strictly below the total, so that a block with positive weight is always found.
        mark_RK = uniforms_RK * total_R1
        block_RK = torch.searchsorted(cumulative_RM, mark_RK, right=True).clamp_(max=self.blocks - 1)
        # Not the cumulative sum minus the block's own, which may be rounded up to above the block's start: a mark in between
        # would then fall on the block's first token, whatever its weight.
        before_RK = torch.nn.functional.pad(cumulative_RM[:, :-1], (1, 0)).gather(1, block_RK)
        inside_RKC = self.weights_RMC.gather(1, block_RK[:, :, None].expand(-1, -1, _BLOCK))
        running_RKC = inside_RKC.cumsum(-1, dtype=torch.float64)
        # Rounding may leave the mark at or past the block's end: never step onto a token without weight.
        mark_RK1 = torch.minimum((mark_RK - before_RK)[:, :, None], running_RKC[:, :, -1:] * BELOW_ONE)
        within_RK = torch.searchsorted(running_RKC, mark_RK1, right=True)[:, :, 0]
        return torch.add(within_RK, block_RK, alpha=_BLOCK).where(total_R1 > 0, NO_TOKEN)

    def remove(self, tokens_R: Tensor) -> None:
        """Set the weight of one token per row to zero."""
        token_R1 = tokens_R.clamp(min=0)[:, None]
        block_R1 = token_R1 // _BLOCK
        # Scattered, because assigning a number by index would copy it from the host and wait.
        self.weights_RMC.view(len(tokens_R), -1).scatter_(1, token_R1, 0.0)
        left_R1C = self.weights_RMC.gather(1, block_R1[:, :, None].expand(-1, -1, self.weights_RMC.shape[-1]))
        self.sums_RM.scatter_(1, block_R1, left_R1C.sum(-1).double())


@operation
def draw_independent(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """Draw K tokens per row with replacement, one per uniform number; `NO_TOKEN` where all weights are zero."""
    return _BlockedWeights(weights_RV).draw(uniforms_RK)


def draw_one(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Draw one token per row."""
    return draw_independent(weights_RV, uniforms_R[:, None])[:, 0]


def draw_distinct(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """Draw K tokens per row without replacement, in draw order; `NO_TOKEN` once the support is exhausted."""
    weights = _BlockedWeights(weights_RV.clone())
    drawn = []
    for rank in range(uniforms_RK.shape[1]):
        token_R1 = weights.draw(uniforms_RK[:, rank : rank + 1])
        drawn.append(token_R1)
        if rank + 1 < uniforms_RK.shape[1]:
            weights.remove(token_R1[:, 0])
    return torch.cat(drawn, dim=1)


_SEEDS = 2**32
"""Torch's CPU generator uses seeds modulo this."""
_STREAM_STEP = 0x9E3779B1  # odd, so that no two rows of a batch get the same seed modulo 2**32


def row_seed(seed: int, row: int) -> int:
    """Return the seed of one row, given a seed for the whole batch; row 0 gets that seed itself."""
    return (seed + row * _STREAM_STEP) % _SEEDS


def row_generator(seed: int) -> torch.Generator:
    """Return the generator of one row."""
    return torch.Generator().manual_seed(seed % _SEEDS)


class _Uniforms:
    """The numbers of one generator, drawn ahead, because a call takes as long for one number as for hundreds."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._drawn, self._used = np.empty(0), 0

    def take(self, count: int) -> np.ndarray:
        """Return the next numbers. The stream is the same, however it is divided among calls."""
        if self._used + count > len(self._drawn):
            more = torch.rand(max(8 * count, 256), generator=self.generator, dtype=torch.float64).numpy()
            self._drawn, self._used = np.concatenate([self._drawn[self._used :], more]), 0
        self._used += count
        return self._drawn[self._used - count : self._used]


class Noise(ByRow):
    """Draw uniform numbers on the host, from one generator per row, and copy them to the device at once.

    With generators on the host, the stream is the same on every device, and rows are independent of each other. The copy to a
    GPU is asynchronous, so a round does not sync for it.

    Do not use the generators elsewhere: numbers are drawn several rounds ahead, and some are never used.
    """

    ROW_STATE = ("_rows",)
    FORGETS = True

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device) -> None:
        self._rows = [_Uniforms(generator) for generator in generators]
        self.device = device

    def seat(self, row: int, generator: torch.Generator) -> None:
        """Give a row a generator; if the row has it already, its stream goes on."""
        if self._rows[row].generator is not generator:
            self._rows[row] = _Uniforms(generator)

    def new_row(self, name: str) -> _Uniforms:
        """Return a placeholder, until the row gets its own generator."""
        return _Uniforms(torch.Generator())

    def uniforms(self, count: int) -> Tensor:
        """Return `count` fresh numbers in [0, 1) per row, as float64."""
        pinned = captures(self.device)
        # Torch reuses page-locked memory only after the copies from it have ended, so several may be under way.
        uniforms_BU = torch.empty(len(self._rows), count, dtype=torch.float64, pin_memory=pinned)
        array_BU = uniforms_BU.numpy()
        for row, own in enumerate(self._rows):
            array_BU[row] = own.take(count)
        return uniforms_BU.to(self.device, non_blocking=pinned)
