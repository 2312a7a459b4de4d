"""Shapes of draft trees: static ones, limits of dynamic ones, and how users write both."""

import heapq
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice, pairwise

import torch
from torch import Tensor

from polydraft.errors import UsageError, shown

MAX_NODES = 1024
"""Most nodes of a tree, the root included."""
RANK_ACCEPTANCE = (0.70, 0.10, 0.042, 0.026, 0.015, 0.010, 0.008, 0.006)
"""How often a candidate of the shipped head is the target's token at temperature 0, by rank; other good heads are similar."""
DEFAULT_NODES, DEFAULT_DEPTH = 64, 8
_LEAST_BEAM, _BEAM, _BRANCH = 2, 8, 16
_ALLOWED = 'widths ("4x2x2x1x1"), "chain:5", "fork:16x5", "best:64x6", "dynamic:64", paths ("[[0],[1],[0,0]]"), or "none"'


def paths_by_product(ranks: Sequence[float], max_depth: int | None) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield paths of ranks with the products of their ranks' rates, largest first; each after its parent and elder siblings.

    A product is the probability that the last node of the path is accepted, if acceptance depends on the rank alone. Of equal
    products, those of shallow paths come first.
    """
    heap: list[tuple[float, int, tuple[int, ...], float]] = []
    if max_depth is None or max_depth > 0:
        heap.append((-ranks[0], 1, (0,), 1.0))
    while heap:
        negative, depth, path, parent = heapq.heappop(heap)
        if negative == 0:
            return
        yield path, -negative
        rank = path[-1]
        if rank + 1 < len(ranks):
            heapq.heappush(heap, (-parent * ranks[rank + 1], depth, (*path[:-1], rank + 1), parent))
        if max_depth is None or depth < max_depth:
            heapq.heappush(heap, (negative * ranks[0], depth + 1, (*path, 0), -negative))


@dataclass(frozen=True)
class DrawGroup:
    """Nodes of one level with the same number of children, which are drawn together."""

    nodes: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class TreeTables:
    """A topology as tensors on one device."""

    depths_N: Tensor
    child_table_NK: Tensor
    """Node ids of each node's children in draw order; 0, the root, for none."""
    ancestors_NN: Tensor
    """`ancestors_NN[i, j]`: whether node j is node i or one of its ancestors."""


