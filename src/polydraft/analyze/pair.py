"""A target and its draft, loaded only when something has to be computed with them."""

from functools import cached_property

import torch

from polydraft.analyze.fingerprint import model_fingerprint
from polydraft.errors import UsageError
from polydraft.loading import usual_pair
from polydraft.models import FeatureHead, LanguageModel
from polydraft.models.loading import Loaded, load_draft, load_model
from polydraft.models.placement import resolve_device, resolve_dtype


class Pair:
    """Two models by name.

    Parameters
    ----------
    target, draft : str
        As `polydraft.load` takes them.
    device, dtype : str
        As `polydraft.load` takes them.
    """

    def __init__(self, target: str, draft: str, device: str, dtype: str) -> None:
        self.target_name = target
        self.draft_name = usual_pair(target)[0] if draft == "auto" else draft
        if self.draft_name == "none":
            raise UsageError(f"target {target!r} has no draft to compare with; pass --draft NAME, a folder, or early-exit:k")
        self.device: torch.device = resolve_device(device)
        self.dtype: torch.dtype = resolve_dtype(dtype, self.device)

    @cached_property
    def target(self) -> Loaded:
        """The target, loaded."""
        return load_model(self.target_name, self.device, self.dtype)

    @cached_property
    def draft(self) -> LanguageModel | FeatureHead:
        """The draft, loaded."""
        draft = load_draft(self.draft_name, self.target)
        assert draft is not None, "'none' was refused"
        return draft

    def fingerprint(self) -> list[str] | None:
        """Return marks of both models' files and of how they compute, or None while that cannot be told."""
        marks = [model_fingerprint(name) for name in (self.target_name, self.draft_name)]
        found = [mark for mark in marks if mark is not None]
        return [*found, str(self.dtype), self.device.type] if len(found) == len(marks) else None
