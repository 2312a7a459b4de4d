"""A pair of laws sorted by p/q: sums over all tokens below or above a ratio become look-ups."""

from collections.abc import Callable

import torch
from torch import Tensor

from polydraft.schemes.arithmetic import ratio


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
