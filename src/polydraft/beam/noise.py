"""Noise that belongs to a text and a token, whoever asks: target and draft then draw alike."""

import math

import numpy as np
import torch

from polydraft.beam.law import Continuations, Floats
from polydraft.beam.node import Beam, Node

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of the SplitMix64 generator [1]_, whose finaliser mixes the keys.

.. [1] Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, OOPSLA.
"""


class SharedNoise:
    """Gumbel noise for every continuation of every text: a function of the seed, the text and the token.

    Adding such noise to scores and taking the K largest sums is drawing K continuations without replacement in proportion to
    exp(score), in that order [2]_. As the noise asks for nothing but the text, a draft can be perturbed by the target's own.

    References
    ----------
    .. [2] Kool, van Hoof, Welling 2019, Stochastic Beams and Where to Find Them, ICML.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._seed = int(torch.randint(2**62, (1,), generator=generator))
        self._keys: dict[Node, int] = {}

    def perturbed(self, continuations: Continuations, beams: list[Beam]) -> Floats:
        """Return the totals of continued beams, with noise."""
        keys_R = np.array([self._key(beam.node) for beam in beams], dtype=np.uint64)
        with np.errstate(over="ignore"):
            mixed_X = keys_R[continuations.rows_X] + np.uint64(_STEP) * (
                continuations.tokens_X.astype(np.uint64) + np.uint64(1)
            )
            mixed_X = (mixed_X ^ (mixed_X >> np.uint64(30))) * np.uint64(_FIRST)
            mixed_X = (mixed_X ^ (mixed_X >> np.uint64(27))) * np.uint64(_SECOND)
            mixed_X ^= mixed_X >> np.uint64(31)
        uniforms_X = ((mixed_X >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        totals_X: Floats = continuations.totals([beam.score for beam in beams]) - np.log(-np.log(uniforms_X))
        return totals_X

    def _key(self, node: Node) -> int:
        """Return the key of a text: a hash of the seed and of all its new tokens."""
        if node not in self._keys:
            above = self._seed if node.parent is None else self._key(node.parent)
            token = 0 if node.parent is None else node.token + 1
            self._keys[node] = _mixed((above ^ _mixed(token * _STEP + math.isqrt(_STEP))) + _STEP)
        return self._keys[node]


def _mixed(value: int) -> int:
    """Mix the bits of a number (the finaliser of SplitMix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
