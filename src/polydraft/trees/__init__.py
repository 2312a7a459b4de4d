"""Shapes of draft trees."""

from polydraft.trees.block import Block, causal_block
from polydraft.trees.draft import DraftTree
from polydraft.trees.dynamic import DynamicShape, parse_dynamic
from polydraft.trees.sliced import SlicedMask, StaticBlock
from polydraft.trees.spec import parse_tree
from polydraft.trees.topology import MAX_NODES, Topology
from polydraft.trees.union import union

__all__ = [
    "MAX_NODES",
    "Block",
    "DraftTree",
    "DynamicShape",
    "SlicedMask",
    "StaticBlock",
    "Topology",
    "causal_block",
    "parse_dynamic",
    "parse_tree",
    "union",
]
