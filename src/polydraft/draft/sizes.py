"""A few sizes of dynamic trees, for devices that should not be looked at: a captured round has one of them.

Within a capture every level and every node of its size is computed, wanted or not. So a row does not ask level by level
whether another one pays: it chooses the size of a whole round, by what its levels were worth lately. The choice is made on the
device, two rounds before it holds, so that the host knows which capture to replay even where rounds run ahead by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from polydraft.draft.speedup import Costs
from polydraft.trees import DynamicShape
from polydraft.verify.arrays import Array, arange, as_array, at_least, take, xp

_STEPS = 4
"""Sizes with drafts, at most: each is a capture of its own per span of the caches."""
_MEMORY = 0.9
"""How much of what a round taught of its levels is left after the next one."""
_FIRST, _GROWTH = 0.75, 0.75
"""Accepted tokens of the first level of a fair draft, and of each further one, per token of the level above."""
_STAY = 0.02
"""Tokens that another size must bring more to be worth the change: a change of capture costs one round's head start."""


@dataclass(frozen=True)
class Size:
    """Limits of one round's trees."""

    levels: int
    """Levels below the root; 0 in a round that rests."""
    nodes: int
    """The root included."""


def sizes_of(shape: DynamicShape) -> tuple[Size, ...]:
    """Return the sizes between which rounds choose: a rest, then evenly spaced ones up to all that is allowed."""
    whole = Size(shape.depth, shape.nodes)
    if not shape.adaptive:
        return (whole,)
    levels = sorted({math.ceil(shape.depth * step / _STEPS) for step in range(1, _STEPS + 1)})
    inner = (Size(count, max(round(shape.nodes * count / shape.depth), count + 1)) for count in levels[:-1])
    return (Size(0, 1), *inner, whole)


