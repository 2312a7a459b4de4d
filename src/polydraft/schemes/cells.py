"""The vocabulary cut into cells: tokens of like draft-to-target ratio q/p, largest ratio first, after an empty cell 0.

A cell is what `plan` treats as one token. That is exact whatever the cells are, as long as no token of a later cell has a
larger ratio than one of an earlier cell: independent children that fall into one cell are told apart by the draft law only.
"""

import numpy as np
import torch
from torch import Tensor

from polydraft.schemes.arrays import Array, as_tensor, small

BUCKETS = 4096
"""Costs less than 1e-4 of acceptance, most where target and draft are nearly equal."""


def ranked_cells(target_RV: Tensor, draft_RV: Tensor) -> tuple[Array, int]:
    """Give every ratio a cell of its own, by sorting; return each token's cell and the number of cells."""
    return _dense(draft_RV.double() / target_RV.double())


def bucketed_cells(
    target_RV: Tensor, draft_RV: Tensor, scale_R1: Array | None = None, buckets: int = BUCKETS
) -> tuple[Array, int]:
    """Give ratios that are nearly the same one cell, without sorting: equal steps of p/(p + q). To be called `quietly`.

    Steps of that, and not of the ratio's logarithm, are fine where p and q are alike and leave out no ratio. It is computed as
    1/(1 + q/p), by operations of which each keeps the order even as it rounds; p/(p + q) or a logarithm would not.

    Parameters
    ----------
    target_RV, draft_RV : Tensor
        Weights as they come; 0/0 may land anywhere, it weighs nothing.
    scale_R1 : Array, optional
        What to multiply draft weights by, to compare them with target weights; how well they compare only matters for
        acceptance.
    """
    assert 0 < buckets < 2**15
    if draft_RV.dtype.itemsize < 4:
        draft_RV, target_RV = draft_RV.float(), target_RV.float()
    ratio_RV = small(draft_RV) / small(target_RV)
    # buckets / (1 + q/p) in as few passes as there are.
    ratio_RV *= 1 / buckets if scale_R1 is None else scale_R1 / buckets
    ratio_RV += 1 / buckets
    if isinstance(ratio_RV, np.ndarray):
        bucket_RV = np.reciprocal(ratio_RV, out=ratio_RV).astype(np.int64)
        np.minimum(np.maximum(bucket_RV, 1, out=bucket_RV), buckets, out=bucket_RV)
    else:
        bucket_RV = ratio_RV.reciprocal_().long().clamp_(1, buckets)
    if bucket_RV.shape[1] < buckets:
        return _dense(-as_tensor(bucket_RV))  # most buckets are empty, and emptiness would cost more than a short sort
    return bucket_RV, buckets + 1


def _dense(key_RV: Tensor) -> tuple[Array, int]:
    """Return the rank of each key among the distinct ones of its row, the largest first and numbered 1."""
    sorted_RV, order_RV = key_RV.sort(dim=1, descending=True)
    rank_RV = (sorted_RV[:, 1:] != sorted_RV[:, :-1]).cumsum(-1)
    return small(torch.ones_like(order_RV).scatter_(1, order_RV[:, 1:], rank_RV + 1)), key_RV.shape[1] + 1
