"""How large a row's next tree should be, by what it is expected to be worth and what it costs.

Everything here depends on the past, on the draft's probabilities and on tokens drawn higher up, never on the verification's
random numbers of the round that is being planned, nor on the children whose number it says: any choice of size is exact
(docs/theory.md). Few numbers per row, so numpy's on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polydraft.draft.speedup import Costs
from polydraft.verify.arrays import Array, arange, as_array, at_least, at_most, put, take, xp

_MEMORY, _RATE_MEMORY = 0.97, 0.97
"""How much of what a round taught of promises, and of tokens over time, is left after the next one."""
_PRIOR, _RATE_PRIOR = 16.0, 8.0
"""Rounds that the first beliefs weigh, of promises and of tokens over time."""
_TYPICAL = ((2, 1, 1.5), (5, 1, 1.7), (9, 2, 2.0), (21, 3, 2.4), (32, 4, 2.7), (64, 5, 2.9))
"""Trees of a fair draft: nodes, levels, tokens per pass. What they would yield at given costs is the first belief."""
_MOST_RATE, _FIRST_GROWTH, _LEAST_GROWTH = 1.3, 0.6, 0.1
_FRONT = 4
"""Nodes of a level that is worth its draft pass, about: what they cost lessens what a level is first believed to bring."""
_FURTHER = 1.3
"""What a child that is drawn is worth, its own children included, for each token of its own."""
_LEAST_PRICE = 0.005
"""What a drawn node costs at least, in plain passes: on a flat stretch of the cost curve its room is room of deeper levels."""
_LOSING, _WINNING = 0.97, 1.03
"""Tokens in the time of a plain pass: below the first a row rests from drafting; above the second its next rest is short."""
SHORTEST_REST, LONGEST_REST = 8, 64
_FIRST_REST = 64
"""Where a fair draft cannot pay, plain rounds before the first trial."""
_TRIAL, _SHORT_TRIAL = 4, 1
"""Rounds that a row drafts at least before it may rest again; the second where a fair draft cannot pay."""


REST_REASON = "it would have taken more time than it was likely to save"


@dataclass(frozen=True, eq=False)
class Plan:
    """What a round has laid out, as far as judging it needs."""

    expected_B: Array
    """Accepted tokens that the draft's probabilities promise."""
    nodes_B: Array
    """Candidates of each row's tree."""
    levels_B: Array
    """Draft levels of each row; 0 for rows that rest."""
    found_BD: Array = None
    """What each level promises, where sizes are chosen by it."""


@dataclass(frozen=True, eq=False)
class Allotment:
    """How many children the nodes of a level draw."""

    counts_BW: Array
    net_B: Array
    """Accepted tokens that they promise, less those that plain decoding would yield in the time of their verification."""


