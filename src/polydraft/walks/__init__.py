"""Verification of a whole tree, in one of several orders."""

from polydraft.walks.block import BlockWalk
from polydraft.walks.choice import AUTO, check_walk, resolve_walk
from polydraft.walks.flat_blocks import FlatBlocksWalk
from polydraft.walks.node import NodeWalk
from polydraft.walks.target_law import TargetLaws
from polydraft.walks.traversal import TraversalWalk
from polydraft.walks.walk import WALKS, Fault, Verdict, Walk

__all__ = [
    "AUTO",
    "WALKS",
    "BlockWalk",
    "Fault",
    "FlatBlocksWalk",
    "NodeWalk",
    "TargetLaws",
    "TraversalWalk",
    "Verdict",
    "Walk",
    "check_walk",
    "resolve_walk",
]