@dataclass(frozen=True)
class Topology:
    """A tree of candidates in breadth-first order; node 0 is the pending token, the root.

    Parameters
    ----------
    parents : tuple of int
        Parent of each node, 0 for the root. Siblings are in draw order.
    """

    parents: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if len(self.parents) > MAX_NODES:
            raise UsageError(
                f"a tree of {len(self.parents):,} nodes is too large; allowed: at most {MAX_NODES} with the root; "
                "use smaller widths or fewer levels"
            )
        assert self.parents[0] == 0
        assert all(0 <= parent < node for node, parent in enumerate(self.parents) if node)
        assert list(self.parents) == sorted(self.parents), "nodes must be in breadth-first order"

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> "Topology":
        """Give every node of level i `widths[i]` children (MCSD's k-config)."""
        parents, level = [0], range(1)
        for width in widths:
            if width < 1:
                raise UsageError(f"tree width {width} in {'x'.join(map(str, widths))}; allowed: whole numbers from 1")
            start = len(parents)
            if start + len(level) * width > MAX_NODES:
                spelled = "x".join(map(str, widths[:8])) + ("x..." if len(widths) > 8 else "")
                raise UsageError(
                    f"tree {spelled} has more than {MAX_NODES} nodes; use smaller widths or fewer levels, such as 4x2x2x1x1"
                )
            parents += [node for node in level for _ in range(width)]
            level = range(start, len(parents))
        return cls(tuple(parents))

    @classmethod
    def fork(cls, width: int, depth: int) -> "Topology":
        """Return `width` chains of length `depth` below the root."""
        if depth < 1:
            raise UsageError(f"fork depth {depth}; allowed: whole numbers from 1")
        if width * depth + 1 > MAX_NODES:
            raise UsageError(
                f"a fork of {width} chains of length {depth} has more than {MAX_NODES} nodes; use fewer or shorter ones"
            )
        return cls.from_widths([width, *[1] * (depth - 1)])

    @classmethod
    def likeliest(cls, nodes: int, depth: int) -> "Topology":
        """Return the tree of this size, the root included, and depth whose nodes are likeliest to be accepted at T=0."""
        if not 2 <= nodes <= MAX_NODES or depth < 1:
            raise UsageError(f"tree best:{nodes}x{depth}; allowed: 2 to {MAX_NODES} nodes, and a depth from 1")
        return cls.from_paths(path for path, _ in islice(paths_by_product(RANK_ACCEPTANCE, depth), nodes - 1))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "Topology":
        """Build a tree from index paths, as EAGLE lists them: `[0, 1]` is the second child of the first child.

        Every path needs its parent, and every sibling its elder siblings: leaving out a candidate because of its rank would
        change the distribution of the others.
        """
        listed = [tuple(path) for path in paths]
        for path in listed:
            if not path or any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in path):
                raise UsageError(f"tree path {list(path)} must be a non-empty list of whole numbers from 0")
        ordered = sorted(set(listed), key=lambda path: (len(path), path))
        ids: dict[tuple[int, ...], int] = {(): 0}
        parents = [0]
        for path in ordered:
            if path[:-1] not in ids:
                raise UsageError(f"tree path {list(path)} is an orphan: its parent {list(path[:-1])} is not in the list")
            elder = (*path[:-1], path[-1] - 1)
            if path[-1] and elder not in ids:
                raise UsageError(
                    f"tree path {list(path)} skips its sibling {list(elder)}; candidates count from 0 without gaps"
                )
            ids[path] = len(parents)
            parents.append(ids[path[:-1]])
        return cls(tuple(parents))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Levels below the root; 0 for plain decoding."""
        return self.depths[-1]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Node ids of each node's children, in draw order."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            lists[parent].append(node)
        return tuple(map(tuple, lists))

    def cut(self, depth: int) -> "Topology":
        """Return the tree down to `depth`."""
        return Topology(self.parents[: self.levels[depth].stop]) if depth < self.depth else self

    @property
    def max_children(self) -> int:
        """Largest number of children of any node."""
        return max(map(len, self.children))

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """Node ids of each level, from the root's on; each level is a contiguous range."""
        starts = [self.depths.index(depth) for depth in range(self.depth + 1)] + [self.num_nodes]
        return tuple(range(start, stop) for start, stop in pairwise(starts))

    @cached_property
    def draws(self) -> tuple[tuple[DrawGroup, ...], ...]:
        """For each level, its nodes grouped by how many children they draw."""
        result = []
        for level in self.levels:
            groups: dict[int, list[int]] = {}
            for node in level:
                if self.children[node]:
                    groups.setdefault(len(self.children[node]), []).append(node)
            result.append(
                tuple(DrawGroup(tuple(nodes), tuple(self.children[node] for node in nodes)) for nodes in groups.values())
            )
        return tuple(result)

    def tables(self, device: torch.device) -> TreeTables:
        """Return the tensors of this tree on `device`; built once and shared."""
        return _tables(self, device)

    def __str__(self) -> str:
        widths = [sorted({len(self.children[node]) for node in level}) for level in self.levels[:-1]]
        if all(len(width) == 1 for width in widths):
            return "x".join(str(width[0]) for width in widths) or "none"
        return f"sparse tree of {self.num_nodes} nodes"


@lru_cache(maxsize=64)
def _tables(topology: Topology, device: torch.device) -> TreeTables:
    nodes = topology.num_nodes
    width = max(topology.max_children, 1)
    child_table_NK = torch.zeros(nodes, width, dtype=torch.long)
    ancestors_NN = torch.eye(nodes, dtype=torch.bool)
    for node in range(nodes):
        for rank, child in enumerate(topology.children[node]):
            child_table_NK[node, rank] = child
            ancestors_NN[child] |= ancestors_NN[node]
    depths_N = torch.tensor(topology.depths)
    return TreeTables(depths_N.to(device), child_table_NK.to(device), ancestors_NN.to(device))


