"""Sequential drawing without replacement: exact sums over all drawings, as one integral over time.

Let token i arrive at an exponential time of rate q(i). The first n arrivals, in order, are a drawing without replacement. So
the drawing stays inside a set H if n tokens of H arrive before the first token outside, and token i is drawn if fewer than n
others arrive before it. Given the time t, arrivals are independent, and the distribution of their number has the coefficients
of ∏ (e^{−q(i)t} + (1 − e^{−q(i)t}) x). What remains is an integral over t.

The likeliest n − 1 tokens are handled separately. Let s be the mass of the others. Only times up to a few dozen / s matter, and
there the odds e^{q(i)t} − 1 of a single arrival stay below e^{s t}. So nothing overflows even if s is 1e-40 (a draft at low
temperature), and nothing cancels, because all terms are positive.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_COUNT = 64
"""Most drafts: time grows with their square, and with more than about 200 the odds would overflow."""

_LOWEST = -3.3
"""Lower end of the integral over u: exp(u − exp(−u)) is 5e-14 there, and no more of a probability density is cut off."""


def escape_chances(draft_RV: Tensor, count: int) -> Tensor:
    """Return the chance that `count` distinct draws do not all fall among the first k tokens, for each k from 1 to V.

    Parameters
    ----------
    draft_RV : Tensor
        Distributions as float64, sorted in the order that defines the prefixes.

    Notes
    -----
    1 − Q_k = s_k ∫ e^{−t} Σ_{j<n} e_j({e^{q(i)t} − 1}_{i≤k}) dt, where s_k is the mass behind k and e_j the elementary
    symmetric sums, here j-fold running sums. There are closed forms for n = 1 (s_k) and n = 2 (s_k (1 + Σ_{i≤k} q(i)/(1 −
    q(i)))). With a support of n or fewer tokens, every token is drawn, so only the whole support contains a drawing.
    """
    total_R1 = draft_RV.sum(-1, keepdim=True)
    behind_RV = mass_behind(draft_RV)
    if count == 1:
        return behind_RV / total_R1
    if count == 2:
        seconds_RV = (draft_RV / _others(draft_RV)).cumsum(-1)
        escape_RV = torch.where(behind_RV > 0, behind_RV * (1 + seconds_RV), 0.0) / total_R1
    else:
        escape_RV = behind_RV * _prefix_integral(draft_RV, count)
    drawn_whole_R1 = (draft_RV > 0).sum(-1, keepdim=True) <= count
    return torch.where(drawn_whole_R1, (behind_RV > 0).double(), escape_RV.clamp(0, 1))


def inclusion(weight_RV: Tensor, draft_RV: Tensor, count: int) -> Tensor:
    """Return the expected weight of the drawn tokens: Σ_i w(i) P(i is among `count` distinct draws).

    Notes
    -----
    P(i drawn) = ∫ q(i) e^{−q(i)t} P(fewer than n others by t) dt. Leaving out each token in turn would cost V² or cancel;
    instead, each coefficient carries its derivative with respect to adding w(i) q(i) e^{−q(i)t} to every factor.
    """
    drawn_whole_R = (draft_RV > 0).sum(-1) <= count
    whole_R = torch.where(draft_RV > 0, weight_RV, 0.0).sum(-1)
    if count == 1:
        return torch.where(drawn_whole_R, whole_R, (weight_RV * draft_RV).sum(-1) / draft_RV.sum(-1))
    race = _Race.of(draft_RV, count)
    gain_RV = weight_RV * draft_RV
    light_gain_RV = gain_RV.scatter(1, race.heavy_RX, 0.0)
    heavy_gain_RX = gain_RV.gather(1, race.heavy_RX)
    first_RV = light_gain_RV.cumsum(-1)
    sum_R = torch.zeros_like(whole_R)
    for step in range(race.steps):
        time_R1, weight_R1 = race.times_RX[:, step, None], race.weights_RX[:, step, None]
        stay_RX = torch.exp(-race.heavy_draft_RX * time_R1)
        heavy_RK, heavy_gain_RK = _heavy_coefficients(stay_RX, heavy_gain_RX * stay_RX, count)
        odds_RV = race.odds(step)
        sums_RV: Tensor | None = None
        gains_RV = first_RV
        value_R1 = gains_RV[:, -1:] * heavy_RK[:, count - 1 :] + heavy_gain_RK[:, count - 1 :]
        for order in range(1, count):
            before_RV = torch.ones_like(odds_RV) if sums_RV is None else _shifted(sums_RV)
            sums_RV = (odds_RV * before_RV).cumsum(-1)
            gains_RV = (odds_RV * _shifted(gains_RV) + light_gain_RV * _shifted(sums_RV)).cumsum(-1)
            rank = count - 1 - order
            value_R1 = value_R1 + gains_RV[:, -1:] * heavy_RK[:, rank : rank + 1]
            value_R1 = value_R1 + sums_RV[:, -1:] * heavy_gain_RK[:, rank : rank + 1]
        sum_R = sum_R + (weight_R1 * value_R1)[:, 0]
    return torch.where(drawn_whole_R, whole_R, sum_R)


@dataclass(frozen=True, eq=False)
class _Race:
    """The likeliest n − 1 ("heavy") tokens, the other ("light") ones, and the times at which the integrand is evaluated."""

    heavy_RX: Tensor
    """Places of the heavy tokens, in ascending order."""
    heavy_draft_RX: Tensor
    light_RV: Tensor
    """The distribution with zeros at those places."""
    order_RV: Tensor
    """Places of the light tokens, likeliest first."""
    times_RX: Tensor
    weights_RX: Tensor
    """Quadrature weights, multiplied by e^{−s t} of the light tokens."""
    expected: list[float]
    """For each time, the largest s t of any row: the expected number of light arrivals."""

    @property
    def steps(self) -> int:
        """Number of times."""
        return len(self.expected)

    def odds(self, step: int) -> Tensor:
        """Return e^{q(i)t} − 1 of the light tokens: by a short series, except for the few with q(i)t above a limit."""
        limit = 0.01  # where the first term left out of the series is 2e-16 of the sum
        rate_RV = self.light_RV * self.times_RX[:, step, None]
        odds_RV = rate_RV * (1 / 6) + 1
        for divisor in (5, 4, 3, 2):
            odds_RV.mul_(rate_RV).mul_(1 / divisor).add_(1)
        odds_RV.mul_(rate_RV)
        few = min(int(self.expected[step] / limit) + 1, rate_RV.shape[1])  # rates sum to `expected` at most
        places_RX = self.order_RV[:, :few]
        return odds_RV.scatter_(1, places_RX, torch.expm1(rate_RV.gather(1, places_RX)))

    @classmethod
    def of(cls, draft_RV: Tensor, count: int) -> "_Race":
        """Split the distribution and lay out the grid.

        After the substitution t = exp(u − exp(−u)) the integrand falls off doubly exponentially at both ends, so that equal
        steps in u converge exponentially. Steps are at most 0.6/√n, because the n-th arrival is a step of width 1/√n in log t.
        """
        heavy_RX = draft_RV.topk(min(count - 1, draft_RV.shape[1]), dim=1).indices.sort(-1).values
        light_RV = draft_RV.scatter(1, heavy_RX, 0.0)
        mass_R1 = light_RV.sum(-1, keepdim=True)
        mass_R1 = torch.where(mass_R1 > 0, mass_R1, 1.0)  # support below n: the caller does not use the result
        last_R1 = torch.log((45 + 3 * count) / mass_R1)
        widest = min(0.25, 0.6 / math.sqrt(count))
        steps = int((last_R1.max().item() - _LOWEST) / widest) + 2
        width_R1 = (last_R1 - _LOWEST) / (steps - 1)
        place_RX = _LOWEST + width_R1 * torch.arange(steps, dtype=torch.float64, device=draft_RV.device)
        times_RX = torch.exp(place_RX - torch.exp(-place_RX))
        weights_RX = width_R1 * times_RX * (1 + torch.exp(-place_RX)) * torch.exp(-mass_R1 * times_RX)
        order_RV = light_RV.argsort(dim=-1, descending=True)
        expected = (mass_R1 * times_RX).amax(0).tolist()
        return cls(heavy_RX, draft_RV.gather(1, heavy_RX), light_RV, order_RV, times_RX, weights_RX, expected)


def _prefix_integral(draft_RV: Tensor, count: int) -> Tensor:
    """Return ∫ e^{−t} Σ_{j<n} e_j dt for every prefix: light tokens by running sums, heavy ones by a small table."""
    race = _Race.of(draft_RV, count)
    arrived_RV = torch.zeros_like(draft_RV, dtype=torch.long).scatter_(1, race.heavy_RX, 1).cumsum(-1)
    integral_RV = torch.zeros_like(draft_RV)
    for step in range(race.steps):
        time_R1, weight_R1 = race.times_RX[:, step, None], race.weights_RX[:, step, None]
        table_RKX = weight_R1[:, :, None] * _heavy_table(torch.exp(-race.heavy_draft_RX * time_R1), count)
        odds_RV = race.odds(step)
        integral_RV += table_RKX[:, count - 1].gather(1, arrived_RV)
        sums_RV = odds_RV.cumsum(-1)
        for order in range(1, count):
            integral_RV.addcmul_(sums_RV, table_RKX[:, count - 1 - order].gather(1, arrived_RV))
            if order + 1 < count:
                sums_RV = (odds_RV * _shifted(sums_RV)).cumsum(-1)
    return integral_RV


def _heavy_table(stay_RX: Tensor, count: int) -> Tensor:
    """Return the chance of at most k arrivals (axis K) among the first m heavy tokens (axis X) and none among the rest."""
    rows, heavies = stay_RX.shape
    chance_RK = torch.nn.functional.pad(stay_RX.new_ones(rows, 1), (0, count - 1))
    silent_RX = torch.nn.functional.pad(stay_RX.flip(-1).cumprod(-1).flip(-1), (0, 1), value=1.0)
    columns = [chance_RK.cumsum(-1)]
    for heavy in range(heavies):
        stay_R1 = stay_RX[:, heavy, None]
        chance_RK = chance_RK * stay_R1 + _shifted(chance_RK) * (1 - stay_R1)
        columns.append(chance_RK.cumsum(-1))
    return torch.stack(columns, dim=-1) * silent_RX[:, None, :]


def _heavy_coefficients(stay_RX: Tensor, gain_RX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the chance of at most k arrivals among the heavy tokens, and its derivative as gains are added to the factors."""
    chance_RK = torch.nn.functional.pad(stay_RX.new_ones(len(stay_RX), 1), (0, count - 1))
    slope_RK = torch.zeros_like(chance_RK)
    for heavy in range(stay_RX.shape[1]):
        stay_R1, gain_R1 = stay_RX[:, heavy, None], gain_RX[:, heavy, None]
        slope_RK = slope_RK * stay_R1 + _shifted(slope_RK) * (1 - stay_R1) + gain_R1 * chance_RK
        chance_RK = chance_RK * stay_R1 + _shifted(chance_RK) * (1 - stay_R1)
    return chance_RK.cumsum(-1), slope_RK.cumsum(-1)


def mass_behind(draft_RV: Tensor) -> Tensor:
    """Return the mass of all tokens that come after each token."""
    return torch.nn.functional.pad(draft_RV.flip(-1).cumsum(-1).flip(-1)[:, 1:], (0, 1))


def _others(draft_RV: Tensor) -> Tensor:
    """Return the mass of all tokens but each one, without cancellation even if that one has nearly all of it."""
    place_R1 = draft_RV.argmax(-1, keepdim=True)
    rest_R1 = draft_RV.scatter(1, place_R1, 0.0).sum(-1, keepdim=True)
    return (draft_RV.sum(-1, keepdim=True) - draft_RV).scatter(1, place_R1, rest_R1)


def _shifted(values_RV: Tensor) -> Tensor:
    """Move every column one to the right, and put zeros into the first."""
    return torch.nn.functional.pad(values_RV[:, :-1], (1, 0))
