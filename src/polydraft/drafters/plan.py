"""The passes of a drafter through a tree of static shape, laid out once."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polydraft.trees import Block, Topology


@dataclass(frozen=True, eq=False)
class StaticBlock:
    """A `Block` that is the same for all rows."""

    start: int
    depths_T: Tensor
    visible_TU: Tensor

    def expand(self, batch_size: int) -> Block:
        """Return the block of a batch."""
        return Block(self.start, self.depths_T.expand(batch_size, -1), self.visible_TU.expand(batch_size, -1, -1))


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
    places = topology.num_nodes + lead
    visible_PP = torch.ones(places, places, dtype=torch.bool).tril()
    visible_PP[lead:, lead:] = tables.ancestors_NN
    depths_P = torch.cat([torch.arange(lead), tables.depths_N + lead])
    law_rows_N = torch.zeros(topology.num_nodes, dtype=torch.long)
    levels = []
    for nodes, draws in zip(topology.levels, topology.draws, strict=True):
        drawing = sorted(node for group in draws for node in group.nodes)
        if not drawing:
            continue
        law_rows_N[drawing] = torch.arange(len(drawing))
        first, stop = nodes.start, drawing[-1] + 1  # leaves at the level's end need no pass
        start, end = 0 if first == 0 else first + lead, stop + lead
        block = StaticBlock(start, depths_P[start:end].to(device), visible_PP[start:end, :end].to(device))
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
                torch.tensor([node + lead - start for node in drawing], device=device),
                torch.tensor(ancestors, dtype=torch.long, device=device).reshape(len(drawing), -1),
                groups,
            )
        )
    return Plan(tuple(levels), law_rows_N.to(device))
