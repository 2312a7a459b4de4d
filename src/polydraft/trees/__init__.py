"""Draft trees: their shapes, their tokens, and what a model pass needs to know about them."""

from polydraft.trees.block import Block, SlicedMask, StaticBlock, causal_block
from polydraft.trees.draft import DraftTree, union
from polydraft.trees.topology import MAX_NODES, DynamicShape, Topology, parse_dynamic, parse_tree

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
