"""Writing children into the nodes of a tree on a GPU: those that were drawn in one kernel, the likeliest of a level in two.

Torch's operations take five small kernels to look up drawn columns' tokens and to put these into their nodes, and two dozen to
find the likeliest tokens before: each does next to nothing, and between the passes of a small draft they take as long as these.
"""

import torch
from torch import Tensor

from polydraft.backends.triton import kernels_run, power_of_two, side_by_side
from polydraft.draft.planting import plant_columns, plant_largest
from polydraft.operations import implements
from polydraft.sampling import PartialVocabulary
from polydraft.sampling.warper import RANKED_NATS

MOST_CHILDREN = 32
"""Of one node, for kernels that look for its children one after the other."""
_LEAST_CHILDREN = 4
_BLOCK = 2048
_LEAST_KEYS, _KEYS_PER_WARP = 64, 256
_PLANTED = 128


def _takes_logits(
    logits_BGV: Tensor,
    nodes_GK: Tensor,
    tokens_BN: Tensor,
    vocabulary: PartialVocabulary | None,
    vocab_size: int,
) -> bool:
    return nodes_GK.shape[1] <= MOST_CHILDREN and logits_BGV.dtype != torch.float64 and kernels_run(logits_BGV)


@implements(plant_largest, "triton", supports=_takes_logits)
def _plant_largest(
    logits_BGV: Tensor,
    nodes_GK: Tensor,
    tokens_BN: Tensor,
    vocabulary: PartialVocabulary | None,
    vocab_size: int,
) -> None:
    from polydraft.backends.triton import planting_kernels as kernels

    logits_RV = side_by_side(logits_BGV.flatten(0, 1))  # a view of what an output head returns
    (rows, width), (distributions, count) = logits_RV.shape, nodes_GK.shape
    columns = width if vocabulary is not None else min(width, vocab_size)
    parts = -(-columns // _BLOCK)
    keys_RX = logits_RV.new_empty(rows, parts * count, dtype=torch.int64)
    kernels.rank_parts[(rows, parts)](logits_RV, keys_RX, columns, count, logits_RV.stride(0), BLOCK=_BLOCK)
    keys = power_of_two(parts * count, _LEAST_KEYS)
    kernels.plant_largest[(rows,)](
        keys_RX, nodes_GK, *_written(vocabulary, tokens_BN), distributions, parts, count, tokens_BN.stride(0),
        NATS=RANKED_NATS, PARTIAL=vocabulary is not None, BLOCK_K=power_of_two(count, _LEAST_CHILDREN), BLOCK_X=keys,
        num_warps=min(max(keys // _KEYS_PER_WARP, 1), 8),  # one warp needs no shared memory to find its largest key
    )  # fmt: skip


def _takes_columns(columns_BX: Tensor, nodes_GK: Tensor, tokens_BN: Tensor, vocabulary: PartialVocabulary | None) -> bool:
    return kernels_run(tokens_BN)


@implements(plant_columns, "triton", supports=_takes_columns)
def _plant_columns(columns_BX: Tensor, nodes_GK: Tensor, tokens_BN: Tensor, vocabulary: PartialVocabulary | None) -> None:
    from polydraft.backends.triton import planting_kernels as kernels

    columns_BX = side_by_side(columns_BX)
    rows, count = columns_BX.shape
    kernels.plant_columns[(rows, -(-count // _PLANTED))](
        columns_BX, nodes_GK, *_written(vocabulary, tokens_BN), count, columns_BX.stride(0), tokens_BN.stride(0),
        PARTIAL=vocabulary is not None, BLOCK=_PLANTED, num_warps=1,
    )  # fmt: skip


def _written(vocabulary: PartialVocabulary | None, tokens_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of the columns, anything where all are known, and what is written to."""
    assert tokens_BN.stride(1) == 1, "a tree's tokens lie side by side"
    return tokens_BN if vocabulary is None else vocabulary.tokens_D.contiguous(), tokens_BN
