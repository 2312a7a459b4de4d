"""Pairs of distributions: what is accepted as one, formulas a few rows at a time, and look-ups after a sort by p/q."""

from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.errors import UsageError
from polydraft.schemes.arithmetic import ratio

SUM_TOLERANCE = 2e-4
"""How far a row may sum from one; a float32 softmax over 256k tokens is off by up to 7e-5. Results are off by as much."""

Formula = Callable[[Tensor, Tensor, int], Tensor]
"""Target and draft probabilities and the number of drafts, to one value (or several) per row."""


def chunk_size(device: torch.device) -> int:
    """How many numbers to work on at once: what a core's cache holds, or what keeps an accelerator busy in a gigabyte."""
    return 2**18 if device.type == "cpu" else 2**24


def check_count(count: int, most: int | None = None) -> None:
    """Refuse a number of drafts that is not a whole number from 1 up to `most`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or (most is not None and count > most):
        allowed = "whole numbers from 1" + ("" if most is None else f" to {most}")
        raise UsageError(f"count is {count!r}; allowed: {allowed}; it is the number of drafts per node")


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
                "for a single distribution pass probs[None]"
            )
        if shapes[name] != next(iter(shapes.values())):
            raise UsageError(f"distributions differ in shape ({shapes}); pass one row per position, over one vocabulary")
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


def check_pair(target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int, most: int | None = None) -> None:
    """Refuse what is not a target's and a draft's probabilities and a number of drafts."""
    check_laws(target_probs_RV=target_probs_RV, draft_probs_RV=draft_probs_RV)
    check_count(count, most)


def by_rows(formula: Formula, target_probs_RV: Tensor, draft_probs_RV: Tensor, count: int) -> Tensor:
    """Apply a formula to a few rows at a time, in float64, so that memory does not grow with the rows."""
    rows = max(1, chunk_size(target_probs_RV.device) // target_probs_RV.shape[1])
    pairs = zip(torch.split(target_probs_RV, rows), torch.split(draft_probs_RV, rows), strict=True)
    return torch.cat([formula(target_RV.double(), draft_RV.double(), count) for target_RV, draft_RV in pairs])


class SortedPair:
    """Laws in ascending order of p/q, with running sums; places below are places in that order.

    The n likeliest draft tokens are kept out of the running sums from the front and counted one by one: where the draft is
    sure of few tokens, the others' mass would have no digits left beside theirs, and it is the others that decide once the
    few are drawn. Axis X: any number of drawings of each row; K: the likeliest tokens; J: the tokens drawn so far.
    """

    def __init__(self, target_RV: Tensor, draft_RV: Tensor, count: int) -> None:
        ratio_RV = torch.where(draft_RV > 0, ratio(target_RV, draft_RV), torch.inf)
        self.ratio_RV, order_RV = ratio_RV.sort(-1)
        self.target_RV, self.draft_RV = target_RV.gather(1, order_RV), draft_RV.gather(1, order_RV)
        self.top_RK = self.draft_RV.topk(min(count, draft_RV.shape[1]), dim=1).indices
        self.target_tails_RX, self.draft_tails_RX = _tails(self.target_RV), _tails(self.draft_RV)
        self.target_sums_RX, self.draft_sums_RX = self._sums(self.target_RV), self._sums(self.draft_RV)

    def _sums(self, law_RV: Tensor) -> Tensor:
        """Return the sums of the first 0 to V tokens, the likeliest left out."""
        return torch.nn.functional.pad(law_RV.scatter(1, self.top_RK, 0.0).cumsum(-1), (1, 0))

    def above(self, scale_RX: Tensor) -> Tensor:
        """Σ(p − λq)₊."""
        place_RX = self.places(scale_RX)
        return (self.target_tails_RX.gather(1, place_RX) - scale_RX * self.draft_tails_RX.gather(1, place_RX)).clamp_(min=0)

    def places(self, scale_RX: Tensor) -> Tensor:
        """How many tokens have p/q up to λ."""
        return torch.searchsorted(self.ratio_RV, scale_RX, right=True)

    def drawn(self, drawn_RXJ: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each of the likeliest tokens was drawn, and whether each drawn token is none of them."""
        same_RXJK = drawn_RXJ[:, :, :, None] == self.top_RK[:, None, None, :]
        return same_RXJK.any(-2), ~same_RXJK.any(-1)

    def left(self, drawn_RXJ: Tensor) -> Tensor:
        """Draft mass of the tokens not yet drawn; what is subtracted is never more than the likeliest still hold."""
        gone_RXK, other_RXJ = self.drawn(drawn_RXJ)
        top_RX = torch.where(gone_RXK, 0.0, pick(self.draft_RV, self.top_RK)[:, None]).sum(-1)
        taken_RX = torch.where(other_RXJ, pick(self.draft_RV, drawn_RXJ), 0.0).sum(-1)
        return top_RX + (self.draft_sums_RX[:, -1:] - taken_RX).clamp_(min=0)

    def locate(self, weight: Callable[[Tensor], Tensor], end_RX: Tensor, uniforms_RX: Tensor) -> Tensor:
        """Draw a place before `end_RX`, where `weight` gives the summed weight of the tokens before a place.

        A bisection, because the weights differ from drawing to drawing while their sums are look-ups.
        """
        mark_RX = uniforms_RX * weight(end_RX)
        low_RX, high_RX = torch.zeros_like(end_RX), end_RX
        for _ in range(self.draft_RV.shape[1].bit_length()):
            middle_RX = (low_RX + high_RX) // 2
            beyond_RX = weight(middle_RX) > mark_RX
            low_RX, high_RX = torch.where(beyond_RX, low_RX, middle_RX), torch.where(beyond_RX, middle_RX, high_RX)
        return low_RX.clamp(max=self.draft_RV.shape[1] - 1)


def pick(values_RV: Tensor, places: Tensor) -> Tensor:
    """Look up places of any shape, rows first."""
    return values_RV.gather(1, places.flatten(1)).view(places.shape)


def _tails(law_RV: Tensor) -> Tensor:
    """Return the sums of the last V to 0 tokens."""
    return torch.nn.functional.pad(law_RV.flip(-1).cumsum(-1).flip(-1), (0, 1))


def _first(flags_R: Tensor) -> int:
    return int(flags_R.nonzero()[0, 0])
