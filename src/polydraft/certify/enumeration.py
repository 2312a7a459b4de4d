"""What a rule emits, summed over all that can be drawn: exact, without samples and without false alarms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.errors import FailureError
from polydraft.sampling import NO_TOKEN
from polydraft.schemes import Scheme

TOLERANCE = 1e-9
"""Of enumerations: float64 leaves about 1e-15, the smallest bug of interest (eps = 1e-3) about 1e-4."""


class ImproperDrawingError(FailureError):
    """Children whose law is no law."""


def largest_count(scheme: Scheme | type[Scheme], wanted: int) -> int:
    """Children that may be asked of a scheme."""
    return wanted if scheme.max_children is None else min(wanted, scheme.max_children)


def drawings(scheme: Scheme, draft_probs_CV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Enumerate all drawings of C cases: case_R, children_RK, and the probability of each given its case.

    Breadth first over all cases at once, so that a scheme sees a few large calls.
    """
    case_R = torch.arange(len(draft_probs_CV))
    children_RJ = torch.empty(len(case_R), 0, dtype=torch.long)
    chance_R = torch.ones(len(case_R), dtype=torch.float64)
    for _ in range(count):
        law_RV = scheme.child_law(draft_probs_CV[case_R], children_RJ, count).double()
        _check_drawing(law_RV, children_RJ)
        # A column for "no child" takes the whole mass of zero rows.
        law_RX = torch.cat([law_RV, (law_RV.sum(-1) == 0).double()[:, None]], dim=1)
        row_S, child_S = law_RX.nonzero(as_tuple=True)
        chance_R = chance_R[row_S] * law_RX[row_S, child_S]
        child_S = torch.where(child_S == law_RV.shape[1], NO_TOKEN, child_S)
        children_RJ = torch.cat([children_RJ[row_S], child_S[:, None]], dim=1)
        case_R = case_R[row_S]
    return case_R, children_RJ, chance_R


def _check_drawing(law_RV: Tensor, children_RJ: Tensor) -> None:
    total_R = law_RV.sum(-1)
    if not (law_RV >= 0).all():
        raise ImproperDrawingError("child_law is negative or not a number")
    if not ((total_R == 0) | ((total_R - 1).abs() < TOLERANCE)).all():
        raise ImproperDrawingError("child_law is neither a law nor zero")
    if total_R[(children_RJ == NO_TOKEN).any(-1)].any():
        raise ImproperDrawingError("a child follows a missing one")


@dataclass(frozen=True, eq=False)
class Enumeration:
    """All drawings of some cases, with the emitted token's law for each."""

    target_CV: Tensor
    """What should come out, float64."""
    case_R: Tensor
    children_RK: Tensor
    chance_R: Tensor
    law_RV: Tensor

    @property
    def emitted_CV(self) -> Tensor:
        """The law of the emitted token, over all drawings of a case."""
        return torch.zeros_like(self.target_CV).index_add_(0, self.case_R, self.chance_R[:, None] * self.law_RV)

    @property
    def error_C(self) -> Tensor:
        """Largest error of the emitted law; infinite where it is not a number."""
        return (self.emitted_CV - self.target_CV).abs().amax(-1).nan_to_num(nan=torch.inf)

    @property
    def improper_R(self) -> Tensor:
        """How far a single law is from being one: negative, or not summing to one; infinite where it is not a number.

        Drawings less likely than the tolerance are left out: they may lie below what float64 tells from impossible.
        """
        off_R = torch.maximum((self.law_RV.sum(-1) - 1).abs(), -self.law_RV.amin(-1)).nan_to_num(nan=torch.inf)
        return torch.where(self.chance_R > TOLERANCE, off_R, 0.0)


def enumerate_rule(
    scheme: Scheme, target_probs_CV: Tensor, draft_probs_CV: Tensor, count: int, missing: int = 0
) -> Enumeration:
    """Enumerate all drawings of `count` children; `missing` appends columns without a child, as in a sparse tree."""
    case_R, children_RK, chance_R = drawings(scheme, draft_probs_CV, count)
    children_RK = torch.nn.functional.pad(children_RK, (0, missing), value=NO_TOKEN)
    law_RV = scheme.law(target_probs_CV[case_R], draft_probs_CV[case_R], children_RK)
    expected = (len(case_R), target_probs_CV.shape[1])
    if not isinstance(law_RV, Tensor) or tuple(law_RV.shape) != expected:
        found = tuple(law_RV.shape) if isinstance(law_RV, Tensor) else type(law_RV).__name__
        raise FailureError(f"law has the wrong shape: {found}, allowed: {expected}")
    if law_RV.dtype != torch.float64:
        raise FailureError(f"law is {law_RV.dtype}; allowed: torch.float64, since rounding would hide errors")
    target_CV = target_probs_CV.double() / target_probs_CV.double().sum(-1, keepdim=True)
    return Enumeration(target_CV, case_R, children_RK, chance_R, law_RV)


def enumeration_error(
    scheme: Scheme, target_probs_CV: Tensor, draft_probs_CV: Tensor, count: int, missing: int = 0
) -> tuple[float, float]:
    """Return the largest error over all cases of the emitted token's law, and of single laws in not being laws."""
    enumeration = enumerate_rule(scheme, target_probs_CV, draft_probs_CV, count, missing)
    return enumeration.error_C.max().item(), enumeration.improper_R.max().item()


def enumerated_acceptance(scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int) -> float:
    """Chance that the emitted token is one of the children."""
    enumeration = enumerate_rule(scheme, target_V[None], draft_V[None], count)
    law_RV, children_RK = enumeration.law_RV, enumeration.children_RK
    among_RV = torch.zeros_like(law_RV).scatter_add_(1, children_RK.clamp(min=0), (children_RK != NO_TOKEN).double()) > 0
    return float((enumeration.chance_R[:, None] * law_RV * among_RV).sum())
