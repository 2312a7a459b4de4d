"""Every random choice of a beam run goes through here, so that tests can take all of them in turn."""

from abc import ABC, abstractmethod

import numpy as np
import torch

from polydraft.beam.law import Floats


class Chance(ABC):
    """Something that decides."""

    @abstractmethod
    def accepts(self, target: float, draft: float) -> bool:
        """Say yes with probability `min(1, target / draft)`."""

    @abstractmethod
    def draw(self, weights_X: Floats, count: int, *, distinct: bool) -> list[int]:
        """Draw entries by weight, in draw order; distinct ones are fewer where there are no more with weight."""


class RandomChance(Chance):
    """Decide by a generator's numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def _uniforms(self, count: int) -> Floats:
        numbers: Floats = torch.rand(count, generator=self._generator, dtype=torch.float64).numpy()
        return numbers

    def accepts(self, target: float, draft: float) -> bool:
        """Compare U q < p, strictly: what has no mass is never taken."""
        return bool(self._uniforms(1)[0] * draft < target)

    def draw(self, weights_X: Floats, count: int, *, distinct: bool) -> list[int]:
        """Invert the running sum of the weights."""
        numbers = self._uniforms(count)
        if not distinct:
            sums_X = weights_X.cumsum()
            return [_found(sums_X, weights_X, number) for number in numbers] if len(sums_X) and sums_X[-1] > 0 else []
        left_X, drawn = weights_X.copy(), []
        for number in numbers:
            sums_X = left_X.cumsum()
            if not len(sums_X) or not sums_X[-1] > 0:
                break
            drawn.append(_found(sums_X, left_X, number))
            left_X[drawn[-1]] = 0.0
        return drawn


def _found(sums_X: Floats, weights_X: Floats, number: float) -> int:
    index = min(int(np.searchsorted(sums_X, number * sums_X[-1], side="right")), len(sums_X) - 1)
    while weights_X[index] <= 0:  # rounding may step past the last entry with weight
        index -= 1
    return index
