"""Where candidates come from."""

from polydraft.drafters.builder import Builder
from polydraft.drafters.drafter import DRAFTERS, LOSSY_DRAFTERS, Drafter, Parts, Plain
from polydraft.drafters.gram_options import GramTreeOptions
from polydraft.drafters.grams import GRAM_DRAFTERS, GramTree
from polydraft.drafters.riders import RiderOptions
from polydraft.drafters.session import DraftSession
from polydraft.drafters.source import DistributionSource, Source
from polydraft.drafters.tree_drafter import Combination, TreeDrafter, make_drafter, needs_draft

__all__ = [
    "DRAFTERS",
    "GRAM_DRAFTERS",
    "LOSSY_DRAFTERS",
    "Builder",
    "Combination",
    "DistributionSource",
    "DraftSession",
    "Drafter",
    "GramTree",
    "GramTreeOptions",
    "Parts",
    "Plain",
    "RiderOptions",
    "Source",
    "TreeDrafter",
    "make_drafter",
    "needs_draft",
]
