"""What ``draft="auto"`` means for a target without a known draft: its own weights in int8, or n-grams of the text.

Nothing is trained. On a CPU, drafting pauses while it does not pay; on a GPU, the size of trees follows the load.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass

import torch

from polydraft.defaults import NONE, default_tree
from polydraft.devices import dtype_name, free_bytes, is_host
from polydraft.errors import UsageError
from polydraft.models import Head, LanguageModel
from polydraft.models.hf import HFModel
from polydraft.models.int8_copy import NAME as INT8
from polydraft.models.int8_copy import Int8Copy, copy_bytes, copy_obstacle
from polydraft.models.loading import Loaded
from polydraft.options import AUTO, LoadOptions

logger = logging.getLogger(__name__)

NGRAMS = "suffix"
_LEAST_ON_GPU = 4_000_000_000
"""Fewest weights for which an int8 copy pays on a GPU: a smaller model spends its time on launches, not on reading weights.

Measured on an H200, one text: 1.25 times plain decoding with 6.6 billion weights, 0.45 with 0.13 billion.
"""
_TRAINING = "2 to 3.5 times plain decoding for a 1.5B model, after 12 minutes on an H200"
"""Speed-up and cost of a trained head: log 40."""
_SPARE = 0.7
"""Fraction of the free memory that a copy may take: texts need memory, too."""


def leaves_drafting_open(options: LoadOptions) -> bool:
    """Whether no option says how to draft, whichever draft it is."""
    given = (options.lossy, options.decision, options.draft_temperature, options.device_map)
    return options.tree == options.tree_scheme == options.walk == options.drafter == AUTO and all(one is None for one in given)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The draft, drafter and tree for a target without a known draft."""

    draft: str
    drafter: str
    tree: str
    reason: str | None
    """Why an int8 copy of the target is not used; None if it is."""


def choose(target: HFModel, size: int, free: int | None) -> Choice:
    """Choose how to draft for a target, without looking at its weights.

    Parameters
    ----------
    target : HFModel
        The target, or a twin that runs like it (`polydraft.models.outline`).
    size : int
        Bytes of an int8 copy of the target.
    free : int, optional
        Bytes of free memory beside the target; None if unknown.
    """
    gpu, reason = not is_host(target.device), copy_obstacle(target)
    if reason is None and gpu and size < _LEAST_ON_GPU:
        reason = "its passes are too short on a GPU for a copy of its weights to pay"
    if reason is None and free is not None and size > _SPARE * free:
        reason = f"a copy of its weights would take {size / 1e9:.1f} GB of the {free / 1e9:.1f} GB of memory that are free"
    if reason is not None:
        return _without_copy(target, reason)
    tree = default_tree(gpu=gpu, dtype=dtype_name(target.dtype), copy=True)
    return Choice(draft=INT8, drafter=AUTO, tree=tree, reason=None)


def _without_copy(target: HFModel, reason: str) -> Choice:
    if not is_host(target.device):
        return Choice(draft=NONE, drafter=AUTO, tree=NONE, reason=reason)
    tree = default_tree(gpu=False, dtype=dtype_name(target.dtype))
    return Choice(draft=NONE, drafter=NGRAMS, tree=tree, reason=reason)


def automatic_draft(options: LoadOptions, loaded: Loaded) -> tuple[LoadOptions, LanguageModel | Head | None]:
    """Resolve ``"auto"`` for a target without a known draft: return the options and the draft, if it is a model.

    The log says what was chosen and why.
    """
    target = loaded.model
    size = copy_bytes(target.hf_model)
    choice = choose(target, size, free_bytes(target.device))
    copy: Int8Copy | None = None
    if choice.reason is None:
        try:
            copy = Int8Copy(target)
        except (UsageError, torch.OutOfMemoryError) as error:  # the memory has been taken meanwhile
            choice = _without_copy(target, str(error).splitlines()[0])
    if copy is not None:
        chosen = f"so its own weights in int8 draft: {size / 1e9:.1f} GB more memory (--draft none decodes plainly)"
    elif choice.drafter == NGRAMS:
        chosen = f"and {choice.reason}, so n-grams of the text draft where they pay"
    else:
        chosen = f"and {choice.reason}, so it decodes plainly"
    trained = f"a trained head is faster ({_TRAINING}): {train_command(target.name)}"
    logger.info("%s has no draft, %s; %s", target.name, chosen, trained)
    return dataclasses.replace(options, draft=choice.draft, drafter=choice.drafter, tree=choice.tree), copy


def train_command(target: str) -> str:
    """Return the command that trains a head for a target."""
    short = os.path.basename(target.rstrip("/")).removesuffix(".gguf")
    return f"polydraft train head --target {target} --out {short}-head"