class RowPolicy:
    """The choices of a batch, each row's by its own history alone.

    With λ the tokens that a row yields in the time of one plain pass, a level or a node pays if its expected tokens exceed λ
    times its cost: that maximises tokens over time. The draft's probabilities count as many tokens as they were worth lately.

    Parameters
    ----------
    costs : Costs
        In plain target passes.
    batch_size, nodes : int
        `nodes` is the largest tree, the root included.
    device : torch.device
    adaptive : bool
        Otherwise every level and node is wanted, and no row rests.
    """

    _promised_B: Array
    _accepted_B: Array
    _tokens_B: Array
    _spent_B: Array
    _masses_B: Array
    _grown_B: Array
    _rest_B: Array
    _trial_B: Array
    _next_rest_B: Array
    _pass_BN: Array
    _price_BN: Array
    _level_cost_B: Array
    _overhead_B: Array
    _first_rate_B: Array
    _first_trial_B: Array
    _first_growth_B: Array
    _sharing_B: Array
    """Rows that share rounds with others, and may depend on them."""

    def __init__(self, costs: Costs, batch_size: int, nodes: int, device: torch.device, adaptive: bool) -> None:
        self.adaptive = adaptive
        self._costs, self._most, self._device = costs, nodes - 1, device
        self._ones_B = as_array(torch.ones(batch_size, device=device, dtype=torch.float64))
        self._loads: tuple[int, ...] = ()
        self._tables: dict[int, _Load] = {}
        self.share([1] * batch_size)
        self.begin()

    def share(self, loads: Sequence[int]) -> None:
        """Say how many rows share the rounds of each row: they share what a pass costs before its first token, no more.

        Where others do not matter a row's own load is 1.
        """
        if tuple(loads) == self._loads:
            return
        self._loads = tuple(loads)
        for load in set(loads) - set(self._tables):
            self._tables[load] = _Load.of(self._costs, load, self._most + 1)
        tables = [self._tables[load] for load in loads]

        def column(values: list[Any]) -> Array:
            return as_array(torch.tensor(values, device=self._device, dtype=torch.float64))

        pass_BN = column([table.passes for table in tables])
        steps_BN = at_least(pass_BN[:, 1:] - pass_BN[:, :-1], _LEAST_PRICE)
        first_B1 = pass_BN[:, :1]
        # What each node adds to the cost of its tree, nothing for the first.
        added_BN = xp(steps_BN).concatenate([0 * first_B1, steps_BN], 1)
        trials = [_TRIAL if table.rate >= _LOSING else _SHORT_TRIAL for table in tables]
        values = {
            "_pass_BN": pass_BN,
            "_price_BN": first_B1 + added_BN.cumsum(-1),
            "_level_cost_B": column([table.level for table in tables]),
            "_overhead_B": column([table.overhead for table in tables]),
            "_first_rate_B": column([min(table.rate, _MOST_RATE) for table in tables]),
            "_first_trial_B": as_array(torch.tensor(trials, device=self._device)),
            "_first_growth_B": column([table.growth for table in tables]),
            "_sharing_B": as_array(torch.tensor([load > 1 for load in loads], device=self._device)),
        }
        if len(getattr(self, "_pass_BN", ())) == len(loads):
            self._keep(**values)
        else:
            for name, value in values.items():
                setattr(self, name, value)

    def begin(self, new_B: Array | None = None) -> None:
        """Forget what was learnt of rows that begin new texts: of all of them, if none are named."""
        prior_B = _PRIOR * self._ones_B
        none_B = 0 * arange(len(prior_B), prior_B)
        first: dict[str, Array] = {
            "_promised_B": prior_B,
            "_accepted_B": prior_B,
            "_tokens_B": self._first_rate_B * _RATE_PRIOR * self._ones_B,
            "_spent_B": _RATE_PRIOR * self._ones_B,
            "_masses_B": prior_B,
            "_grown_B": self._first_growth_B * prior_B,
            "_rest_B": none_B,
            "_trial_B": none_B + self._first_trial_B,
            "_next_rest_B": none_B + SHORTEST_REST,
        }
        hopeless_B = self.hopeless_B
        if self.adaptive and hopeless_B.any():
            # A machine on which drafting can hardly pay: plain first, then now and then a trial, for a draft better than most.
            plain = {"_rest_B": none_B + _FIRST_REST, "_next_rest_B": none_B + LONGEST_REST, "_tokens_B": first["_spent_B"]}
            first |= {name: xp(prior_B).where(hopeless_B, value_B, first[name]) for name, value_B in plain.items()}
        for name, value_B in first.items():
            if new_B is None:
                setattr(self, name, 1 * value_B)  # a copy: what is updated in place must not be two things at once
            else:
                self._keep(**{name: xp(new_B).where(new_B, value_B, getattr(self, name))})

    def _keep(self, **values: Array) -> None:
        """Overwrite what lives from round to round where it stands: captures of rounds know its address."""
        for name, value_B in values.items():
            getattr(self, name)[...] = value_B

    def resize(self, rows: int) -> None:
        """Have so many rows: what was learnt of the first ones stays, further ones are to `begin`."""
        concatenate = xp(self._ones_B).concatenate
        for name in [one for one in vars(self) if one.endswith("_B")]:
            value_B = getattr(self, name)
            more = [value_B[:1]] * (rows - len(value_B))
            setattr(self, name, concatenate([value_B, *more], 0)[:rows])
        self.share((*self._loads, *([1] * rows))[:rows])

    def swap_rows(self, first: int, second: int) -> None:
        """Swap two rows."""
        for name in [one for one in vars(self) if one.endswith(("_B", "_BN"))]:
            getattr(self, name)[[first, second]] = getattr(self, name)[[second, first]]
        loads = list(self._loads)
        loads[first], loads[second] = loads[second], loads[first]
        self._loads = tuple(loads)

    @property
    def rest_reason(self) -> str:
        """Say why rows rest."""
        busy = ", by costs measured while this machine was busy: start again when it is quiet"
        return REST_REASON + (busy if self._costs.disturbed else "")

    @property
    def hopeless_B(self) -> Array:
        """Rows for which a fair draft could not pay, whatever it proposes."""
        return self._first_rate_B < _LOSING

    @property
    def worth_B(self) -> Array:
        """Accepted tokens for each that the draft promised, lately."""
        return self._accepted_B / self._promised_B

    @property
    def rate_B(self) -> Array:
        """λ: tokens in the time of a plain pass; plain decoding is always there, and gives one."""
        return at_least(self._tokens_B / self._spent_B, 1.0)

    @property
    def rest_B(self) -> Array:
        """Rounds that each row still rests."""
        return self._rest_B

    @property
    def drafting_B(self) -> Array:
        """Rows that draft in the next round: those that do not rest, and of those that share its costs all or none.

        A pass is as wide as its largest tree, so a few rows that try would make all others pay: they wait until half of them
        are ready.
        """
        ready_B = self._rest_B == 0
        sharing_B = self._sharing_B
        enough = 2 * (ready_B & sharing_B).sum() >= sharing_B.sum()
        return ready_B & (enough | ~sharing_B)

    def wants_level(self, mass_B: Array) -> Array:
        """Say which rows want one more level below candidates of that total probability."""
        if not self.adaptive:
            return mass_B == mass_B
        growth_B = self._grown_B / self._masses_B
        return self.worth_B * mass_B * growth_B > self.rate_B * self._level_cost_B

    def saw_level(self, mass_B: Array, next_B: Array, asked_B: Array) -> None:
        """Learn how much a further level brought, once its nodes are paid for, where one was asked for."""
        where = xp(mass_B).where
        self._keep(_masses_B=where(asked_B, _MEMORY * self._masses_B + mass_B, self._masses_B))
        self._keep(_grown_B=where(asked_B, _MEMORY * self._grown_B + next_B, self._grown_B))

    def saw_allotment(self, mass_B: Array, allotment: Allotment, asked_B: Array) -> None:
        """Learn the same where children are drawn: what a level found is what is left once its nodes are paid for."""
        self.saw_level(mass_B, at_least(allotment.net_B, 0.0) / self.worth_B, asked_B)

    def counts(self, probs_BM: Array) -> Array:
        """Return how many of the candidates, likeliest first, each row's tree should have."""
        whole_B = 0 * self._rest_B
        if not self.adaptive:
            return whole_B + probs_BM.shape[1]
        return self._net(probs_BM).argmax(-1)

    def net(self, probs_BM: Array) -> Array:
        """Return what the best tree of the candidates promises, less what plain decoding yields in the time of its nodes."""
        net_BN = self._net(probs_BM)
        return take(net_BN, net_BN.argmax(-1)[:, None])[:, 0] - net_BN[:, 0]

    def _net(self, probs_BM: Array) -> Array:
        """Return what trees of no candidate, of the likeliest, of the two likeliest and so on promise, less their cost."""
        gain_BM = self.worth_B[:, None] * probs_BM.cumsum(-1)
        gain_BN = xp(gain_BM).concatenate([0 * self._ones_B[:, None], gain_BM], 1)
        return gain_BN - self.rate_B[:, None] * self._pass_BN[:, : gain_BN.shape[1]]

    def allot(self, gain_BWK: Array, nodes_B: Array, share: int, least: int) -> Allotment:
        """Say how many children the nodes of a level draw.

        Parameters
        ----------
        gain_BWK : Array
            Expected tokens of each further child of each node, falling.
        nodes_B : Array
            Candidates that the rows have already.
        share : int
            What a level has in trees that use their limits up.
        least : int
            What it has in any case.
        """
        batch_size, width, most = gain_BWK.shape
        gain_BX, functions = gain_BWK.reshape(batch_size, width * most), xp(gain_BWK)
        order_BX, number_X = _falling(gain_BX), arange(width * most, nodes_B) + 1
        value_BX = self.worth_B[:, None] * take(gain_BX, order_BX).cumsum(-1)
        place_BX = at_most(nodes_B[:, None] + number_X, self._most)
        cost_BX = self.rate_B[:, None] * (take(self._price_BN, place_BX) - take(self._price_BN, nodes_B[:, None]))
        room_B1 = (self._most - nodes_B)[:, None]
        if self.adaptive:
            net_BX = functions.where(number_X <= room_B1, _FURTHER * value_BX - cost_BX, -torch.inf)
            best_B1 = net_BX.argmax(-1, keepdims=True)
            number_B1 = functions.where(take(net_BX, best_B1) > 0, best_B1 + 1, 0)
            number_B1 = functions.where(number_B1 < least, least, number_B1)
        else:
            number_B1 = at_most(room_B1, share)
        picked_BX = gain_BX < 0
        put(picked_BX, order_BX, (number_X <= number_B1) & (take(gain_BX, order_BX) > 0))
        last_B1 = at_least(picked_BX.sum(-1, keepdims=True) - 1, 0)
        net_B = take(value_BX - cost_BX, last_B1)[:, 0] * picked_BX.any(-1)
        return Allotment(picked_BX.reshape(batch_size, width, most).sum(-1), net_B)

    def rested(self, active_B: Array) -> None:
        """Count a round in which no row drafted."""
        self._keep(_rest_B=xp(active_B).where(active_B, at_least(self._rest_B - 1, 0), self._rest_B))

    def learn(self, plan: Plan, accepted_B: Array, active_B: Array) -> None:
        """Compare a round with its plan; rows that rest count down."""
        where = xp(active_B).where
        drafted_B = active_B & (plan.levels_B > 0)
        pass_B = take(self._pass_BN, plan.nodes_B[:, None])[:, 0]
        cost_B = pass_B + self._level_cost_B * plan.levels_B + self._overhead_B
        self._keep(_promised_B=where(drafted_B, _MEMORY * self._promised_B + plan.expected_B, self._promised_B))
        self._keep(_accepted_B=where(drafted_B, _MEMORY * self._accepted_B + accepted_B, self._accepted_B))
        self._keep(_tokens_B=where(drafted_B, _RATE_MEMORY * self._tokens_B + accepted_B + 1, self._tokens_B))
        self._keep(_spent_B=where(drafted_B, _RATE_MEMORY * self._spent_B + cost_B, self._spent_B))
        if self.adaptive:
            self._rest(drafted_B, active_B)

    def _rest(self, drafted_B: Array, active_B: Array) -> None:
        """Let rows rest that lose by drafting, each time longer; after a rest they try again."""
        where = xp(active_B).where
        self._keep(_rest_B=where(active_B & ~drafted_B, at_least(self._rest_B - 1, 0), self._rest_B))
        self._keep(_trial_B=where(drafted_B, at_least(self._trial_B - 1, 0), self._trial_B))
        rate_B = self._tokens_B / self._spent_B
        loses_B = drafted_B & (self._trial_B == 0) & (rate_B < _LOSING)
        self._keep(_rest_B=where(loses_B, self._next_rest_B, self._rest_B))
        self._keep(_trial_B=where(loses_B, self._first_trial_B, self._trial_B))
        self._keep(_next_rest_B=where(loses_B, at_most(2 * self._next_rest_B, LONGEST_REST), self._next_rest_B))
        self._keep(_next_rest_B=where(drafted_B & (rate_B > _WINNING), SHORTEST_REST, self._next_rest_B))
        # After a rest the trial counts anew: what was lost before it must not end it at once.
        self._keep(_tokens_B=where(loses_B, _RATE_PRIOR, self._tokens_B))
        self._keep(_spent_B=where(loses_B, _RATE_PRIOR, self._spent_B))


