"""An int8 copy of the target as its draft: no training, and no prefill or cache of its own.

Its keys and values are so close to the target's that it shares the target's cache (`polydraft.draft.copy_source`). Nothing that
it writes there is kept: the target's pass overwrites all places of a round.
"""

import copy
from typing import Any

import torch
from torch import nn

from polydraft.devices import is_host
from polydraft.errors import UsageError
from polydraft.models.hf import HFModel
from polydraft.models.quantised import kernels_missing, quantise

NAME = "int8"


class Int8Copy(HFModel):
    """An int8 copy of a target, which shares its embeddings, norms and biases.

    The copy does not follow later changes. If the target's owner changes weights or adds or switches adapters, the copy drafts
    as before: fewer candidates are accepted, but texts follow the target as it is now.

    Parameters
    ----------
    target : HFModel
    """

    def __init__(self, target: HFModel) -> None:
        obstacle = copy_obstacle(target)
        if obstacle is not None:
            raise UsageError(f"draft {NAME!r} does not work here: {obstacle}; use a draft model, a head, or n-grams")
        tensors = (*target.hf_model.parameters(), *target.hf_model.buffers())
        with torch.inference_mode(False):
            twin = copy.deepcopy(target.hf_model, {id(tensor): tensor for tensor in tensors})
        super().__init__(quantise(twin, keep=True), NAME, native=True, invariant=False, trusted=True)
        self.max_positions = target.max_positions


def copy_bytes(model: Any) -> int:
    """Return the bytes that a copy of a Hugging Face model takes: one for each weight of a linear layer."""
    return sum(part.weight.numel() for part in model.modules() if type(part) is nn.Linear)


def copy_obstacle(target: Any) -> str | None:
    """Return why a target cannot have an int8 copy; None if it can."""
    if not isinstance(target, HFModel):
        return "the target is not a Hugging Face model"
    if target.int8:
        return "the target is in int8 already"
    if target.quantised_by is not None:
        return f"the target is quantised by {target.quantised_by} already"
    if target.recurrence is not None:
        return "the target has recurrent layers, whose state drafts would change"
    if target.spread is not None:
        return str(target.spread)
    if is_host(target.device):
        return kernels_missing(target.device) if target.native else "it needs compiled code, which is switched off"
    if target.dtype != torch.bfloat16 or target.lean is None or target.fast is None:
        return "on a GPU it needs a Llama-shaped model in bfloat16"
    return None
