"""The passes that grow a static tree, laid out once per tree: which nodes draw, and where their children go."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.trees import SlicedMask, StaticBlock, Topology
from polydraft.verify import SCHEMES, Scheme

WIDEST_SCHEME = "rrs-wor"
"""What ``"auto"`` means if nodes have more children than the default scheme takes."""


def check_tree(topology: Topology, scheme: str | Scheme, vocab_size: int) -> None:
    """Raise a `UsageError` for a tree that a scheme or a vocabulary cannot fill."""
    if scheme != "auto":
        known = scheme if isinstance(scheme, Scheme) else SCHEMES.get(scheme)
        limit = known.max_children
        if limit is not None and topology.max_children > limit:
            raise UsageError(
                f"scheme {known.name!r} takes at most {limit} candidate{'s' if limit > 1 else ''} per node but tree {topology} "
                f"has up to {topology.max_children}; use a tree such as {limit}x{limit}x1 or scheme {WIDEST_SCHEME}"
            )
    if topology.max_children > vocab_size:
        raise UsageError(
            f"tree {topology} wants {topology.max_children} candidates per node but the draft knows only "
            f"{vocab_size} tokens; use smaller widths"
        )


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """Nodes of a level that draw the same number of children."""

    rows: Tensor | slice
    """Their distributions among the level's."""
    uniforms: Tensor | slice
    """Random numbers for their children, node by node."""
    width: int
    """Children per node."""
    nodes_GK: Tensor
    """The drawn nodes, distribution by distribution."""


@dataclass(frozen=True, eq=False)
class LevelPlan:
    """One pass: nodes `first` to `stop` of a level go through the draft, and those with children draw them."""

    first: int
    stop: int
    parents_T: Tensor
    """Each node's parent, as an index into the last pass."""
    block: StaticBlock
    drawing: Tensor | slice
    """Nodes of the pass that have children."""
    paths_GP: Tensor
    """Nodes from below the root to each drawing node."""
    groups: tuple[GroupPlan, ...]
    children: Tensor | slice
    """All nodes that are drawn."""
    nodes_GK: Tensor
    """The drawn nodes, distribution by distribution, padded with 0."""


@dataclass(frozen=True, eq=False)
class TreePlan:
    """All passes of a tree."""

    levels: tuple[LevelPlan, ...]
    distribution_rows_N: Tensor


@lru_cache(maxsize=64)
def plan_passes(topology: Topology, device: torch.device, lead: int) -> TreePlan:
    """Lay out the draft's passes: after `lead` places, node n has place `lead + n`."""
    tables = topology.tables(torch.device("cpu"))
    mask = SlicedMask.of(topology, device, lead)
    distribution_rows_N = torch.zeros(topology.num_nodes, dtype=torch.long)
    levels, above = [], 0
    for nodes, draws in zip(topology.levels, topology.draws, strict=True):
        drawing = sorted(node for group in draws for node in group.nodes)
        if not drawing:
            continue
        distribution_rows_N[drawing] = torch.arange(len(drawing))
        first, stop = nodes.start, drawing[-1] + 1  # leaves at the level's end need no pass
        ancestors = [tables.ancestors_NN[node].nonzero()[1:, 0].tolist() for node in drawing]
        groups, drawn = list[GroupPlan](), list[int]()
        widest = max(len(group.children[0]) for group in draws)
        nodes_GK = torch.zeros(len(drawing), widest, dtype=torch.long)
        for group in draws:
            rows = distribution_rows_N[list(group.nodes)].tolist()
            children = [child for siblings in group.children for child in siblings]
            groups.append(
                GroupPlan(
                    _places(rows, device),
                    _places([child - 1 for child in children], device),
                    len(group.children[0]),
                    torch.tensor(group.children, device=device),
                )
            )
            nodes_GK[rows, : len(group.children[0])] = torch.tensor(group.children)
            drawn += children
        levels.append(
            LevelPlan(
                first,
                stop,
                torch.tensor(topology.parents[first:stop], device=device) - above,
                mask.level(first, stop),
                _places([node - first for node in drawing], device),
                torch.tensor(ancestors, dtype=torch.long, device=device).reshape(len(drawing), -1),
                tuple(groups),
                _places(sorted(drawn), device),
                nodes_GK.to(device),
            )
        )
        above = first
    return TreePlan(tuple(levels), distribution_rows_N.to(device))


def _places(numbers: Sequence[int], device: torch.device) -> Tensor | slice:
    """Return an index for these places: a slice, which gives a view, if they are consecutive."""
    first, stop = numbers[0], numbers[-1] + 1
    if list(numbers) == list(range(first, stop)):
        return slice(first, stop)
    return torch.tensor(numbers, device=device)