class SizeChoice:
    """Which size each row wants, by its own history alone, and which one the batch needs for that.

    With λ the tokens that a row yields in the time of a plain pass, it wants the size whose levels promise most after λ times
    their cost. Of levels that it has not tried lately it believes what a fair draft's would bring below those it has. A batch
    takes the largest size that any row wants; rows that want less are cut to what they want, so that none depends on others.

    Parameters
    ----------
    sizes : sequence of Size
    costs : Costs
    batch_size, depth : int
    device : torch.device
    """

    def __init__(self, sizes: Sequence[Size], costs: Costs, batch_size: int, depth: int, device: torch.device) -> None:
        self.sizes, self._rests = tuple(sizes), sizes[0].levels == 0
        self._costs, self._loads = costs, (1,) * batch_size
        self._costs_BX = as_array(self._reckoned(self._loads).to(device))
        self._levels_X = as_array(torch.tensor([size.levels for size in sizes], device=device))
        self._nodes_X = as_array(torch.tensor([size.nodes for size in sizes], device=device))
        first = _FIRST * _GROWTH ** torch.arange(depth, device=device, dtype=torch.float64)
        self._prior_BD = as_array(first.repeat(batch_size, 1))
        self._means_BD = as_array(first.repeat(batch_size, 1))
        """Accepted tokens that each level promised lately."""
        self._first = len(sizes) - 1
        self._now_B = as_array(torch.full((batch_size,), self._first, device=device))
        """What each row wants of the next round, as a place in `sizes`."""
        self._then_B = as_array(torch.full((batch_size,), self._first, device=device))
        """What it wants of the one after that."""
        self._told = [[self._first, self._first] for _ in range(batch_size)]
        """The last two choices of each row that the host knows of."""
        self.rehearsed: int | None = None
        """Place of the size that all rounds have, whatever rows want: in rehearsals."""

    def _reckoned(self, loads: Sequence[int]) -> torch.Tensor:
        """Return what each size costs, in plain rounds of as many rows: a pass costs by all its tokens, a level by all rows."""

        def cost(size: Size, load: int) -> float:
            plain = self._costs.tree_pass(load) if load > 1 else 1.0
            return (self._costs.tree_pass(load * size.nodes) + self._costs.draft_level * size.levels * load) / plain

        return torch.tensor([[cost(size, load) for size in self.sizes] for load in loads], dtype=torch.float64)

    def share(self, loads: Sequence[int]) -> None:
        """Say how many rows share the rounds of each row."""
        if tuple(loads) != self._loads:
            self._loads = tuple(loads)
            reckoned_BX = self._reckoned(loads)
            _assign(self._costs_BX, reckoned_BX if isinstance(self._costs_BX, torch.Tensor) else reckoned_BX.numpy())

    @property
    def current(self) -> int:
        """Place of the size that the next round needs."""
        if self.rehearsed is not None:
            return self.rehearsed
        # Whether or not a round is under way, what the next one needs was chosen in one of the last two that are known.
        return max(max(told) for told in self._told)

    @property
    def levels_B(self) -> Array:
        """Levels that each row's next tree may have."""
        return self._levels_X[self._now_B]

    @property
    def nodes_B(self) -> Array:
        """Nodes that each row's next tree may have, the root included."""
        return self._nodes_X[self._now_B]

    def begin(self, rows: Sequence[int], new_B: Array) -> None:
        """Forget what was learnt of rows that begin new texts."""
        where = xp(new_B).where
        _assign(self._means_BD, where(new_B[:, None], self._prior_BD, self._means_BD))
        for chosen_B in (self._now_B, self._then_B):
            _assign(chosen_B, where(new_B, self._first, chosen_B))
        for row in rows:
            self._told[row] = [self._first, self._first]

    def learn(self, found_BD: Array, levels_B: Array, rate_B: Array) -> None:
        """Learn what each level promised rows that drafted, `levels_B` of them, and choose anew for these.

        Parameters
        ----------
        found_BD : Array
            Accepted tokens that each level promised; of levels that a row did not have, anything.
        levels_B : Array
            0 for rows that rest.
        rate_B : Array
            λ.
        """
        where, number_D = xp(found_BD).where, arange(found_BD.shape[1], levels_B)
        levels_B1 = levels_B[:, None]
        means_BD = where(number_D < levels_B1, _MEMORY * self._means_BD + (1 - _MEMORY) * found_BD, self._means_BD)
        last_B1 = take(means_BD, at_least(levels_B1 - 1, 0))
        untried_BD = last_B1 * _GROWTH ** at_least(number_D - levels_B1 + 1, 0)
        means_BD = where((number_D >= levels_B1) & (levels_B1 > 0), untried_BD, means_BD)
        _assign(self._means_BD, means_BD)
        # The rest is no choice of a row that drafts: whether drafting pays at all is the policy's to say.
        first = int(self._rests)
        ends_X = at_least(self._levels_X[first:] - 1, 0)
        net_BX = means_BD.cumsum(-1)[:, ends_X] - rate_B[:, None] * self._costs_BX[:, first:]
        net_BX = net_BX + _STAY * (arange(net_BX.shape[1], levels_B) + first == self._then_B[:, None])
        wanted_B = where(levels_B > 0, net_BX.argmax(-1) + first, self._then_B)
        _assign(self._now_B, self._then_B)
        _assign(self._then_B, wanted_B)

    def rested(self) -> None:
        """Let a round go by in which no row drafted."""
        _assign(self._now_B, self._then_B)

    def report(self, rest_B: Array, active_B: Array) -> Array:
        """Return what to tell the host, `[B, 1]`: what rows want of the round after the next; 0 if they still rest then."""
        wanted_B = xp(rest_B).where(active_B, self._then_B, 0)
        if self._rests:
            wanted_B = wanted_B * (rest_B < 2)
        return wanted_B[:, None]

    def receive(self, reports: Sequence[Sequence[int]]) -> None:
        """Take on the host what `report` returned."""
        for told, (wanted,) in zip(self._told, reports, strict=True):
            told[:] = told[1], wanted


def _assign(kept: Array, values: Array) -> None:
    """Overwrite what lives from round to round where it stands: captures know its address."""
    kept[...] = values
