"""Where candidates come from."""

from polydraft.drafters.drafter import DRAFTERS, LOSSY_DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.dynamic import Dynamic
from polydraft.drafters.head_tree import HeadTree
from polydraft.drafters.model_tree import ModelTree
from polydraft.drafters.plain import Plain
from polydraft.drafters.target_init import TargetInit, check_lossy
from polydraft.models import FeatureHead


def make_drafter(parts: Parts) -> Drafter:
    """Make the drafter that a draft calls for: a head, a model, or none."""
    if parts.draft is None or (parts.topology.depth == 0 and parts.dynamic is None):
        return DRAFTERS.get("none")(parts)
    if parts.dynamic is not None:
        return DRAFTERS.get("dynamic-head" if isinstance(parts.draft, FeatureHead) else "dynamic")(parts)
    return DRAFTERS.get("head" if isinstance(parts.draft, FeatureHead) else "model")(parts)


__all__ = [
    "DRAFTERS",
    "LOSSY_DRAFTERS",
    "DraftSession",
    "Drafter",
    "Dynamic",
    "HeadTree",
    "ModelTree",
    "Parts",
    "Plain",
    "TargetInit",
    "check_lossy",
    "make_drafter",
]
