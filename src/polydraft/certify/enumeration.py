"""One node: distributions to try a rule on, its emitted distribution by enumeration, and samples drawn as in production.

Enumeration is exact: it needs no samples and gives no false alarms.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polydraft.errors import FailureError
from polydraft.sampling import NO_TOKEN
from polydraft.trees import parse_tree
from polydraft.verify import Scheme

TOLERANCE = 1e-9
"""Allowed error of enumerations: float64 rounding is about 1e-15, the smallest bug of interest (eps = 1e-3) about 1e-4."""
FIXTURE_SAMPLES = 20_000
"""Structural errors of a rule need up to 11,500 samples of the fixture."""
# Fixture F: structural errors (WR for WOR, dedup, sorting, wrong residual) show in few samples of it.
FIXTURE_TARGET_V = torch.tensor([0.15, 0.05, 0.24, 0.56], dtype=torch.float64)
FIXTURE_DRAFT_V = torch.tensor([0.06, 0.72, 0.20, 0.02], dtype=torch.float64)

_BARELY = 1e-7
"""A tiny mass; much smaller ones would test the rounding of float64 sums instead of rules."""


class ImproperDrawingError(FailureError):
    """A rule's `child_distribution` is not a distribution."""


def largest_count(scheme: Scheme | type[Scheme], wanted: int) -> int:
    """Return how many children to ask a scheme for: `wanted`, or as many as it can take."""
    return wanted if scheme.max_children is None else min(wanted, scheme.max_children)


def tree_for(scheme: Scheme | type[Scheme], wanted: str) -> str:
    """Return the wanted tree, or a chain of the same depth if the scheme cannot take that many children."""
    limit, topology = scheme.max_children, parse_tree(wanted)
    return wanted if limit is None or topology.max_children <= limit else f"chain:{topology.depth}"


