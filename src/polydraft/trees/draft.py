"""A tree filled with tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.sampling import NO_TOKEN, PartialVocabulary
from polydraft.trees.block import Block
from polydraft.trees.topology import Topology


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Candidate tokens of a batch, one tree a row, with the laws they were drawn from.

    Rows may have trees of different shapes; a static topology is the same view for all.
    """

    tokens_BN: Tensor
    """Token of each node; node 0 is the pending token; `NO_TOKEN` where the draft had nothing to offer."""
    depths_BN: Tensor
    ancestors_BNN: Tensor
    child_table_BNK: Tensor
    """Node ids of children in draw order, 0 for none."""
    depth: int
    """Largest depth in any row, as a static number."""
    laws: tuple[Tensor, ...] = ()
    """For each level, draft probabilities `[B, G, V]` exactly as drawn from; empty for schemes that need none."""
    law_rows_BN: Tensor | None = None
    """Which of its level's G laws each node's children were drawn from."""
    vocabulary: PartialVocabulary | None = None
    """What the columns of the laws mean, where they are not all tokens."""

    @classmethod
    def from_topology(
        cls,
        topology: Topology,
        tokens_BN: Tensor,
        laws: tuple[Tensor, ...],
        law_rows_N: Tensor,
        vocabulary: PartialVocabulary | None = None,
    ) -> "DraftTree":
        """Share one static shape among all rows."""
        tables = topology.tables(tokens_BN.device)
        batch_size = len(tokens_BN)
        return cls(
            tokens_BN,
            tables.depths_N.expand(batch_size, -1),
            tables.ancestors_NN.expand(batch_size, -1, -1),
            tables.child_table_NK.expand(batch_size, -1, -1),
            topology.depth,
            laws,
            law_rows_N.expand(batch_size, -1),
            vocabulary,
        )

    def block(self) -> Block:
        """Return the whole tree as one model pass."""
        return Block(0, self.depths_BN, self.ancestors_BNN)

    def children(self, node_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return node ids and tokens of the children of one node a row; token `NO_TOKEN` where there is none."""
        width = self.child_table_BNK.shape[-1]
        nodes_BK = self.child_table_BNK.gather(1, node_B[:, None, None].expand(-1, 1, width))[:, 0]
        return nodes_BK, torch.where(nodes_BK > 0, self.tokens_BN.gather(1, nodes_BK), NO_TOKEN)

    def longest(self) -> Tensor:
        """Return the length of each row's longest path of candidates."""
        listed_BX = self.child_table_BNK.flatten(1)
        real_BX = self.tokens_BN.gather(1, listed_BX) != NO_TOKEN
        return torch.where(real_BX, self.depths_BN.gather(1, listed_BX), 0).amax(-1)

    def branch(self, node_B: Tensor) -> Tensor:
        """Return which of the root's children a node is, counted from 0; -1 for the root itself."""
        match_BK = self.child_table_BNK[:, 0] == node_B[:, None]
        return torch.where(node_B > 0, match_BK.to(torch.uint8).argmax(-1), -1)

    def draft_law(self, level: int, node_B: Tensor) -> Tensor:
        """Return the law that the children of one node a row were drawn from; `[B, 0]` where there is none."""
        if not self.laws or self.law_rows_BN is None:
            return torch.empty(len(node_B), 0, device=node_B.device)
        laws_BGV = self.laws[level]
        # A row whose walk ended higher up asks along with the others: its answer is not used, but must exist.
        row_B11 = self.law_rows_BN.gather(1, node_B[:, None])[:, :, None].clamp(max=laws_BGV.shape[1] - 1)
        law_BV = laws_BGV.gather(1, row_B11.expand(-1, 1, laws_BGV.shape[-1]))[:, 0]
        return law_BV if self.vocabulary is None else self.vocabulary.spread(law_BV)
