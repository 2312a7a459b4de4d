"""What ``draft="auto"`` means for a target that no draft is known for: its own weights in int8, or n-grams of the text.

Nothing is trained. On a CPU drafting rests while it does not pay; on a GPU trees follow the load.
"""

import dataclasses
import logging
import os

import torch

from polydraft.defaults import NONE, default_tree
from polydraft.devices import is_host
from polydraft.errors import UsageError
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.int8_copy import NAME as INT8
from polydraft.models.int8_copy import Int8Copy, copy_bytes, copy_obstacle
from polydraft.models.loading import Loaded
from polydraft.options import AUTO, LoadOptions

logger = logging.getLogger(__name__)

NGRAMS = "suffix"
_LEAST_ON_GPU = 4_000_000_000
"""Weights from which a copy pays on a GPU: below, launches take more of a pass than reading, and int8 has as many of them.

Measured on an H200, one text: 1.25 times plain decoding with 6.6 billion, 0.45 with 0.13 billion.
"""
_SPARE = 0.7
"""Of the free memory, what a copy may take: texts need some too."""


def leaves_drafting_open(options: LoadOptions) -> bool:
    """Whether nothing is asked for that says how a draft, whoever it is, works."""
    given = (options.lossy, options.decision, options.draft_temperature, options.device_map)
    return options.tree == options.scheme == options.walk == options.drafter == AUTO and all(one is None for one in given)


def automatic_draft(
    options: LoadOptions, loaded: Loaded, free: int | None = None
) -> tuple[LoadOptions, LanguageModel | FeatureHead | None]:
    """Return the options with who drafts for a target, and the draft, if that is a model; say in a line what and why.

    Parameters
    ----------
    options : LoadOptions
        With nothing but ``"auto"``.
    loaded : Loaded
        The target.
    free : int, optional
        Bytes of memory that are free; as the system says if not given.
    """
    target = loaded.model
    gpu, dtype = not is_host(target.device), str(target.dtype).removeprefix("torch.")
    reason = copy_obstacle(target) or _too_small(target) or _no_room(target, free or _free_bytes(target.device))
    copy: Int8Copy | None = None
    if reason is None:
        try:
            copy = Int8Copy(target)
        except (UsageError, torch.OutOfMemoryError) as error:  # no compiler, or memory that somebody else took meanwhile
            reason = str(error).splitlines()[0]
    train = f"a trained head is faster: polydraft train head --target {target.name} --out {_short(target.name)}-head"
    if copy is not None:
        logger.info(
            "no draft for %s is known: its own weights in int8 draft, %.1f GB more memory (--draft none: plain); %s",
            target.name, copy_bytes(target) / 1e9, train,
        )  # fmt: skip
        tree = default_tree(gpu=gpu, dtype=dtype, copy=True)
        return dataclasses.replace(options, draft=INT8, tree=tree), copy
    if gpu:
        logger.info("no draft for %s is known, and %s: decoding plainly; %s", target.name, reason, train)
        return dataclasses.replace(options, draft=NONE, tree=NONE), None
    logger.info("no draft for %s is known, and %s: n-grams of the text draft where they pay; %s", target.name, reason, train)
    return dataclasses.replace(options, draft=NONE, drafter=NGRAMS, tree=default_tree(gpu=gpu, dtype=dtype)), None


def _short(name: str) -> str:
    return os.path.basename(name.rstrip("/")).removesuffix(".gguf")


def _too_small(target: LanguageModel) -> str | None:
    if is_host(target.device) or copy_bytes(target) >= _LEAST_ON_GPU:
        return None
    return "its passes are too short on a GPU for a copy of its weights to pay"


def _no_room(target: LanguageModel, free: int | None) -> str | None:
    """Say that a copy does not fit into the memory that is free; None if it does, or nobody knows."""
    needed = copy_bytes(target)
    if free is None or needed <= _SPARE * free:
        return None
    return f"a copy of its weights would take {needed / 1e9:.1f} GB of the {free / 1e9:.1f} GB of memory that are free"


def _free_bytes(device: torch.device) -> int | None:
    if not is_host(device):
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None