@dataclass(frozen=True, kw_only=True)
class _Load:
    """What rounds cost that so many rows share, in plain rounds of as many rows."""

    passes: list[float]
    """By the number of candidates that every row has."""
    level: float
    overhead: float
    rate: float
    """Tokens in the time of a plain round that a fair draft brings."""
    growth: float
    """Tokens that a level of a fair draft brings for each of the level above, once its nodes are paid for."""

    @classmethod
    def of(cls, costs: Costs, load: int, nodes: int) -> "_Load":
        """Scale the costs of one row: a pass costs by all its tokens, and work on candidates by all rows."""
        plain = costs.tree_pass(load) if load > 1 else 1.0
        passes = [costs.tree_pass(load * (count + 1)) / plain for count in range(nodes)]
        level, overhead = costs.draft_level * load / plain, costs.overhead * load / plain
        fitting = [one for one in _TYPICAL if one[0] <= nodes] or [_TYPICAL[0]]
        # In the order of `Costs.of_round`: of a single row the figures must have its very bits.
        rate = max(tokens / (level * levels + passes[count - 1] + overhead) for count, levels, tokens in fitting)
        price = _FURTHER * (passes[min(_FRONT, nodes) - 1] - passes[0])
        growth = max(_FIRST_GROWTH - price, _LEAST_GROWTH)
        return cls(passes=passes, level=level, overhead=overhead, rate=rate, growth=growth)


def _falling(values_BX: Array) -> Array:
    """Return where the largest value of each row is, the next, and so on; of equal ones the first comes first."""
    if isinstance(values_BX, torch.Tensor):
        return values_BX.sort(dim=1, descending=True, stable=True).indices
    return (-values_BX).argsort(1, kind="stable")
