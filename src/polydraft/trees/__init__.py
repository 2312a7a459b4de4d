"""Shapes of draft trees."""

from polydraft.trees.block import Block, causal_block
from polydraft.trees.draft import DraftTree
from polydraft.trees.spec import parse_tree
from polydraft.trees.topology import MAX_NODES, Topology
from polydraft.trees.union import union

__all__ = ["MAX_NODES", "Block", "DraftTree", "Topology", "causal_block", "parse_tree", "union"]
