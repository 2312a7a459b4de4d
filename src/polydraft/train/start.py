"""The draft that training starts from (`--start`): checking that it is allowed and fits the target, and loading it."""

import torch

from polydraft.errors import UsageError
from polydraft.models import FeatureHead
from polydraft.models.bundled import BUNDLED
from polydraft.models.families import scheme_of
from polydraft.models.finding import head_folder, hub_options
from polydraft.models.gguf import gguf_source
from polydraft.models.heads.head_export import export_obstacle
from polydraft.models.heads.kinds import HEAD_KINDS, kind_of
from polydraft.models.hf import HFModel
from polydraft.models.loading import (
    Loaded,
    check_name,
    load_draft,
    load_model,
    name_obstacle,
)
from polydraft.models.translation import check_same_tokens
from polydraft.train.settings import TrainSettings

_MODELS = "a language model with the target's tokenizer, in a folder, a GGUF file or on a hub"
_HEADS = ", ".join(kind.trains for kind in HEAD_KINDS.values() if kind.trains is not None)


def check_start(name: str, settings: TrainSettings) -> None:
    """Refuse a draft that is missing or of the wrong kind, and sizes that it fixes already, before the target is loaded."""
    kind = kind_of(head_folder(name))
    if settings.kind == "head" and (kind is None or kind.trains is None):
        raise UsageError(f"--start {name} is not a folder with a head; allowed: {_HEADS}")
    if settings.kind == "draft":
        if kind is not None:
            raise UsageError(f"--start {name} is a feature head, which polydraft train head continues; allowed: {_MODELS}")
        _check_model(name)
    if settings.size.given and kind is not HEAD_KINDS["polydraft"]:  # one of our heads can be widened
        raise UsageError(f"{settings.size.given[0]} does not go with --start {name}, which has its own sizes; leave it out")


def _check_model(name: str) -> None:
    from transformers import AutoConfig

    if name == BUNDLED or gguf_source(name) is not None:
        return
    check_name("--start", name, _MODELS)
    try:
        scheme = scheme_of(AutoConfig.from_pretrained(name, **hub_options(name)))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load --start {name!r}: {name_obstacle(name, error)}; allowed: {_MODELS}") from None
    if scheme is not None:
        raise UsageError(f"--start {name} has weights quantised by {scheme}, which cannot be trained; use the original weights")


def load_start(settings: TrainSettings, target: Loaded) -> HFModel | FeatureHead | None:
    """Load the draft that training starts from, None for a new one; refuse one that does not fit or cannot be written."""
    name = settings.start
    if name is None:
        return None
    if settings.kind == "head":
        taps = target.model.taps
        head = load_draft(name, target)
        target.model.tap(taps)  # undo the head's taps: the target may write texts first
        assert isinstance(head, FeatureHead)
        if not head.shape.joins and (obstacle := export_obstacle(head)):
            raise UsageError(f"--start {name} could not be written after training: {obstacle}")
        return head
    draft = load_model(name, target.model.device, torch.float32, native=False, invariant=False)
    check_same_tokens(target, draft)
    limit = draft.model.max_positions
    if limit is not None and settings.longest > limit:
        raise UsageError(
            f"--start {name} reads texts of up to {limit} tokens, but training texts have {settings.longest}; use a smaller "
            f"--length, such as {limit * settings.length // settings.longest}"
        )
    return draft.model
