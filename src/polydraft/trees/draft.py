"""Trees of candidate tokens, and the union of two such trees."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, PartialVocabulary
from polydraft.trees.block import Block
from polydraft.trees.topology import Topology


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Candidate tokens of a batch, one tree per row, and the distributions they were drawn from.

    Trees of different rows may have different shapes.
    """

    tokens_BN: Tensor
    """Token of each node; node 0 is the pending token; `NO_TOKEN` where the draft proposed nothing."""
    depths_BN: Tensor
    ancestors_BNN: Tensor
    child_table_BNK: Tensor
    """Node ids of each node's children in draw order; 0 for none."""
    depth: int
    """Largest depth of any row; the host knows it without looking at tensors."""
    distributions: tuple[Tensor, ...] = ()
    """For each level, the very draft probabilities `[B, G, V]` that were drawn from; empty for schemes that need none."""
    distribution_rows_BN: Tensor | None = None
    """Which of its level's G distributions the children of each node were drawn from."""
    vocabulary: PartialVocabulary | None = None
    """Tokens of the distributions' columns, if these are not the whole vocabulary."""
    reach: int | None = None
    """Largest depth of any node that a walk can reach; None if the host only knows `depth`."""
    riders: int = 0
    """How many of the last nodes are riders, which no walk can reach."""
    extra_table_BNK: Tensor | None = None
    """Node ids of extra children, not drawn by a scheme, to which a walk may go on (see `union`); 0 for none."""
    levels: tuple[int, ...] | None = None
    """Number of nodes of each level, if all rows have the same shape and the host knows it."""

    @classmethod
    def from_topology(
        cls,
        topology: Topology,
        tokens_BN: Tensor,
        distributions: tuple[Tensor, ...],
        distribution_rows_N: Tensor,
        vocabulary: PartialVocabulary | None = None,
    ) -> "DraftTree":
        """Return trees of one static shape for all rows."""
        tables = topology.tables(tokens_BN.device)
        batch_size = len(tokens_BN)
        return cls(
            tokens_BN,
            tables.depths_N.expand(batch_size, -1),
            tables.ancestors_NN.expand(batch_size, -1, -1),
            tables.child_table_NK.expand(batch_size, -1, -1),
            topology.depth,
            distributions,
            distribution_rows_N.expand(batch_size, -1),
            vocabulary,
            levels=tuple(map(len, topology.levels)),
        )

    @classmethod
    def bare(
        cls, root_B: Tensor, depth: int, distributions: tuple[Tensor, ...] = (), vocabulary: PartialVocabulary | None = None
    ) -> "DraftTree":
        """Return trees with nothing but a root, in a session whose other trees are up to `depth` deep."""
        tree = cls.from_topology(Topology(), root_B[:, None], distributions, torch.zeros_like(root_B[:1]), vocabulary)
        return replace(tree, depth=depth, reach=0)

    @property
    def chain(self) -> bool:
        """Whether all trees are known to be chains."""
        return self.levels is not None and len(self.levels) == self.tokens_BN.shape[1]

    def block(self) -> Block:
        """Return the whole tree as one model pass."""
        return Block(0, self.depths_BN, self.ancestors_BNN, plain=self.chain, levels=self.levels)

    def children(self, node_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return node ids and tokens of the children of one node per row; token `NO_TOKEN` for none."""
        width = self.child_table_BNK.shape[-1]
        nodes_BK = self.child_table_BNK.gather(1, node_B[:, None, None].expand(-1, 1, width))[:, 0]
        return nodes_BK, torch.where(nodes_BK > 0, self.tokens_BN.gather(1, nodes_BK), NO_TOKEN)

    def parents(self) -> Tensor:
        """Return each node's parent; the root for nodes without one."""
        batch_size, nodes, width = self.child_table_BNK.shape
        nodes_BX = torch.arange(nodes, device=self.tokens_BN.device).repeat_interleave(width).expand(batch_size, -1)
        parents_BN = torch.zeros_like(self.tokens_BN).scatter_(1, self.child_table_BNK.flatten(1), nodes_BX)
        parents_BN[:, 0].zero_()  # missing children are 0 in the table, so they have written there
        return parents_BN

    def all_children(self) -> Tensor:
        """Return the tokens of the children of every node, `[B, N, K]`; `NO_TOKEN` for none."""
        table_BNK = self.child_table_BNK
        tokens_BNK = self.tokens_BN.gather(1, table_BNK.flatten(1)).view_as(table_BNK)
        return tokens_BNK.where(table_BNK > 0, NO_TOKEN)

    def paths(self) -> Tensor:
        """Return the tokens from below the root to every node, its own included, `[B, N, P]`; `NO_TOKEN` where shorter."""
        nodes = self.tokens_BN.shape[1]
        # The tokens of ancestors go to the places of their depths; the root's, and those of all other nodes, to place 0, which
        # is cut off. Riders may be deeper than the tree.
        place_BNX = (self.depths_BN * (self.depths_BN <= self.depth))[:, None] * self.ancestors_BNN
        tokens_BNX = self.tokens_BN[:, None].expand(-1, nodes, -1)
        paths_BNP = torch.full_like(place_BNX[:, :, :1], NO_TOKEN).repeat(1, 1, self.depth + 1)
        return paths_BNP.scatter_(2, place_BNX, tokens_BNX)[:, :, 1:]

    def all_distributions(self) -> Tensor:
        """Return the distribution that the children of each node were drawn from, in the draft's columns, `[B, N, D]`."""
        assert self.distributions and self.distribution_rows_BN is not None
        distributions_BGD = torch.cat(self.distributions, dim=1)
        row_BN = self.distribution_rows_BN
        for level, distributions_of_level in enumerate(self.distributions[:-1]):
            row_BN = torch.add(row_BN, self.depths_BN > level, alpha=distributions_of_level.shape[1])
        row_BN = row_BN.clamp(max=distributions_BGD.shape[1] - 1)  # nodes without children get an arbitrary one
        return distributions_BGD.gather(1, row_BN[:, :, None].expand(-1, -1, distributions_BGD.shape[-1]))

    def followers(self, node_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return node ids and tokens of all children of one node per row, drawn ones first."""
        nodes_BK, tokens_BK = self.children(node_B)
        if self.extra_table_BNK is None:
            return nodes_BK, tokens_BK
        further = replace(self, child_table_BNK=self.extra_table_BNK).children(node_B)
        return torch.cat([nodes_BK, further[0]], dim=1), torch.cat([tokens_BK, further[1]], dim=1)

    def all_followers(self) -> tuple[Tensor, Tensor]:
        """Return node ids and tokens of all children of every node, `[B, N, K]`, drawn ones first."""
        if self.extra_table_BNK is None:
            return self.child_table_BNK, self.all_children()
        table_BNK = torch.cat([self.child_table_BNK, self.extra_table_BNK], dim=2)
        return table_BNK, replace(self, child_table_BNK=table_BNK).all_children()

    def without_riders(self) -> "DraftTree":
        """Return the trees without riders, which no walk can reach."""
        if not self.riders:
            return self
        nodes = self.tokens_BN.shape[1] - self.riders
        return replace(
            self,
            tokens_BN=self.tokens_BN[:, :nodes],
            depths_BN=self.depths_BN[:, :nodes],
            ancestors_BNN=self.ancestors_BNN[:, :nodes, :nodes],
            child_table_BNK=self.child_table_BNK[:, :nodes],
            distribution_rows_BN=None if self.distribution_rows_BN is None else self.distribution_rows_BN[:, :nodes],
            extra_table_BNK=None if self.extra_table_BNK is None else self.extra_table_BNK[:, :nodes],
            riders=0,
        )

    def longest(self) -> Tensor:
        """Return the length of each row's longest path of candidates."""
        listed_BX = self.child_table_BNK.flatten(1)
        real_BX = self.tokens_BN.gather(1, listed_BX) != NO_TOKEN
        return torch.where(real_BX, self.depths_BN.gather(1, listed_BX), 0).amax(-1)

    def branch(self, node_B: Tensor) -> Tensor:
        """Return the number of a node among the root's children, from 0; -1 for the root itself."""
        match_BK = self.child_table_BNK[:, 0] == node_B[:, None]
        return torch.where(node_B > 0, match_BK.to(torch.uint8).argmax(-1), -1)

    def draft_distribution(self, level: int, node_B: Tensor) -> Tensor:
        """Return the distribution that the children of one node per row were drawn from; `[B, 0]` if there are none."""
        distribution_BD = self.short_distribution(level, node_B)
        if self.vocabulary is None or not distribution_BD.shape[1]:
            return distribution_BD
        return self.vocabulary.spread(distribution_BD)

    def short_distribution(self, level: int, node_B: Tensor) -> Tensor:
        """Return `draft_distribution` in the draft's own columns."""
        if not self.distributions or self.distribution_rows_BN is None:
            return torch.empty(len(node_B), 0, device=node_B.device)
        distributions_BGV = self.distributions[level]
        # Rows whose walks have ended get one, too; it is not used, but must exist.
        row_B11 = self.distribution_rows_BN.gather(1, node_B[:, None])[:, :, None].clamp(max=distributions_BGV.shape[1] - 1)
        return distributions_BGV.gather(1, row_B11.expand(-1, 1, distributions_BGV.shape[-1]))[:, 0]


def union(drawn: DraftTree, certain: DraftTree) -> DraftTree:
    """Add the nodes of `certain` below the root of `drawn`, as extra children.

    If a path of tokens is in both trees, it has a node in each, and both nodes stand for the same text. So the children of the
    node in `certain` also become extra children of the node in `drawn`, and a walk along a drawn path misses nothing.

    Guarantee: a scheme emits a token of the target's distribution at a node, whatever it drew there. Extra children do not
    depend on the round's random numbers and only let the walk go on after that token, so each step stays exact given the path.

    Parameters
    ----------
    drawn : DraftTree
        Its nodes keep their numbers.
    certain : DraftTree
        Has the same root, and all riders. Node n > 0 becomes node `drawn nodes + n - 1`.

    Returns
    -------
    DraftTree
        The children of `drawn`, with all others in `extra_table_BNK`.
    """
    own = drawn.tokens_BN.shape[1]
    batch_size, added = certain.tokens_BN.shape[0], certain.tokens_BN.shape[1] - 1
    tokens_BN = torch.cat([drawn.tokens_BN, certain.tokens_BN[:, 1:]], dim=1)
    depths_BN = torch.cat([drawn.depths_BN, certain.depths_BN[:, 1:]], dim=1)
    ancestors_BNN = tokens_BN.new_zeros(batch_size, own + added, own + added, dtype=torch.bool)
    ancestors_BNN[:, :own, :own] = drawn.ancestors_BNN
    ancestors_BNN[:, own:, 0] = certain.ancestors_BNN[:, 1:, 0]
    ancestors_BNN[:, own:, own:] = certain.ancestors_BNN[:, 1:, 1:]
    moved_BNK = torch.where(certain.child_table_BNK > 0, certain.child_table_BNK + (own - 1), 0)
    width = moved_BNK.shape[2]
    # One more row, without children, stands for "none".
    same_BN = _same_paths(drawn, certain)
    inherited_BNK = torch.nn.functional.pad(moved_BNK, (0, 0, 0, 1)).gather(1, same_BN[:, :, None].expand(-1, -1, width))
    distribution_rows_BN = drawn.distribution_rows_BN
    return replace(
        drawn,
        tokens_BN=tokens_BN,
        depths_BN=depths_BN,
        ancestors_BNN=ancestors_BNN,
        child_table_BNK=torch.nn.functional.pad(drawn.child_table_BNK, (0, 0, 0, added)),
        depth=max(drawn.depth, certain.depth),
        distribution_rows_BN=None
        if distribution_rows_BN is None
        else torch.nn.functional.pad(distribution_rows_BN, (0, added)),
        reach=None if certain.reach is None else max(drawn.depth, certain.reach),
        riders=certain.riders,
        extra_table_BNK=torch.cat([inherited_BNK, moved_BNK[:, 1:]], dim=1),
        levels=None,
    )


def _same_paths(drawn: DraftTree, certain: DraftTree) -> Tensor:
    """Return for each node of `drawn` the node of `certain` with the same path of tokens; if none, its number of nodes."""
    none, parents_BN = certain.tokens_BN.shape[1], drawn.parents()
    tables_BNK = torch.nn.functional.pad(certain.child_table_BNK, (0, 0, 0, 1))
    found_BN = torch.full_like(drawn.tokens_BN, none)
    found_BN[:, 0].zero_()
    for _ in range(min(drawn.depth, certain.depth)):
        above_BN = found_BN.gather(1, parents_BN)
        children_BNK = tables_BNK.gather(1, above_BN[:, :, None].expand(-1, -1, tables_BNK.shape[2]))
        tokens_BNK = certain.tokens_BN.gather(1, children_BNK.flatten(1)).view_as(children_BNK)
        same_BNK = (children_BNK > 0) & (tokens_BNK == drawn.tokens_BN[:, :, None])
        child_BN = children_BNK.gather(2, same_BNK.to(torch.uint8).argmax(-1, keepdim=True))[..., 0]
        found_BN = torch.where(same_BNK.any(-1), child_BN, none)
        found_BN[:, 0].zero_()
    return found_BN
