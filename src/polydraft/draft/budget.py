"""One number of nodes for all rows of a round: chains are as deep as each row's draft is sure of itself.

Every row draws a chain of the same depth. Of all rows' nodes together, those that are likeliest to be reached and accepted go
through the target: a confident row has a long chain in that round, a doubtful one a short chain or none.
"""

import torch
from torch import Tensor

_LEAST, _SHARE = 2.0**-20, 0.25
"""Chance of a node below which there is no order; and how likely a child is that the draft gives no chance at all."""


def keep_likeliest(chances_BL: Tensor, working_B: Tensor, count: int) -> Tensor:
    """Return which nodes of all rows' chains to keep, `[K]` in order, as row · N + node for N = 1 + L nodes of a chain.

    Guarantee: whether a row keeps its node at depth i is decided by what was known before that node was drawn, `chances_BL`
    down to i, and by other rows' draws. Deeper nodes of the same row never decide about it, because chances only fall along a
    chain. So what is drawn at a node that is kept has the distribution that verification assumes.

    Parameters
    ----------
    chances_BL : Tensor
        For each level: how likely the draft finds the likeliest child, before it draws one.
    working_B : Tensor
        Rows at work; others keep their roots alone, unless there are more nodes to keep than rows at work have.
    count : int
        Nodes to keep, all roots among them.
    """
    rows, levels = chances_BL.shape
    log_BL = (_SHARE + (1 - _SHARE) * chances_BL.nan_to_num(0.0).clamp(0.0, 1 - _LEAST)).log()
    reached_BL = log_BL.cumsum(1).masked_fill(~working_B[:, None], -torch.inf)
    order_BN = torch.nn.functional.pad(reached_BL, (1, 0), value=torch.inf)
    # Nodes without a chance, and so without an order, stand in their own: parents first.
    best_K = order_BN.flatten().sort(descending=True, stable=True).indices[:count]
    assert rows <= count <= rows * (levels + 1), (rows, count, levels)
    return best_K.sort().values
