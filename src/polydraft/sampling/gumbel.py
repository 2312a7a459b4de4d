"""Gumbel noise for every token at every position of a text: a function of seed, position and token, and of nothing else.

The token with the largest sum of log-probability and Gumbel noise is a sample [1]. If the noise is known beforehand, so is the
sample, up to the model's logits: a draft that adds the same noise to its own logits proposes what the target is likely to pick.

References
----------
.. [1] Maddison, Tarlow, Minka 2014, A* sampling, arXiv:1411.0030.
.. [2] Daliri, Musco, Suresh 2025, Coupling without communication and drafter-invariant speculative decoding, arXiv:2408.07978.
.. [3] Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, OOPSLA (SplitMix64, whose finaliser mixes keys).
"""

import torch
from torch import Tensor

from polydraft.operations import operation
from polydraft.sampling.categorical import NO_TOKEN

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64 [3]."""
_TOKEN_STEP, _LOW_FIRST, _LOW_SECOND = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
"""Step from token to token, and a 32-bit mixer in which every bit of the result depends on every bit of the number."""
_LOW = 2**32 - 1
MOST_UNIFORM = 1 - 2**-24
"""The largest float32 below 1."""


def _signed(number: int) -> int:
    """Return the int64 with the same bits as an unsigned number."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


@operation
def perturbed(scores_BGV: Tensor, keys_B: Tensor, positions_BK: Tensor, scales_B: Tensor, tokens_D: Tensor | None) -> Tensor:
    """Return scores plus scaled standard Gumbel noise, in float32.

    Parameters
    ----------
    scores_BGV : Tensor
    keys_B : Tensor
        One whole number per text, made from its seed.
    positions_BK : Tensor
        Positions in the text of the tokens that the scores are for: one for each of the G nodes, or one for all of them.
    scales_B : Tensor
        What each row's noise is multiplied by.
    tokens_D : Tensor, optional
        Tokens of the columns, if these are not all tokens in order.
    """
    tokens_V = torch.arange(scores_BGV.shape[-1], device=keys_B.device) if tokens_D is None else tokens_D
    keys_BK1 = _mixed(keys_B[:, None] + positions_BK * _signed(_STEP))[..., None]
    bits_BKV = _mixed_low((tokens_V * _TOKEN_STEP + (keys_BK1 & _LOW)) & _LOW)
    bits_BKV = _mixed_low(bits_BKV ^ _shifted(keys_BK1, 32))
    uniforms_BKV = ((bits_BKV.float() + 0.5) * 2.0**-32).clamp_(max=MOST_UNIFORM)
    noise_BKV = -torch.log(-torch.log1p(-uniforms_BKV))
    return torch.add(scores_BGV.float(), noise_BKV * scales_B[:, None, None])


@operation
def largest_perturbed(
    scores_BGV: Tensor, keys_B: Tensor, positions_BK: Tensor, scales_B: Tensor, tokens_D: Tensor | None, count: int = 1
) -> Tensor:
    """Return the columns of each node's `count` largest `perturbed` scores, `[B, G, count]`; `NO_TOKEN` for those not finite.

    Other parameters as for `perturbed`. They are in order; of equal scores the first one counts.
    """
    noisy_BGV = perturbed(scores_BGV, keys_B, positions_BK, scales_B, tokens_D)
    if count == 1:  # sorting takes fifty times as long
        best_BG1 = noisy_BGV.argmax(-1, keepdim=True)
        return best_BG1.where(noisy_BGV.gather(-1, best_BG1).abs() < torch.inf, NO_TOKEN)
    value_BGK, column_BGK = (part_BGV[..., :count] for part_BGV in noisy_BGV.sort(dim=-1, descending=True, stable=True))
    missing = count - value_BGK.shape[-1]
    return torch.nn.functional.pad(column_BGK.where(value_BGK.abs() < torch.inf, NO_TOKEN), (0, missing), value=NO_TOKEN)


def _mixed(numbers_X: Tensor) -> Tensor:
    """Mix the bits of int64 numbers with SplitMix64's finaliser [3]."""
    numbers_X = (numbers_X ^ _shifted(numbers_X, 30)) * _signed(_FIRST)
    numbers_X = (numbers_X ^ _shifted(numbers_X, 27)) * _signed(_SECOND)
    return torch.bitwise_xor(numbers_X, _shifted(numbers_X, 31))


def _mixed_low(numbers_X: Tensor) -> Tensor:
    """Mix the bits of 32-bit numbers, which are held in int64."""
    numbers_X = ((numbers_X ^ (numbers_X >> 16)) * _LOW_FIRST) & _LOW
    numbers_X = ((numbers_X ^ (numbers_X >> 15)) * _LOW_SECOND) & _LOW
    return numbers_X ^ (numbers_X >> 16)


def _shifted(numbers_X: Tensor, bits: int) -> Tensor:
    """Shift the bits of int64 numbers to the right, with zeros on the left."""
    return torch.bitwise_and(numbers_X >> bits, 2 ** (64 - bits) - 1)
