"""Verification of a whole tree, from the root towards a leaf."""

from polydraft.walks.node import NodeWalk
from polydraft.walks.walk import WALKS, Fault, Verdict, Walk

__all__ = ["WALKS", "Fault", "NodeWalk", "Verdict", "Walk"]