@dataclass(frozen=True, kw_only=True)
class DynamicShape:
    """Limits of a dynamic tree."""

    nodes: int = DEFAULT_NODES
    """Most nodes, the root included."""
    depth: int = DEFAULT_DEPTH
    """Most levels below the root."""
    beam: int = _BEAM
    """Most nodes of a level that go through the draft to get children."""
    branch: int = _BRANCH
    """Most children of a node."""
    adaptive: bool = True
    """Whether each round chooses the size that is expected to pay; if not, all trees are as large as allowed."""

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MAX_NODES:
            raise UsageError(f"dynamic tree of {self.nodes} nodes; allowed: 2 to {MAX_NODES}, the root included")
        if not 1 <= self.depth < self.nodes:
            raise UsageError(
                f"dynamic tree of depth {self.depth} with {self.nodes} nodes; allowed: 1 to {self.nodes - 1}, a node per level"
            )
        if self.beam < 1 or self.branch < 1:
            raise UsageError(f"beam {self.beam} and branch {self.branch} of a dynamic tree; allowed: whole numbers from 1")

    @classmethod
    def like(cls, topology: Topology) -> "DynamicShape":
        """Return a dynamic tree with the nodes and the depth of a static one."""
        return cls(nodes=max(topology.num_nodes, 2), depth=max(topology.depth, 1))

    def cut(self, depth: int) -> "DynamicShape":
        """Return the limits with at most this depth."""
        return replace(self, depth=min(self.depth, depth))

    def __str__(self) -> str:
        return f"dynamic:{self.nodes}:{self.depth}{'' if self.adaptive else ':fixed'}"


def parse_dynamic(text: str) -> DynamicShape | None:
    """Read ``"dynamic[:NODES[:DEPTH[:fixed]]]"``; return None for other trees.

    Parameters
    ----------
    text : str
        NODES, the root included, and DEPTH are limits; with ``fixed`` every tree reaches them.
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
    # Small trees are for machines where every token of a pass takes time, in the draft's passes, too.
    beam = min(max(nodes // _BEAM, _LEAST_BEAM), _BEAM)
    return DynamicShape(nodes=nodes, depth=depth, beam=beam, adaptive=match[3] is None)


def parse_tree(text: str) -> Topology:
    """Read a tree specification.

    Parameters
    ----------
    text : str
        ``"4x2x2x1x1"`` (children per level), ``"chain:5"``, ``"fork:WIDTHxDEPTH"`` (also ``"target-root:..."``, because the
        root, the pending token, comes from the target's distribution), ``"best:NODESxDEPTH"`` (the tree of this size with the
        most accepted tokens at temperature 0, at the shipped head's rates of acceptance), a JSON list of index paths, or
        ``"none"`` for plain decoding.
    """
    spec = text.strip().lower()
    if spec == "none":
        return Topology()
    if re.fullmatch(r"\d{1,18}(x\d{1,18})*", spec):
        return Topology.from_widths([int(width) for width in spec.split("x")])
    if match := re.fullmatch(r"chain:(\d{1,18})", spec):
        return Topology.fork(1, int(match[1]))
    if match := re.fullmatch(r"(?:fork|target-root):(\d{1,18})x(\d{1,18})", spec):
        return Topology.fork(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"best:(\d{1,18})x(\d{1,18})", spec):
        return Topology.likeliest(int(match[1]), int(match[2]))
    if spec.startswith("["):
        try:
            paths = json.loads(spec)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"tree {shown(text)} is not a readable list of paths ({error}); allowed: {_ALLOWED}") from None
        if all(isinstance(path, list) for path in paths):
            return Topology.from_paths(paths)
    raise UsageError(f"unknown tree {shown(text)}; allowed: {_ALLOWED}")
