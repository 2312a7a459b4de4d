"""The border of this room: what counts as a pair of laws, and how many rows are worked on at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.errors import UsageError

SUM_TOLERANCE = 2e-4
"""How far a row may sum from one; a float32 softmax over 256k tokens is off by up to 7e-5. Results are off by as much."""

Rows = Callable[[Tensor, Tensor], Tensor]


def chunk_size(device: torch.device) -> int:
    """How many numbers to work on at once: what a core's cache holds, or what keeps an accelerator busy in a gigabyte."""
    return 2**18 if device.type == "cpu" else 2**24


def check_count(count: int, most: int | None = None) -> None:
    """Refuse a number of drafts that is not a whole number from 1 up to `most`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or (most is not None and count > most):
        allowed = "whole numbers from 1" + ("" if most is None else f" to {most}")
        raise UsageError(f"count is {count!r}; allowed: {allowed}; it is how many drafts a node has")


def check_laws(**laws_RV: Tensor) -> None:
    """Refuse tensors that are not laws over one vocabulary, row by row; the names are used in the message.

    Nothing is renormalised: a row that does not sum to one usually means a forgotten softmax or a truncated vocabulary,
    and its acceptance would be that of another pair.
    """
    shapes = {name: tuple(law_RV.shape) for name, law_RV in laws_RV.items()}
    for name, law_RV in laws_RV.items():
        if law_RV.dim() != 2 or 0 in law_RV.shape or not law_RV.is_floating_point():
            raise UsageError(
                f"{name} has shape {shapes[name]} and dtype {law_RV.dtype}; allowed: floating point, rows by vocabulary; "
                "for a single law pass law[None]"
            )
        if shapes[name] != next(iter(shapes.values())):
            raise UsageError(f"laws differ in shape ({shapes}); pass one row for each position, over one vocabulary")
        if not torch.isfinite(law_RV).all():
            raise UsageError(f"{name} row {_first(~torch.isfinite(law_RV).all(-1))} is not finite; allowed: probabilities")
        if law_RV.min() < 0:
            row = _first((law_RV < 0).any(-1))
            raise UsageError(f"{name} row {row} has a negative entry, {law_RV[row].min():.3g}; allowed: probabilities from 0")
        off_R = (law_RV.sum(-1, dtype=torch.float64) - 1).abs() > SUM_TOLERANCE
        if off_R.any():
            row = _first(off_R)
            raise UsageError(
                f"{name} row {row} sums to {law_RV[row].sum(dtype=torch.float64):.6g}; allowed: 1 within {SUM_TOLERANCE:g}; "
                "apply softmax in float32 or float64"
            )


def by_rows(function: Rows, target_probs_RV: Tensor, draft_probs_RV: Tensor) -> Tensor:
    """Apply a function of float64 laws to a few rows at a time, so that memory does not grow with the rows."""
    rows = max(1, chunk_size(target_probs_RV.device) // target_probs_RV.shape[1])
    pairs = zip(torch.split(target_probs_RV, rows), torch.split(draft_probs_RV, rows), strict=True)
    return torch.cat([function(target_RV.double(), draft_RV.double()) for target_RV, draft_RV in pairs])


def _first(flags_R: Tensor) -> int:
    return int(flags_R.nonzero()[0, 0])
