"""Schemes and walks: how the children of a node are drawn, and how a tree is verified."""

from polydraft.verify.block import BlockWalk
from polydraft.verify.greedy import Greedy, SpecHub
from polydraft.verify.hybrid import Hybrid, Race, RaceBucketed
from polydraft.verify.kseq import KSeq
from polydraft.verify.naive import Naive, Top
from polydraft.verify.node import NodeWalk
from polydraft.verify.rejection import RejectionWithoutReplacement, RejectionWithReplacement, Speculative
from polydraft.verify.scheme import SCHEMES, Scheme, Selection
from polydraft.verify.walk import AUTO, WALKS, Fault, TargetDistributions, Verdict, Walk, check_walk, resolve_walk

__all__ = [
    "AUTO",
    "SCHEMES",
    "WALKS",
    "BlockWalk",
    "Fault",
    "Greedy",
    "Hybrid",
    "KSeq",
    "Naive",
    "NodeWalk",
    "Race",
    "RaceBucketed",
    "RejectionWithReplacement",
    "RejectionWithoutReplacement",
    "Scheme",
    "Selection",
    "SpecHub",
    "Speculative",
    "TargetDistributions",
    "Top",
    "Verdict",
    "Walk",
    "check_walk",
    "resolve_walk",
]
