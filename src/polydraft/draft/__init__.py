"""Drafting: where candidates come from."""

from polydraft.draft.builder import Builder
from polydraft.draft.drafter import DRAFTERS, LOSSY_DRAFTERS, Drafter, Parts, Plain
from polydraft.draft.gram_options import GramTreeOptions, RiderOptions
from polydraft.draft.grams import GRAM_DRAFTERS, GramTree
from polydraft.draft.session import DraftSession
from polydraft.draft.source import DistributionSource, Source
from polydraft.draft.tree_drafter import Combination, TreeDrafter, make_drafter, needs_draft

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
