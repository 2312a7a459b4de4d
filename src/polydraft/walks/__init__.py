"""Verification of a whole tree, in one of several orders."""

from polydraft.walks.block import BlockWalk
from polydraft.walks.flat_blocks import FlatBlocksWalk
from polydraft.walks.node import NodeWalk
from polydraft.walks.traversal import TraversalWalk
from polydraft.walks.walk import AUTO, WALKS, Fault, TargetLaws, Verdict, Walk, check_walk, resolve_walk

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
