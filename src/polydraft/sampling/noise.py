"""Uniform random numbers, one stream per row."""

from collections.abc import Sequence

import torch
from torch import Tensor

_SEEDS = 2**32
"""Torch's CPU generator takes no more of a seed than this."""
_STREAM_STEP = 0x9E3779B1  # odd, so the seeds of rows that share one never meet modulo 2**32


def row_seed(seed: int, row: int) -> int:
    """Return the seed of one row of a batch that was given a single seed; row 0 uses that itself."""
    return (seed + row * _STREAM_STEP) % _SEEDS


def row_generator(seed: int) -> torch.Generator:
    """Return the generator of one row."""
    return torch.Generator().manual_seed(seed % _SEEDS)


class Noise:
    """Draw uniforms on the host from one generator per row and hand them over in one copy.

    Host generators make the stream the same on every device, and rows independent of who shares their batch; the copy
    to a GPU is asynchronous, so a round needs no host synchronisation for it.

    The generators belong to whoever draws here: numbers may be drawn for a round that turns out to be needed no more.
    """

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device) -> None:
        self.generators = list(generators)
        self.device = device

    def uniforms(self, count: int) -> Tensor:
        """Return fresh numbers in [0, 1) as float64, `count` a row."""
        pinned = self.device.type == "cuda"
        # Torch lends page-locked memory anew only when the copies out of it are over, so any number may be under way.
        uniforms_BU = torch.empty(len(self.generators), count, dtype=torch.float64, pin_memory=pinned)
        for row_U, generator in zip(uniforms_BU, self.generators, strict=True):
            torch.rand(count, generator=generator, dtype=torch.float64, out=row_U)
        return uniforms_BU.to(self.device, non_blocking=pinned)
