"""The input of one model pass over a tree: positions, and which tokens see which.

References
----------
.. [1] Lu et al., Improving Multi-candidate Speculative Decoding, §3.2 (one large mask, sliced; there for fork-shaped trees).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polydraft.trees.topology import Topology, TreeTables


@dataclass(frozen=True, eq=False)
class Block:
    """T uncommitted tokens per row that go through a model together.

    Uncommitted tokens of a row have numbered places after its committed text; this block takes places `start` to `start + T`.
    The block of the next level of the same tree starts where this one ends.
    """

    start: int
    depths_BT: Tensor
    """Position of each token relative to the first uncommitted one."""
    visible_BTU: Tensor
    """Which of the U uncommitted places each token attends to, its own included; U is `start + T`, or more with
    `places_BT`."""
    places_BT: Tensor | None = None
    """Places of the tokens, if these are inputs of a captured pass; `start` is then ignored."""
    plain: bool = False
    """Whether the tokens are plain text, so that each sees all earlier ones."""
    levels: tuple[int, ...] | None = None
    """Number of tokens of each level, if all rows have the same and the host knows it."""

    @property
    def size(self) -> int:
        """Tokens per row."""
        return self.depths_BT.shape[1]

    @property
    def stop(self) -> int:
        """First place after all those that the block may see."""
        return self.start + self.size if self.places_BT is None else self.visible_BTU.shape[2]


@lru_cache(maxsize=16)
def causal_block(batch_size: int, size: int, device: torch.device) -> Block:
    """Return the block of `size` tokens of plain text, such as a prompt."""
    depths_BT = torch.arange(size, device=device).expand(batch_size, size)
    visible_TT = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return Block(0, depths_BT, visible_TT.expand(batch_size, size, size), plain=True, levels=(1,) * size)


@dataclass(frozen=True, eq=False)
class StaticBlock:
    """A `Block` that is the same for all rows."""

    start: int
    depths_T: Tensor
    visible_TU: Tensor
    levels: tuple[int, ...] | None = None

    def expand(self, batch_size: int) -> Block:
        """Return the same block for every row of a batch."""
        depths_BT, visible_BTU = self.depths_T.expand(batch_size, -1), self.visible_TU.expand(batch_size, -1, -1)
        return Block(self.start, depths_BT, visible_BTU, levels=self.levels)


@dataclass(frozen=True, eq=False)
class SlicedMask:
    """Mask and depths of a whole tree, and of its first levels.

    Nodes are in breadth-first order, so the first levels of a tree are a prefix of the nodes, and their mask is the upper left
    corner of the large one. The paper [1] says so for forks; it holds for every tree.
    """

    depths_P: Tensor
    """Depth of each place: a chain of `lead` places, then the nodes."""
    visible_PP: Tensor
    """Which places each place attends to."""
    child_table_NK: Tensor
    stops: tuple[int, ...]
    """Number of nodes down to each level, from the root's on."""
    lead: int

    @classmethod
    def of(cls, topology: Topology, device: torch.device, lead: int = 0) -> "SlicedMask":
        """Return the mask of a tree after a chain of `lead` places; built once and shared."""
        return _build(topology, device, lead)

    def level(self, first: int, stop: int) -> StaticBlock:
        """Return the pass over one level, nodes `first` to `stop`; that of the root includes the lead."""
        start, end = 0 if first == 0 else first + self.lead, stop + self.lead
        levels = (1,) * (end - start) if first == 0 else (end - start,)
        return StaticBlock(start, self.depths_P[start:end], self.visible_PP[start:end, :end], levels)

    def stopped(self, depth: int) -> TreeTables:
        """Return the tree down to `depth` levels below the root, where drafting has stopped."""
        nodes, begin = self.stops[depth], self.lead
        end = begin + nodes
        children_NK = self.child_table_NK[:nodes]
        return TreeTables(
            self.depths_P[begin:end] - begin, children_NK.where(children_NK < nodes, 0), self.visible_PP[begin:end, begin:end]
        )


@lru_cache(maxsize=64)
def _build(topology: Topology, device: torch.device, lead: int) -> SlicedMask:
    tables = topology.tables(torch.device("cpu"))
    places = topology.num_nodes + lead
    visible_PP = torch.ones(places, places, dtype=torch.bool).tril()
    visible_PP[lead:, lead:] = tables.ancestors_NN
    depths_P = torch.cat([torch.arange(lead), tables.depths_N + lead])
    stops = tuple(level.stop for level in topology.levels)
    return SlicedMask(depths_P.to(device), visible_PP.to(device), tables.child_table_NK.to(device), stops, lead)
