"""Where candidates come from."""

from polydraft.drafters.drafter import DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.model_tree import ModelTree
from polydraft.drafters.plain import Plain

__all__ = ["DRAFTERS", "DraftSession", "Drafter", "ModelTree", "Parts", "Plain"]
