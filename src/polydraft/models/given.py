"""Checks of target and draft models that the caller has loaded. The models are not changed."""

import logging
from typing import Any

import torch

from polydraft.errors import UsageError
from polydraft.models.adapters import unwrapped
from polydraft.models.heads.assistant_folder import is_assistant
from polydraft.models.heads.head import Head
from polydraft.models.hf import HFModel
from polydraft.models.language_model import LanguageModel

logger = logging.getLogger(__name__)

_MOST_PADDING = 512
"""Rows by which embedding tables of the same tokenizer may differ: sizes are rounded up to multiples of 64 to 512."""


def given_model(model: Any, role: str) -> Any:
    """Return the `transformers` model of an object given as target or draft; refuse objects that cannot be used."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise UsageError(
            f"{role} is an object of type {type(model).__name__}; allowed: a name, a folder, a model of transformers or peft"
        )
    if isinstance(compiled := getattr(model, "_orig_mod", None), torch.nn.Module):
        model = compiled
        logger.info("the %s is compiled by torch.compile; polydraft runs it uncompiled", role)
    model = unwrapped(model)
    # accelerate may hold weights elsewhere and fetch them when a module runs.
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not hooked and any(weight.is_meta for weight in model.parameters()):
        raise UsageError(f"the {role} is on the meta device, without weights; load it with from_pretrained on another device")
    return model


def given_draft(draft: Any) -> LanguageModel | Head:
    """Wrap a draft model that the caller has loaded; return our own kinds as they are."""
    if isinstance(draft, LanguageModel | Head):
        return draft
    model = given_model(draft, "draft")
    if is_assistant({"model_type": model.config.model_type}):
        raise UsageError("the draft is a Gemma 4 assistant given as an object; pass its folder or hub name instead")
    return HFModel(model, endless=True, invariant=False)


def check_draft(draft: LanguageModel | Head, target: HFModel) -> None:
    """Refuse a draft on another device or with another vocabulary. Embedding tables may be padded differently."""
    if draft.device != target.device:
        raise UsageError(f"the draft is on {draft.device} but the target on {target.device}; move one of them")
    apart = abs(draft.num_columns - target.vocab_size)
    if draft.vocabulary is None and apart > min(_MOST_PADDING, target.vocab_size // 64):
        raise UsageError(
            f"the draft has {draft.num_columns} tokens but the target {target.vocab_size}; use one with the target's tokenizer"
        )
