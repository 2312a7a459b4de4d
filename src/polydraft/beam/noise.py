"""Noise that belongs to a text and a token, whoever asks: target and draft then draw alike."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

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
        """Return the totals of continued beams, with noise.

        Notes
        -----
        Independent Gumbel noise, drawn top down: first a beam's largest noisy total, which is one Gumbel variable at the sum of
        its continuations' weights, then all of them given that largest one (appendix B of [2]_). So the largest is known, but
        for that sum, before the beam's law is; see `highest`.
        """
        keys_R = np.array([self._key(beam.node) for beam in beams], dtype=np.uint64)
        rows_X, scores_R = continuations.rows_X, np.array([beam.score for beam in beams])
        with np.errstate(over="ignore"):
            tokens_X = continuations.tokens_X.astype(np.uint64) + np.uint64(1)
            free_X = scores_R[rows_X] + continuations.scores_X + _gumbel(keys_R[rows_X] + np.uint64(_STEP) * tokens_X)
        if not len(free_X):
            return free_X
        bounds = np.array(continuations.bounds)
        found = np.flatnonzero(bounds[1:] > bounds[:-1])  # a row may have no continuations
        starts, places_X = bounds[found], np.repeat(np.arange(len(found)), np.diff(bounds)[found])
        # Sums beside their largest term: at low temperatures all weights of a row may be too small for a number.
        peaks = np.maximum.reduceat(continuations.scores_X, starts)
        masses = np.add.reduceat(np.exp(continuations.scores_X - peaks[places_X]), starts)
        largest_X = (scores_R[found] + peaks + np.log(masses) + _gumbel(keys_R[found]))[places_X]
        with np.errstate(divide="ignore"):  # the largest itself: log 0
            below_X = np.log(-np.expm1(free_X - np.maximum.reduceat(free_X, starts)[places_X]))
        shift_X = largest_X - free_X + below_X
        noisy_X: Floats = largest_X - np.maximum(shift_X, 0.0) - np.log1p(np.exp(-np.abs(shift_X)))
        return noisy_X

    def highest(self, beam: Beam) -> float:
        """Return what no noisy total of a beam's continuations exceeds, if their weights sum to one at most."""
        return beam.score + float(_gumbel(np.array([self._key(beam.node)], dtype=np.uint64))[0])

    def _key(self, node: Node) -> int:
        """Return the key of a text: a hash of the seed and of all its new tokens."""
        if node not in self._keys:
            above = self._seed if node.parent is None else self._key(node.parent)
            token = 0 if node.parent is None else node.token + 1
            self._keys[node] = _mixed((above ^ _mixed(token * _STEP + math.isqrt(_STEP))) + _STEP)
        return self._keys[node]


def _gumbel(keys: NDArray[np.uint64]) -> Floats:
    """Turn keys into Gumbel noise: mix their bits, take them for uniform numbers, invert the law."""
    with np.errstate(over="ignore"):
        mixed = keys + np.uint64(_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
        mixed ^= mixed >> np.uint64(31)
    uniforms = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: Floats = -np.log(-np.log(uniforms))
    return noise


def _mixed(value: int) -> int:
    """Mix the bits of a number (the finaliser of SplitMix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)
