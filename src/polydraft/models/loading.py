"""Models by name."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from polydraft.errors import FailureError, UsageError
from polydraft.models.bundled import BUNDLED, SHIPPED_DRAFTS, bundled_folder
from polydraft.models.early_exit import early_exit
from polydraft.models.feature_head import FeatureHead
from polydraft.models.head_folder import is_head, load_head, load_vocabulary
from polydraft.models.hf import HFModel
from polydraft.models.hub import check_name, hub_options
from polydraft.models.inflated import InflatedModel, is_inflated, parse_inflated
from polydraft.models.spread import layout_options


@dataclass(frozen=True)
class Loaded:
    """A model with what belongs to it."""

    model: HFModel
    tokenizer: Any
    eos_token_ids: tuple[int, ...]


def load_model(name: str, device: torch.device, dtype: torch.dtype, device_map: str | None = None) -> Loaded:
    """Load a model by name: the bundled one, a folder, a name on the Hugging Face hub, or one of these inflated.

    With a device map (`polydraft.models.spread`) the model goes over several devices instead of to `device`.
    """
    if is_inflated(name):
        if device_map is not None:
            raise UsageError(f"target {name!r} is built on one device; leave out --device-map {device_map}")
        return _load_inflated(name, device, dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    allowed = f"{BUNDLED}, a folder, or a hub name"
    check_name("model", name, allowed)
    folder = str(bundled_folder()) if name == BUNDLED else name
    options = hub_options(folder)
    try:
        if device_map is None:
            hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to(device)
        else:
            hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **layout_options(device_map), **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except torch.OutOfMemoryError:
        raise FailureError(
            f"model {name!r} does not fit into the memory of {device}; use a smaller dtype or --device cpu"
        ) from None
    except (OSError, ValueError) as error:
        where = "the folder holds no loadable model" if os.path.isdir(name) else "no such folder, and not to be had from a hub"
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"cannot load model {name!r}: {where} ({reason}); allowed: {allowed}") from None
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FailureError(f"cannot read the weights of model {name!r} ({reason}); download or save it again") from None
    eos = hf_model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return Loaded(HFModel(hf_model, name), tokenizer, eos_ids)


def _load_inflated(name: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    shape, source = parse_inflated(name)
    small = load_model(source, device, dtype)
    try:
        model = InflatedModel(small.model, shape)
    except torch.OutOfMemoryError:
        raise FailureError(f"target {name!r} does not fit into the memory of {device}; use a smaller shape") from None
    return Loaded(model, small.tokenizer, small.eos_token_ids)


def load_draft(name: str, target: Loaded) -> HFModel | FeatureHead | None:
    """Load a draft for a target: ``"none"``, ``"early-exit:k"``, a shipped one, a folder, or a hub name."""
    if name == "none":
        return None
    if name.startswith("early-exit"):
        number = name.removeprefix("early-exit").removeprefix(":")
        if not number.isdigit():
            raise UsageError(f"draft {name!r} lacks its number of layers; write early-exit:k, such as early-exit:4")
        return early_exit(target.model, int(number))
    folder = SHIPPED_DRAFTS.get(name, Path(name))
    if is_head(folder):
        return load_head(folder, target.model, target.tokenizer, name)
    draft = load_model(name, target.model.device, target.model.dtype)
    check_same_tokens(target, draft)
    vocabulary = load_vocabulary(folder, target.model.vocab_size, target.model.device)
    return draft.model if vocabulary is None else HFModel(draft.model.hf_model, name, vocabulary=vocabulary)


def check_same_tokens(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft whose token ids mean other texts than the target's."""
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise UsageError(
            f"draft {draft.model.name!r} and target {target.model.name!r} have different vocabularies ({len(theirs)} and "
            f"{len(ours)} tokens, {differing} of the target's differ); use a draft with the target's tokenizer"
        )