def drawings(scheme: Scheme, draft_probs_CV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Enumerate all drawings of C cases: return case_R, children_RK, and the probability of each given its case.

    Goes breadth first over all cases at once, so that it takes a few large calls of the scheme.
    """
    case_R = torch.arange(len(draft_probs_CV))
    children_RJ = torch.empty(len(case_R), 0, dtype=torch.long)
    chance_R = torch.ones(len(case_R), dtype=torch.float64)
    for _ in range(count):
        distribution_RV = scheme.child_distribution(draft_probs_CV[case_R], children_RJ, count).double()
        _check_drawing(distribution_RV, children_RJ)
        # One more column, for "no child", takes the whole mass of zero rows.
        distribution_RX = torch.cat([distribution_RV, (distribution_RV.sum(-1) == 0).double()[:, None]], dim=1)
        row_S, child_S = distribution_RX.nonzero(as_tuple=True)
        chance_R = chance_R[row_S] * distribution_RX[row_S, child_S]
        child_S = torch.where(child_S == distribution_RV.shape[1], NO_TOKEN, child_S)
        children_RJ = torch.cat([children_RJ[row_S], child_S[:, None]], dim=1)
        case_R = case_R[row_S]
    return case_R, children_RJ, chance_R


def _check_drawing(distribution_RV: Tensor, children_RJ: Tensor) -> None:
    total_R = distribution_RV.sum(-1)
    if not (distribution_RV >= 0).all():
        raise ImproperDrawingError("child_distribution is negative or not a number")
    if not (proper_R := (total_R == 0) | ((total_R - 1).abs() < TOLERANCE)).all():
        worst = float(total_R[~proper_R][0])
        raise ImproperDrawingError(
            f"child_distribution sums to {worst:.10g}, neither 1 within {TOLERANCE:g} nor 0: return float64, and divide by the "
            "sum (polydraft.verify.weights.normalised does both)"
        )
    if total_R[(children_RJ == NO_TOKEN).any(-1)].any():
        raise ImproperDrawingError("a child follows a missing one")


@dataclass(frozen=True, eq=False)
class Enumeration:
    """All drawings of some cases, with the emitted token's distribution for each."""

    target_CV: Tensor
    """The correct distribution of the emitted token, float64."""
    case_R: Tensor
    children_RK: Tensor
    chance_R: Tensor
    distribution_RV: Tensor

    @property
    def emitted_CV(self) -> Tensor:
        """The distribution of the emitted token, over all drawings of a case."""
        return torch.zeros_like(self.target_CV).index_add_(0, self.case_R, self.chance_R[:, None] * self.distribution_RV)

    @property
    def error_C(self) -> Tensor:
        """Largest error of each case's emitted distribution; infinite if it is not a number."""
        return (self.emitted_CV - self.target_CV).abs().amax(-1).nan_to_num(nan=torch.inf)

    @property
    def improper_R(self) -> Tensor:
        """How far each distribution is from being one, by its sum or a negative entry; infinite if it is not a number.

        Drawings less likely than the tolerance count as 0: float64 may not distinguish them from impossible ones.
        """
        off_R = torch.maximum((self.distribution_RV.sum(-1) - 1).abs(), -self.distribution_RV.amin(-1)).nan_to_num(
            nan=torch.inf
        )
        return torch.where(self.chance_R > TOLERANCE, off_R, 0.0)


def enumerate_rule(
    scheme: Scheme, target_probs_CV: Tensor, draft_probs_CV: Tensor, count: int, missing: int = 0
) -> Enumeration:
    """Enumerate all drawings of `count` children; `missing` adds columns without children, as in a sparse tree."""
    case_R, children_RK, chance_R = drawings(scheme, draft_probs_CV, count)
    children_RK = torch.nn.functional.pad(children_RK, (0, missing), value=NO_TOKEN)
    distribution_RV = scheme.distribution(target_probs_CV[case_R], draft_probs_CV[case_R], children_RK)
    expected = (len(case_R), target_probs_CV.shape[1])
    if not isinstance(distribution_RV, Tensor) or tuple(distribution_RV.shape) != expected:
        found = tuple(distribution_RV.shape) if isinstance(distribution_RV, Tensor) else type(distribution_RV).__name__
        raise FailureError(f"distribution has the wrong shape: {found}, allowed: {expected}")
    if distribution_RV.dtype != torch.float64:
        raise FailureError(f"distribution is {distribution_RV.dtype}; allowed: torch.float64, since rounding would hide errors")
    target_CV = target_probs_CV.double() / target_probs_CV.double().sum(-1, keepdim=True)
    return Enumeration(target_CV, case_R, children_RK, chance_R, distribution_RV)


def sample_node(
    scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int, seed: int, samples: int = FIXTURE_SAMPLES
) -> tuple[Tensor, Tensor]:
    """Draw children_RK and verify them, many times, as in production; return children_RK and the emitted token_R."""
    generator = torch.Generator().manual_seed(seed)
    uniforms_RU = torch.rand(samples, count + scheme.verify_uniforms, generator=generator, dtype=torch.float64)
    draft_RV = draft_V.float().repeat(samples, 1)
    children_RK = scheme.draw(draft_RV, uniforms_RU[:, :count])
    token_R = scheme.verify(target_V.float().repeat(samples, 1), draft_RV, children_RK, uniforms_RU[:, count:])
    return children_RK, token_R


def random_cases(vocabulary: int, cases: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return target and draft distributions [C, V]: smooth, peaked, with zeros and one-hot; every tenth pair is equal."""
    random = np.random.default_rng(seed)

    def distribution() -> NDArray[Any]:
        kind = random.integers(4)
        if kind == 3:
            one_hot: NDArray[Any] = np.eye(vocabulary)[random.integers(vocabulary)]
            return one_hot
        weights: NDArray[Any] = random.dirichlet(np.full(vocabulary, 0.3 if kind == 1 else 1.0))
        if kind == 2:
            weights[random.random(vocabulary) < 0.4] = 0
            weights[random.integers(vocabulary)] += 0.1
        weights /= weights.sum()
        return weights

    pairs = [(distribution(), distribution()) for _ in range(cases)]
    pairs = [(draft if index % 10 == 0 else target, draft) for index, (target, draft) in enumerate(pairs)]
    targets, drafts = zip(*pairs, strict=True)
    return torch.tensor(np.array(targets)), torch.tensor(np.array(drafts))


def degenerate_cases(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return all pairs of awkward distributions [C, V]: one-hot, equal, disjoint, with tiny masses, nearly equal."""
    ranks_V = torch.arange(vocabulary, dtype=torch.float64)
    weights = [
        ranks_V == 0,
        ranks_V == vocabulary - 1,
        torch.ones(vocabulary),
        ranks_V < (vocabulary + 1) // 2,
        ranks_V >= vocabulary // 2,
        ranks_V + 1,
        torch.where(ranks_V == 0, 1.0, _BARELY),
        torch.where(ranks_V == 0, _BARELY, 1.0),
        1 + 1e-10 * ranks_V,
    ]
    distributions_XV = torch.stack([weight_V.double() / weight_V.double().sum() for weight_V in weights])
    return distributions_XV.repeat_interleave(len(distributions_XV), 0), distributions_XV.repeat(len(distributions_XV), 1)


def round_cases(vocabulary: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return all pairs of target and draft distributions [C, V] whose probabilities are multiples of 1/`parts`."""
    bars_XB = torch.tensor(list(combinations(range(parts + vocabulary - 1), vocabulary - 1))).reshape(-1, vocabulary - 1)
    edges_XB = torch.nn.functional.pad(torch.nn.functional.pad(bars_XB, (1, 0), value=-1), (0, 1), value=parts + vocabulary - 1)
    distributions_XV = (edges_XB.diff(dim=1) - 1).double() / parts
    return distributions_XV.repeat_interleave(len(distributions_XV), 0), distributions_XV.repeat(len(distributions_XV), 1)
