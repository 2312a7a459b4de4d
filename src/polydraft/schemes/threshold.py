"""The threshold of `hybrid` learnt while decoding.

After verification p and q are known, so the acceptance that any threshold would have had follows, whatever was drawn:
α(m) = P(T_m) + 1 − max(0, max_k (X_k^{n−m} − P_k)) outside the top m. What is chosen for later rounds depends on earlier rounds
only, and any threshold is exact, so tuning never changes the law of the text.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.schemes.arithmetic import largest, ratio
from polydraft.schemes.arrays import as_tensor, quietly, small
from polydraft.schemes.cells import bucketed_cells
from polydraft.schemes.hybrid import certain_of_top

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, float("inf"))
_NOTHING = 1e-12  # what rounding may leave of a law from which all tokens were taken


class ThresholdTuner:
    """Keep the mean acceptance of every candidate threshold, and name the best.

    Parameters
    ----------
    thresholds : sequence of float
        Candidates.
    decay : float
        Weight of everything seen before one more call; 1 forgets nothing.
    """

    def __init__(self, thresholds: Sequence[float] = THRESHOLDS, decay: float = 0.99) -> None:
        if not thresholds or not all(threshold >= 0 for threshold in thresholds):
            raise UsageError(f"thresholds={tuple(thresholds)!r} are out of range; allowed: one or more numbers from 0 up")
        if not 0 < decay <= 1:
            raise UsageError(f"decay={decay!r} is out of range; allowed: above 0 and at most 1")
        self.thresholds, self.decay = tuple(thresholds), decay
        self._score_X: Tensor | None = None
        self._candidate_X: Tensor | None = None

    def observe(self, target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> None:
        """Take note of nodes at which `count` candidates were verified, drawn however; does not wait for the device."""
        value_RK = largest(draft_probs_RV, count)[0]
        total_R1 = draft_probs_RV.double().sum(-1, keepdim=True)
        if self._candidate_X is None:
            self._candidate_X = torch.tensor(self.thresholds, dtype=torch.float64, device=total_R1.device)
        certain_XR1 = as_tensor(certain_of_top(value_RK, small(total_R1), count, self._candidate_X[:, None, None]))
        acceptance_RK = acceptances(target_probs_RV, draft_probs_RV, count)
        score_X = acceptance_RK.expand(len(certain_XR1), -1, -1).gather(2, certain_XR1).sum((1, 2))
        self._score_X = score_X if self._score_X is None else self.decay * self._score_X + score_X

    @property
    def threshold(self) -> Tensor:
        """The best candidate so far, as a number on the device, which `Hybrid` takes as it is."""
        if self._score_X is None or self._candidate_X is None:
            raise UsageError("the tuner has seen nothing yet; call observe(target_probs_RV, draft_probs_RV, count) first")
        return self._candidate_X.gather(0, self._score_X.argmax()[None])[0]


@quietly
def acceptances(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Return the acceptance of `hybrid` with m = 0, 1, ..., count − 1 certain candidates, by buckets, good to 1e-3."""
    target_RV, draft_RV = target_probs_RV.double(), draft_probs_RV.double()
    target_mass_R1, draft_mass_R1 = target_RV.sum(-1, keepdim=True), draft_RV.sum(-1, keepdim=True)
    cells_RV, cells = bucketed_cells(target_probs_RV, draft_probs_RV, small(target_mass_R1 / draft_mass_R1))
    cell_RV = as_tensor(cells_RV)
    target_RC, draft_RC = target_RV.new_zeros(2, len(target_RV), cells)
    target_RC.scatter_add_(1, cell_RV, target_RV / target_mass_R1)
    draft_RC.scatter_add_(1, cell_RV, draft_RV)
    token_RK = as_tensor(largest(draft_probs_RV, count)[1])
    columns, certain_R1 = [], torch.zeros_like(target_mass_R1)
    for rank in range(count):
        rest_R1 = draft_RC.sum(-1, keepdim=True)
        reach_RC = ratio(draft_RC, rest_R1).cumsum(-1)
        excess_RC = reach_RC ** (count - rank) - target_RC.cumsum(-1)
        raced_R1 = 1 - excess_RC.amax(-1, keepdim=True).clamp(min=0)
        columns.append(certain_R1 + torch.where(rest_R1 > _NOTHING * draft_mass_R1, raced_R1, 0.0))
        token_R1 = token_RK[:, min(rank, token_RK.shape[1] - 1)][:, None]
        cell_R1, top_R1 = cell_RV.gather(1, token_R1), target_RV.gather(1, token_R1) / target_mass_R1
        certain_R1 = certain_R1 + top_R1
        target_RC = target_RC.scatter_add(1, cell_R1, -top_R1).clamp_(min=0)
        draft_RC = draft_RC.scatter_add(1, cell_R1, -draft_RV.gather(1, token_R1)).clamp_(min=0)
    return torch.cat(columns, dim=1)
