"""Cases of drawing and verification."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polydraft.sampling import PartialVocabulary
from polydraft.trees import DraftTree
from polydraft.verify import BlockWalk, Hybrid, RaceBucketed, Scheme, Verdict
from polydraft.verify.walk import TargetDistribution
from verify.drawn_trees import distribution_of, drawn_trees
from verify.follow_cases import awkward_logits, emitted, root_of, trees

from .harness import Case, cases, equal


def same_verdicts(one: Verdict, other: Verdict, tolerance: float) -> None:
    """Compare what of two verdicts anybody reads."""
    valid_BD = torch.arange(one.tokens_BD.shape[1], device=one.tokens_BD.device) <= one.accepted_B[:, None]
    equal(one.accepted_B, other.accepted_B, 0)
    sound_B = one.fault_B == 0
    one, other = (dataclasses.replace(found, tokens_BD=(found.tokens_BD * valid_BD)[sound_B]) for found in (one, other))
    equal(one, other, tolerance)


BUCKETS, VOCABULARY = 12, 60
KNOWN = PartialVocabulary(torch.arange(3, VOCABULARY, 2), VOCABULARY)
COMPILED = {"hybrid": Hybrid(buckets=BUCKETS), "hybrid:0": Hybrid(0.0, BUCKETS), "race": RaceBucketed(BUCKETS)}


def widened(
    scheme: Scheme, draft: DraftTree, target_distribution: TargetDistribution, uniforms_BU: Tensor, least_weight: float
) -> tuple[Any, ...]:
    """Return the arguments in float64, as the compiled code computes: cells of float32 ratios may be other cells."""
    wide = dataclasses.replace(draft, distributions=tuple(distribution.double() for distribution in draft.distributions))
    return scheme, wide, target_distribution, uniforms_BU, least_weight


@cases("verify_block")
def _() -> Iterator[Case]:
    def drawn(scheme: Scheme, vocabulary: PartialVocabulary | None, seed: int, device: str) -> tuple[Any, ...]:
        tree, rows = [("4", 1), ("2x2x1", 1), ("3x2", 3), ("1x1x1x1", 2), ("4x2x2x1x1", 1)][seed % 5]
        draft, target_BNV, uniforms_BU = drawn_trees(seed, scheme, tree, vocabulary, rows, VOCABULARY)
        return scheme, draft, distribution_of(target_BNV), uniforms_BU, BlockWalk().least_weight

    in_c = {"compare": same_verdicts, "for_reference": widened, "backends": ("native",)}
    for name, scheme in COMPILED.items():
        for known, vocabulary in {"whole": None, "partial": KNOWN}.items():
            for seed in range(20):
                yield Case(f"{name}, {known}, {seed}", partial(drawn, scheme, vocabulary, seed), slow=seed >= 8, **in_c)


@cases("follow_tokens")
def _() -> Iterator[Case]:
    def followed(number: int, device: str) -> tuple[Any, ...]:
        draft = trees(device)[number]
        return draft, emitted(draft, number)

    quick = {2, 4, 9, 11, 17}
    for number in range(len(trees())):
        yield Case(f"tree {number}", partial(followed, number), slow=number not in quick)


@cases("follow_largest")
def _() -> Iterator[Case]:
    def roots(size: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        logits_RV = awkward_logits(size, dtype, device)
        return root_of(len(logits_RV), device), logits_RV[:, None]

    def wider(device: str) -> tuple[Any, ...]:
        draft = trees(device)[0]
        logits = torch.randn(*draft.tokens_BN.shape, 60, generator=torch.Generator().manual_seed(0))[..., 5:50]
        return draft, logits.to(device)

    for size, dtype in ((40, torch.float16), (4096, torch.bfloat16), (9000, torch.float32)):
        yield Case(f"{size} logits", partial(roots, size, dtype), slow=size == 4096)
    yield Case("part of wider ones", wider)

    def followed(number: int, device: str) -> tuple[Any, ...]:
        draft = trees(device)[number]
        tokens_BN1 = emitted(draft, number)[..., None]
        logits_BNV = torch.zeros(*draft.tokens_BN.shape, int(draft.tokens_BN.max()) + 2, device=device)
        logits_BNV.scatter_(2, tokens_BN1.clamp(min=0), 1.0)
        return draft, logits_BNV.where(tokens_BN1 >= 0, -torch.inf)

    for number in (2, 9, 17):
        yield Case(f"tree {number}", partial(followed, number), slow=number == 2)


@cases("largest")
def _() -> Iterator[Case]:
    def weights(size: int, count: int, broken: bool, device: str) -> tuple[Any, ...]:
        # Distinct numbers: of equal ones the reference may name any.
        order_RV = torch.stack([torch.randperm(size, generator=torch.Generator().manual_seed(row)) for row in range(4)])
        weights_RV = order_RV.float()
        if broken:
            weights_RV[2, size // 2] = torch.nan
        return weights_RV.to(device), count

    for size, count in ((1, 1), (5, 5), (5, 9), (64, 3), (65, 64), (1000, 16), (16384, 33)):
        yield Case(f"{count} of {size}", partial(weights, size, count, False))
    yield Case("not a number", partial(weights, 100, 3, True))
