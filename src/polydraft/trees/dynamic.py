"""How large a tree may grow whose shape is decided anew in every round."""

import re
from dataclasses import dataclass

from polydraft.errors import UsageError
from polydraft.trees.topology import MAX_NODES, Topology

DEFAULT_NODES, DEFAULT_DEPTH = 64, 8
_BEAM, _BRANCH = 8, 16
_FIXED = "fixed"


@dataclass(frozen=True, kw_only=True)
class DynamicShape:
    """Limits of a dynamic tree."""

    nodes: int = DEFAULT_NODES
    """Most nodes, the root included."""
    depth: int = DEFAULT_DEPTH
    """Most levels below the root."""
    beam: int = _BEAM
    """Nodes of a level that go through the draft to get children."""
    branch: int = _BRANCH
    """Children that a node may have."""
    adaptive: bool = True
    """Whether every round chooses its size by what it is expected to be worth; otherwise all trees are as large as allowed."""

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MAX_NODES:
            raise UsageError(f"dynamic tree of {self.nodes} nodes; allowed: 2 to {MAX_NODES}, the root included")
        if not 1 <= self.depth < self.nodes:
            raise UsageError(
                f"dynamic tree of depth {self.depth} with {self.nodes} nodes; allowed: 1 to {self.nodes - 1}, a node a level"
            )
        if self.beam < 1 or self.branch < 1:
            raise UsageError(f"beam {self.beam} and branch {self.branch} of a dynamic tree; allowed: whole numbers from 1")

    @classmethod
    def like(cls, topology: Topology) -> "DynamicShape":
        """Return a dynamic tree with the nodes and the depth of a static one."""
        return cls(nodes=max(topology.num_nodes, 2), depth=max(topology.depth, 1))

    def __str__(self) -> str:
        return f"dynamic:{self.nodes}:{self.depth}{'' if self.adaptive else ':' + _FIXED}"


def parse_dynamic(text: str) -> DynamicShape | None:
    """Read ``"dynamic"``, ``"dynamic:NODES"``, ``"dynamic:NODES:DEPTH"``, the last with ``":fixed"`` behind; None for others.

    Parameters
    ----------
    text : str
        NODES, the root included, and DEPTH are limits; with ``fixed`` every round uses them up.
    """
    spec = text.strip().lower()
    if spec.partition(":")[0] != "dynamic":
        return None
    match = re.fullmatch(r"dynamic(?::(\d{1,18})(?::(\d{1,18})(:fixed)?)?)?", spec)
    if match is None:
        raise UsageError(
            f"unknown tree {text!r}; allowed: dynamic, dynamic:NODES, dynamic:NODES:DEPTH, dynamic:NODES:DEPTH:fixed"
        )
    nodes = int(match[1]) if match[1] is not None else DEFAULT_NODES
    depth = int(match[2]) if match[2] is not None else max(min(DEFAULT_DEPTH, nodes - 1), 1)
    return DynamicShape(nodes=nodes, depth=depth, adaptive=match[3] is None)
