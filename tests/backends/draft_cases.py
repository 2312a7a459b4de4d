"""Cases of planting children and of growing dynamic trees."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polydraft.draft import DistributionSource
from polydraft.draft.builder import DraftDistributions
from polydraft.draft.growth import Grown, Passes
from polydraft.draft.shaped_builder import FixedBuilder, ranking_params
from polydraft.sampling import NO_TOKEN, PartialVocabulary, RowParams, SamplingParams
from polydraft.sampling.params import CoupledParams
from polydraft.trees import Block, DynamicShape

from .harness import Case, cases, equal

SIZE, COLUMNS, ROWS = 90, 40, 2


def partial_vocabulary(device: str) -> PartialVocabulary:
    known_D = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))[:COLUMNS].sort().values
    return PartialVocabulary(known_D.to(device), SIZE)


def random_logits(*size: int, device: str) -> Tensor:
    """Return logits without ties: kernels take the first of equals, torch leaves that open."""
    return (4 * torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))).to(device)


NODES_GK = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
"""Children of three nodes; 0 for none."""


def planted(device: str) -> Tensor:
    return torch.full((ROWS, 7), NO_TOKEN, device=device).index_fill_(1, torch.tensor([0], device=device), 9)


@cases("plant_columns")
def _() -> Iterator[Case]:
    def columns(known: bool, device: str) -> tuple[Any, ...]:
        columns_BX = torch.arange(ROWS * NODES_GK.numel(), device=device).view(ROWS, -1) % COLUMNS
        columns_BX[0, 1] = NO_TOKEN
        return columns_BX, NODES_GK.to(device), planted(device), partial_vocabulary(device) if known else None

    for known in (False, True):
        yield Case("part of the tokens" if known else "all tokens", partial(columns, known))


@cases("plant_largest")
def _() -> Iterator[Case]:
    def logits(known: bool, columns: int, device: str) -> tuple[Any, ...]:
        logits_BGV = random_logits(ROWS, len(NODES_GK), columns, device=device)
        logits_BGV[0, 1, 5:] = -torch.inf
        vocabulary = partial_vocabulary(device) if known else None
        return logits_BGV, NODES_GK.to(device), planted(device), vocabulary, SIZE

    yield Case("part of the tokens", partial(logits, True, COLUMNS))
    yield Case("padded columns", partial(logits, False, SIZE + 6))


def same_trees(found: Grown, expected: Grown, tolerance: float) -> None:
    """Compare trees and the places of their nodes; where a node is missing, its tables may hold anything."""
    equal(found.draft.tokens_BN, expected.draft.tokens_BN, 0)
    equal(found.draft.child_table_BNK, expected.draft.child_table_BNK, 0)
    equal(found.draft.depths_BN, expected.draft.depths_BN, 0)
    inner_BN = (expected.draft.child_table_BNK > 0).any(-1)
    equal(found.places_BN[inner_BN], expected.places_BN[inner_BN], 0)


@cases("grow_likeliest")
def _() -> Iterator[Case]:
    greedy = SamplingParams(temperature=0)
    noisy = CoupledParams(temperature=0.8, top_p=0.9, key=5)

    def levels(shape: DynamicShape, known: bool, lead: int, first_row: SamplingParams, device: str) -> tuple[Any, ...]:
        vocabulary = partial_vocabulary(device) if known else None
        source = DistributionSource(torch.device(device), vocabulary)
        source.lead = lead
        params = RowParams((first_row, *[greedy] * (ROWS - 1)))
        builder = FixedBuilder(source, shape, params, SIZE)
        distributions = DraftDistributions(source, ranking_params(params, None), SIZE)
        distributions.begin([[1]] * ROWS, range(ROWS), ranking_params(params, None))
        given = iter([random_logits(ROWS, shape.beam, COLUMNS if known else SIZE, device=device) for _ in range(shape.depth)])
        root_B1V = next(given)[:, :1]

        def expand(tokens_BW: Tensor, parents_BW: Tensor, block: Block) -> Tensor:
            return next(given)[:, : tokens_BW.shape[1]]

        return shape, Passes(lead, builder.places), distributions, torch.tensor([3, 4], device=device), root_B1V, expand

    small, large = DynamicShape(nodes=8, depth=3), DynamicShape(nodes=24, depth=4)
    yield Case("part of the tokens", partial(levels, small, True, 0, greedy), compare=same_trees)
    yield Case("noise", partial(levels, small, True, 0, noisy), compare=same_trees)
    yield Case("places before the root", partial(levels, small, False, 2, greedy), compare=same_trees, slow=True)
    yield Case("larger", partial(levels, large, True, 0, greedy), compare=same_trees, slow=True)
    yield Case("larger, noise", partial(levels, large, False, 0, noisy), compare=same_trees, slow=True)
