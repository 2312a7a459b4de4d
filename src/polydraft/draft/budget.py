"""One number of nodes for all rows of a round: each row's chain is as deep as its draft is confident.

All rows draw chains of the same depth. Of all their nodes, the target reads those most likely to be reached and accepted: a
confident row has a long chain in that round, a doubtful one a short chain or none.
"""

import torch
from torch import Tensor

_LEAST, _SHARE = 2.0**-20, 0.25
"""Distance that chances keep from 1, so that they fall along a chain; acceptance of a child that the draft gives no chance."""


def keep_likeliest(chances_BL: Tensor, working_B: Tensor, count: int) -> Tensor:
    """Return which nodes of all rows' chains to keep, `[K]` in ascending order, as row · N + node with N = 1 + L.

    Guarantee: whether a row keeps its node at depth i depends on `chances_BL` down to the node's parent, which are known before
    the node is drawn, and on other rows' draws. Deeper nodes of the same row have no influence, because chances only fall along
    a chain. So a node that is kept was drawn from the distribution that verification assumes.

    Parameters
    ----------
    chances_BL : Tensor
        For each level, the draft's probability of the likeliest child, known before a child is drawn.
    working_B : Tensor
        Running rows. Other rows keep only their roots, unless the running ones cannot use all nodes.
    count : int
        Nodes to keep, including all roots.
    """
    rows, levels = chances_BL.shape
    log_BL = (_SHARE + (1 - _SHARE) * chances_BL.nan_to_num(0.0).clamp(0.0, 1 - _LEAST)).log()
    reached_BL = log_BL.cumsum(1).masked_fill(~working_B[:, None], -torch.inf)
    order_BN = torch.nn.functional.pad(reached_BL, (1, 0), value=torch.inf)
    # The sort is stable, so among equals parents come first.
    best_K = order_BN.flatten().sort(descending=True, stable=True).indices[:count]
    assert rows <= count <= rows * (levels + 1), (rows, count, levels)
    return best_K.sort().values
