"""Two trees of candidates under one root: one whose children were drawn by a scheme, one whose tokens are known for certain."""

from dataclasses import replace

import torch
from torch import Tensor

from polydraft.trees.draft import DraftTree


def union(drawn: DraftTree, certain: DraftTree) -> DraftTree:
    """Hang the nodes of `certain` below the root of `drawn`, as further children.

    A path of tokens that both trees hold has a node in each. Both nodes stand for the same text, so whatever follows in
    `certain` is a further child of the node in `drawn` too, its *twin*: a walk that is on a drawn path loses nothing.

    Guarantee: a scheme emits a token of the target's law at a node, whatever it drew there. Further children do not depend
    on the random numbers of the round, and only let the walk go on after that token; each step stays exact given the path.

    Parameters
    ----------
    drawn : DraftTree
        Nodes keep their numbers.
    certain : DraftTree
        Has the same root, and all the riders. Node n > 0 becomes node `drawn nodes + n - 1`.

    Returns
    -------
    DraftTree
        Drawn children are those of `drawn`; `extra_table_BNK` holds the others.
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
    # One row more, without children, stands for "no twin".
    twins_BN = _twins(drawn, certain)
    inherited_BNK = torch.nn.functional.pad(moved_BNK, (0, 0, 0, 1)).gather(1, twins_BN[:, :, None].expand(-1, -1, width))
    law_rows_BN = drawn.law_rows_BN
    return replace(
        drawn,
        tokens_BN=tokens_BN,
        depths_BN=depths_BN,
        ancestors_BNN=ancestors_BNN,
        child_table_BNK=torch.nn.functional.pad(drawn.child_table_BNK, (0, 0, 0, added)),
        depth=max(drawn.depth, certain.depth),
        law_rows_BN=None if law_rows_BN is None else torch.nn.functional.pad(law_rows_BN, (0, added)),
        reach=None if certain.reach is None else max(drawn.depth, certain.reach),
        riders=certain.riders,
        extra_table_BNK=torch.cat([inherited_BNK, moved_BNK[:, 1:]], dim=1),
    )


def _twins(drawn: DraftTree, certain: DraftTree) -> Tensor:
    """Return for each node of `drawn` the node of `certain` on the same path of tokens; as many as it has nodes for none."""
    none = certain.tokens_BN.shape[1]
    batch_size, own, width = drawn.child_table_BNK.shape
    nodes_BX = torch.arange(own, device=drawn.tokens_BN.device).repeat_interleave(width).expand(batch_size, -1)
    parents_BN = torch.zeros_like(drawn.tokens_BN).scatter_(1, drawn.child_table_BNK.flatten(1), nodes_BX)
    parents_BN[:, 0] = 0  # missing children all name the root
    tables_BNK = torch.nn.functional.pad(certain.child_table_BNK, (0, 0, 0, 1))
    twins_BN = torch.full_like(drawn.tokens_BN, none)
    twins_BN[:, 0] = 0
    for _ in range(min(drawn.depth, certain.depth)):
        above_BN = twins_BN.gather(1, parents_BN)
        children_BNK = tables_BNK.gather(1, above_BN[:, :, None].expand(-1, -1, tables_BNK.shape[2]))
        tokens_BNK = certain.tokens_BN.gather(1, children_BNK.flatten(1)).view_as(children_BNK)
        same_BNK = (children_BNK > 0) & (tokens_BNK == drawn.tokens_BN[:, :, None])
        child_BN = children_BNK.gather(2, same_BNK.to(torch.uint8).argmax(-1, keepdim=True))[..., 0]
        twins_BN = torch.where(same_BNK.any(-1), child_BN, none)
        twins_BN[:, 0] = 0
    return twins_BN
