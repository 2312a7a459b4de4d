"""Models that can score trees."""

from polydraft.models.families import FAMILIES
from polydraft.models.heads.feature_head import FeatureHead, HeadShape
from polydraft.models.heads.head import Head
from polydraft.models.language_model import Context, LanguageModel, check_prompts
from polydraft.models.memory import Memory
from polydraft.models.tabular import TabularModel

__all__ = [
    "FAMILIES",
    "Context",
    "FeatureHead",
    "Head",
    "HeadShape",
    "LanguageModel",
    "Memory",
    "TabularModel",
    "check_prompts",
]
