"""The passes of a drafter through a tree of static shape, laid out once."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polydraft.trees import SlicedMask, StaticBlock, Topology

__all__ = ["GroupPlan", "LevelPlan", "Plan", "StaticBlock", "plan_passes"]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """Nodes of a level that draw equally many children."""

    rows: Tensor
    """Which of the level's laws."""
    children_GK: Tensor


@dataclass(frozen=True, eq=False)
class LevelPlan:
    """One pass: some nodes of a level go through the draft, and those with children draw them."""

    first: int
    stop: int
    parents_T: Tensor
    """Parent of each node of the pass."""
    block: StaticBlock
    drawing: Tensor
    """Which tokens of the block have children."""
    paths_GP: Tensor
    """Nodes from below the root to each drawing node."""
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """All passes of a tree."""

    levels: tuple[LevelPlan, ...]
    law_rows_N: Tensor


@lru_cache(maxsize=64)
def plan_passes(topology: Topology, device: torch.device, lead: int) -> Plan:
    """Lay out the draft's passes: `lead` places before the root, then node n has place `lead + n`."""
    tables = topology.tables(torch.device("cpu"))
    mask = SlicedMask.of(topology, device, lead)
    law_rows_N = torch.zeros(topology.num_nodes, dtype=torch.long)
    levels = []
    for nodes, draws in zip(topology.levels, topology.draws, strict=True):
        drawing = sorted(node for group in draws for node in group.nodes)
        if not drawing:
            continue
        law_rows_N[drawing] = torch.arange(len(drawing))
        first, stop = nodes.start, drawing[-1] + 1  # leaves at the level's end need no pass
        block = mask.level(first, stop)
        ancestors = [tables.ancestors_NN[node].nonzero()[1:, 0].tolist() for node in drawing]
        groups = tuple(
            GroupPlan(law_rows_N[list(group.nodes)].to(device), torch.tensor(group.children, device=device)) for group in draws
        )
        levels.append(
            LevelPlan(
                first,
                stop,
                torch.tensor(topology.parents[first:stop], device=device),
                block,
                torch.tensor([node + lead - block.start for node in drawing], device=device),
                torch.tensor(ancestors, dtype=torch.long, device=device).reshape(len(drawing), -1),
                groups,
            )
        )
    return Plan(tuple(levels), law_rows_N.to(device))
