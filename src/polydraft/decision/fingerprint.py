"""Which draft a decision model was trained for."""

import hashlib

import torch
from torch import Tensor

from polydraft.models import FeatureHead, LanguageModel

_SAMPLED = 64


def draft_fingerprint(draft: LanguageModel | FeatureHead) -> str:
    """Return a short mark of a draft's weights; the same in every number format they are loaded in."""
    digest = hashlib.sha256()
    for name, weight in sorted(_weights(draft).items()):
        flat = weight.detach().flatten()
        sample = flat[:: max(len(flat) // _SAMPLED, 1)][:_SAMPLED]
        # bfloat16 is the coarsest format that drafts are loaded in.
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _weights(draft: LanguageModel | FeatureHead) -> dict[str, Tensor]:
    if isinstance(draft, FeatureHead):
        return dict(draft.state_dict())
    module = getattr(draft, "hf_model", None)
    if module is not None:
        layers = torch.tensor([float(getattr(draft, "num_layers", 0))])  # an early exit has its target's weights
        return {**module.state_dict(), "layers": layers}
    return {name: value for name, value in vars(draft).items() if isinstance(value, Tensor)}
