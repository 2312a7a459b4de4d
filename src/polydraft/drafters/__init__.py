"""Where candidates come from."""

from polydraft.drafters.choice import make_drafter, needs_draft
from polydraft.drafters.combination import Combination
from polydraft.drafters.drafter import DRAFTERS, LOSSY_DRAFTERS, Drafter, DraftSession, Parts
from polydraft.drafters.dynamic import Dynamic
from polydraft.drafters.gram_options import GramTreeOptions
from polydraft.drafters.gram_tree import GRAM_DRAFTERS, GramTree
from polydraft.drafters.head_tree import HeadTree
from polydraft.drafters.model_tree import ModelTree
from polydraft.drafters.plain import Plain
from polydraft.drafters.riders import RiderOptions

__all__ = [
    "DRAFTERS",
    "GRAM_DRAFTERS",
    "LOSSY_DRAFTERS",
    "Combination",
    "DraftSession",
    "Drafter",
    "Dynamic",
    "GramTree",
    "GramTreeOptions",
    "HeadTree",
    "ModelTree",
    "Parts",
    "Plain",
    "RiderOptions",
    "make_drafter",
    "needs_draft",
]
