"""Probabilities from logits, where nothing but the temperature changes them."""

import torch
from torch import Tensor

from polydraft.operations import operation


@operation
def softened(logits_BGV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Return the softmax of logits over each row's temperature, in float32; what is not a number spreads over its node."""
    scores_BGV = logits_BGV.float()
    return torch.softmax(scores_BGV if temperature_B is None else scores_BGV / temperature_B.view(-1, 1, 1), dim=-1)
