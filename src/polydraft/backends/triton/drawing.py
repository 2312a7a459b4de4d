"""From a draft's logits to children in the nodes of a tree, on a GPU: one or two kernels per step.

Torch takes separate kernels to convert, divide and normalise, five small ones to put drawn columns into their nodes, and two
dozen to find the likeliest tokens. Each does next to nothing, but together they take as long as the passes of a small draft.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.backends.triton import LEAST_CHILDREN, kernels_run, power_of_two, runs_on_tensors, side_by_side
from polydraft.draft.static_builder import plant_columns, plant_largest
from polydraft.operations import implements
from polydraft.sampling import PartialVocabulary
from polydraft.sampling.gumbel import perturbed
from polydraft.sampling.row_numbers import RowNumbers
from polydraft.sampling.truncation import largest_kept
from polydraft.sampling.warper import RANKED_NATS, softened

_MOST_AT_ONCE, _SOFTENED = 2**16, 2**13
"""Most columns that one program softens at once, and columns of a part if there are more."""
MOST_CHILDREN = 32
"""Most children of a node for kernels that look for them one by one."""
_RANKED = 2048
_LEAST_KEYS, _KEYS_PER_WARP = 64, 256
_PLANTED = 128
_NOISY, _KEPT = 1024, 4096
"""Columns to which one program adds noise, and of which it looks for the largest that is kept, at a time."""


@implements(softened, "triton", supports=runs_on_tensors)
def _soften(logits_BGV: Tensor, temperature_B: Tensor | None) -> Tensor:
    """Return the softmax of logits over each row's temperature, in float32; a NaN makes its whole node NaN."""
    from polydraft.backends.triton import draw_kernels as kernels

    batch, nodes, columns = logits_BGV.shape
    logits_BGV = side_by_side(logits_BGV)
    probs_BGV = torch.empty(logits_BGV.shape, dtype=torch.float32, device=logits_BGV.device)
    assert temperature_B is None or (temperature_B.numel() == batch and temperature_B.dtype == torch.float32)
    given = logits_BGV, probs_BGV if temperature_B is None else temperature_B.contiguous()
    sizes, tempered = (nodes, columns, *logits_BGV.stride()[:2]), temperature_B is not None
    if columns <= _MOST_AT_ONCE:
        block = power_of_two(columns)
        kernels.soften[(batch * nodes,)](
            *given, probs_BGV, *sizes, TEMPERED=tempered, BLOCK=block, num_warps=min(max(block // 2048, 4), 32)
        )
        return probs_BGV
    parts = -(-columns // _SOFTENED)
    peaks_RM, sums_RM = probs_BGV.new_empty(2, batch * nodes, parts)
    kernels.weigh_parts[batch * nodes, parts](
        *given, peaks_RM, sums_RM, *sizes, TEMPERED=tempered, BLOCK=_SOFTENED, num_warps=8
    )
    kernels.soften_parts[batch * nodes, parts](
        *given, peaks_RM, sums_RM, probs_BGV, *sizes,
        TEMPERED=tempered, BLOCK=_SOFTENED, BLOCK_M=power_of_two(parts), num_warps=8,
    )  # fmt: skip
    return probs_BGV


def _can_plant(logits_BGV: Tensor, nodes_GK: Tensor, *_: object) -> bool:
    return nodes_GK.shape[1] <= MOST_CHILDREN and logits_BGV.dtype != torch.float64 and kernels_run(logits_BGV)


@implements(plant_largest, "triton", supports=_can_plant)
def _plant_largest(
    logits_BGV: Tensor,
    nodes_GK: Tensor,
    tokens_BN: Tensor,
    vocabulary: PartialVocabulary | None,
    vocab_size: int,
) -> None:
    from polydraft.backends.triton import draw_kernels as kernels

    logits_RV = side_by_side(logits_BGV.flatten(0, 1))  # a view of what an output head returns
    (rows, width), (distributions, count) = logits_RV.shape, nodes_GK.shape
    columns = width if vocabulary is not None else min(width, vocab_size)
    parts = -(-columns // _RANKED)
    keys_RX = logits_RV.new_empty(rows, parts * count, dtype=torch.int64)
    kernels.rank_parts[(rows, parts)](logits_RV, keys_RX, columns, count, logits_RV.stride(0), BLOCK=_RANKED)
    keys = power_of_two(parts * count, _LEAST_KEYS)
    kernels.plant_largest[(rows,)](
        keys_RX, nodes_GK, *_written(vocabulary, tokens_BN), distributions, parts, count, tokens_BN.stride(0),
        NATS=RANKED_NATS, PARTIAL=vocabulary is not None, BLOCK_K=power_of_two(count, LEAST_CHILDREN), BLOCK_X=keys,
        num_warps=min(max(keys // _KEYS_PER_WARP, 1), 8),  # a single warp needs no shared memory to find the largest key
    )  # fmt: skip


@implements(plant_columns, "triton", supports=runs_on_tensors)
def _plant_columns(columns_BX: Tensor, nodes_GK: Tensor, tokens_BN: Tensor, vocabulary: PartialVocabulary | None) -> None:
    from polydraft.backends.triton import draw_kernels as kernels

    columns_BX = side_by_side(columns_BX)
    rows, count = columns_BX.shape
    kernels.plant_columns[(rows, -(-count // _PLANTED))](
        columns_BX, nodes_GK, *_written(vocabulary, tokens_BN), count, columns_BX.stride(0), tokens_BN.stride(0),
        PARTIAL=vocabulary is not None, BLOCK=_PLANTED, num_warps=1,
    )  # fmt: skip


def _written(vocabulary: PartialVocabulary | None, tokens_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens of the columns (a dummy if the vocabulary is whole), and the tensor to write to."""
    assert tokens_BN.stride(1) == 1, "a tree's tokens must be adjacent"
    return tokens_BN if vocabulary is None else vocabulary.tokens_D.contiguous(), tokens_BN


@implements(perturbed, "triton", supports=runs_on_tensors)
def _perturbed(scores_BGV: Tensor, keys_B: Tensor, positions_BK: Tensor, scales_B: Tensor, tokens_D: Tensor | None) -> Tensor:
    from polydraft.backends.triton import gumbel_kernels as kernels

    (batch, nodes, columns), places = scores_BGV.shape, positions_BK.shape[1]
    assert places in (1, nodes)
    scores_BGV = side_by_side(scores_BGV)
    noisy_BGV = torch.empty(scores_BGV.shape, dtype=torch.float32, device=scores_BGV.device)
    given = keys_B.contiguous(), positions_BK.contiguous(), scales_B.contiguous()
    kernels.perturb[batch * nodes, -(-columns // _NOISY)](
        scores_BGV, *given, keys_B if tokens_D is None else tokens_D.contiguous(), noisy_BGV,
        columns, nodes, places, *scores_BGV.stride()[:2], PARTIAL=tokens_D is not None, BLOCK=_NOISY, num_warps=4,
    )  # fmt: skip
    return noisy_BGV


def _can_keep(scores_BGV: Tensor, *_: object) -> bool:
    return scores_BGV.dtype != torch.float64 and kernels_run(scores_BGV)


@implements(largest_kept, "triton", supports=_can_keep)
def _largest_kept(
    scores_BGV: Tensor,
    noise: tuple[Tensor, Tensor, Tensor, Tensor | None],
    tempered_BGV: Tensor,
    numbers: RowNumbers,
    most_kept: int,
    cut_rows: Sequence[int],
) -> Tensor:
    from polydraft.backends.triton import truncation_kernels as kernels

    batch, nodes, columns = scores_BGV.shape
    noisy_BGV, tempered_BGV = _perturbed(scores_BGV, *noise), side_by_side(tempered_BGV)
    used = {name.upper(): name in numbers.used for name in ("top_k", "top_p", "min_p")}
    room_BGV = torch.empty_like(noisy_BGV) if used["TOP_K"] else noisy_BGV
    kept_BG = torch.empty((batch, nodes), dtype=torch.long, device=scores_BGV.device)
    kernels.keep_largest[(batch * nodes,)](
        noisy_BGV, tempered_BGV, *(numbers[name] for name in ("top_k", "top_p", "min_p")), room_BGV, kept_BG,
        columns, nodes, *tempered_BGV.stride()[:2], **used, BLOCK=_KEPT, num_warps=16,
    )  # fmt: skip
    return kept_BG
