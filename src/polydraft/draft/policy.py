"""Whether drafting pays on a CPU, and how large a tree: by what rounds cost there and what they brought recently.

Every decision depends on the past, on the draft's probabilities and on tokens higher up, never on this round's random numbers
for verification. So any decision is exact (docs/theory.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from polydraft.draft.speedup import Costs
from polydraft.rows import ByRow

_MEMORY, _RATE_MEMORY = 0.97, 0.97
"""Decay per round of what was learnt about promises, and about tokens over time."""
_PRIOR, _RATE_PRIOR = 16.0, 8.0
"""Weight of the initial beliefs about each, in rounds."""
_LEAST_GROWTH = 0.1
_CHARGE = 1.3
"""Factor on the cost of a level's nodes, in what a level is first assumed to bring."""
_LOSING, _WINNING = 0.97, 1.03
"""Tokens in the time of a plain pass: below the first, a row stops drafting for a while; above the second, its next rest is
short."""
SHORTEST_REST, LONGEST_REST = 8, 64
_FIRST_REST = 64
"""Plain rounds before the first trial, if an average draft cannot pay."""
_TRIAL, _SHORT_TRIAL = 4, 1
"""Minimum rounds that a row drafts before it may rest again; the second if an average draft cannot pay."""

REST_REASON = "it would have taken more time than it was likely to save"


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Assumptions about a draft: what its probabilities mean, and how well it does before its first round."""

    typical: tuple[tuple[int, int, float], ...]
    """Nodes, levels and tokens per pass of some trees; at the measured costs, the best of them is the initial belief."""
    most_rate: float
    """Upper limit of the initial belief."""
    growth: float
    """Tokens that a level brings per token of the level above."""
    front: int
    """Nodes that a level needs, roughly, to be worth its draft pass; their cost is subtracted from what a level is assumed to
    bring. 1 for a chain, where a level is one node, and its cost is exact."""
    greedy_temperature: float
    """Temperature at which the draft's probabilities best predict how often the target's likeliest token is among them."""


FAIR = Belief(
    typical=((2, 1, 1.5), (5, 1, 1.7), (9, 2, 2.0), (21, 3, 2.4), (32, 4, 2.7), (64, 5, 2.9)),
    most_rate=1.3,
    growth=0.6,
    front=4,
    greedy_temperature=1.0,
)
"""A head, a draft model or n-grams."""
CLOSE = Belief(
    typical=((2, 1, 1.95), (3, 2, 2.85), (4, 3, 3.7), (5, 4, 4.5), (6, 5, 5.2)),
    most_rate=3.0,
    growth=0.97,
    front=1,
    greedy_temperature=0.1,
)
"""An int8 copy of the target: nearly everything it draws is accepted, and its logits differ by about a tenth.

Measured on texts of SmolLM2-135M and Gemma-3-270M, 6 to 8 prompts: at temperature 0, the likeliest token is the same in .97 and
.97 of cases, and its probability at temperature 0.1 is .966 and .977 on average.
"""


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a round for one row."""

    expected: float
    """Accepted tokens, as the draft's probabilities promise."""
    nodes: int
    """Candidates of its tree."""
    levels: int
    """Draft levels; 0 for a row that rests."""


class Load:
    """What rounds with this many rows cost, in plain rounds with as many rows.

    A pass costs by its tokens, all other work by the number of rows.
    """

    def __init__(self, costs: Costs, rows: int, nodes: int, belief: Belief) -> None:
        plain = costs.tree_pass(rows) if rows > 1 else 1.0
        self.rows = rows
        self.passes = [costs.tree_pass(rows * (count + 1)) / plain for count in range(nodes)]
        """Cost of a pass, by the number of candidates of each row."""
        self.level, self.overhead = costs.draft_level * rows / plain, costs.overhead * rows / plain
        fitting = [one for one in belief.typical if one[0] <= nodes] or [belief.typical[0]]
        # Added in the same order as in `speedup`: for a single row, the results must have the same bits.
        self.rate = max(
            tokens / (self.level * levels + self.passes[count - 1] + self.overhead) for count, levels, tokens in fitting
        )
        """Tokens that an average draft brings in the time of a plain round."""
        self.first_rate = min(self.rate, belief.most_rate)
        """The same, as believed before the first round."""
        price = _CHARGE * (self.passes[min(belief.front, nodes) - 1] - self.passes[0])
        self.growth = max(belief.growth - price, _LEAST_GROWTH)
        """Tokens that a level of an average draft brings per token of the level above, less the cost of its nodes."""
        self.chain = belief.front == 1
        """Whether each level has one node, see `Belief.front`."""

    @property
    def hopeless(self) -> bool:
        """Whether an average draft cannot pay, whatever it proposes."""
        return self.rate < _LOSING

    @property
    def trial(self) -> int:
        """Minimum rounds that a row drafts before it may rest."""
        return _SHORT_TRIAL if self.hopeless else _TRIAL


class Pace:
    """What one row has learnt from its rounds: what drafts are worth, how fast they are, and when to rest."""

    def __init__(self, load: Load, adaptive: bool) -> None:
        self.load, self.adaptive = load, adaptive
        self.promised = self.accepted = _PRIOR
        self.tokens, self.spent = load.first_rate * _RATE_PRIOR, _RATE_PRIOR
        self.mass, self.grown = _PRIOR, load.growth * _PRIOR
        """Probability of fronts, and what the levels below them brought."""
        self.rest, self.trial, self.next_rest = 0, load.trial, SHORTEST_REST
        """Rounds left to rest, rounds left before the next rest may begin, and how long that one will be."""
        self.works, self.skipped = True, False
        """Whether the row takes part in rounds, and whether it skips the draft in the next one."""
        if adaptive and load.hopeless:
            # Drafting can hardly pay on this machine: start plainly, with a trial now and then in case the draft is very good.
            self.rest, self.next_rest, self.tokens = _FIRST_REST, LONGEST_REST, self.spent

    @property
    def worth(self) -> float:
        """Accepted tokens per promised one, recently."""
        return self.accepted / self.promised

    @property
    def rate(self) -> float:
        """λ: tokens in the time of a plain pass; at least 1, which plain decoding gives."""
        return max(self.tokens / self.spent, 1.0)

    def wants_level(self, mass: float, levels: int) -> bool:
        """Whether another level pays below `levels` levels, the last with candidates of this total probability."""
        growth, cost = self.grown / self.mass, self.load.level
        if self.load.chain:
            # A node's cost rises with every level, which the average of earlier levels would hide.
            growth, passes = self.load.growth, self.load.passes
            cost += passes[min(levels + 1, len(passes) - 1)] - passes[min(levels, len(passes) - 1)]
        return self.worth * mass * growth > self.rate * cost

    def nets(self, probs: Sequence[float]) -> list[float]:
        """Return what trees of no candidate, the first one, the first two and so on promise, less their cost."""
        worth, rate = self.worth, self.rate
        gains = accumulate(probs, initial=0.0)
        return [worth * gain - rate * cost for gain, cost in zip(gains, self.load.passes, strict=False)]

    def learn(self, plan: RoundPlan, accepted: int) -> None:
        """Compare a round with its plan; a row that rested counts down."""
        if plan.levels == 0:
            self.rest = max(self.rest - 1, 0)
            return
        self.promised = _MEMORY * self.promised + plan.expected
        self.accepted = _MEMORY * self.accepted + accepted
        self.tokens = _RATE_MEMORY * self.tokens + accepted + 1
        cost = self.load.passes[plan.nodes] + self.load.level * plan.levels + self.load.overhead
        self.spent = _RATE_MEMORY * self.spent + cost
        if self.adaptive:
            self._consider_a_rest()

    def _consider_a_rest(self) -> None:
        """Rest if drafting loses, longer each time; after a rest, try again."""
        self.trial = max(self.trial - 1, 0)
        rate = self.tokens / self.spent
        if rate > _WINNING:
            self.next_rest = SHORTEST_REST
        if self.trial == 0 and rate < _LOSING:
            self.rest, self.trial, self.next_rest = self.next_rest, self.load.trial, min(2 * self.next_rest, LONGEST_REST)
            # The trial after a rest starts afresh: earlier losses must not end it at once.
            self.tokens = self.spent = _RATE_PRIOR


class RowPolicy(ByRow):
    """The decisions of a batch, each row's by its own history alone.

    With λ the tokens that a row yields in the time of one plain pass, a level or a node pays if its expected tokens exceed λ
    times its cost: that maximises tokens over time. The draft's probabilities are scaled by what they were recently worth.

    All builders use it alike: they ask which rows draft, and how many levels or nodes pay; then they report their plan by
    `plan`, and what was accepted of it by `learn`.

    Parameters
    ----------
    costs : Costs
        In plain target passes.
    rows, nodes : int
        `nodes` is the largest tree, root included.
    adaptive : bool
        If False, every level and node is wanted, and no row rests.
    belief : Belief
        What to assume of the draft before the first round.
    """

    ROW_STATE = ("paces",)
    FORGETS = True

    def __init__(self, costs: Costs, rows: int, nodes: int, adaptive: bool = True, belief: Belief = FAIR) -> None:
        self.adaptive, self.idle = adaptive, False
        """`idle`: whether no running row drafts in the next round."""
        self._costs, self._most, self.belief = costs, nodes - 1, belief
        self._loads: dict[int, Load] = {}
        self.paces = [self.new_row("paces") for _ in range(rows)]
        self._plans: list[RoundPlan] | None = None

    def _load(self, rows: int) -> Load:
        if rows not in self._loads:
            self._loads[rows] = Load(self._costs, rows, self._most + 1, self.belief)
        return self._loads[rows]

    def share(self, loads: Sequence[int]) -> None:
        """Set how many rows share each row's rounds: sharing saves only what a pass costs before its first token."""
        for pace, load in zip(self.paces, loads, strict=True):
            pace.load = self._load(load)

    def begin(self, rows: Sequence[int]) -> None:
        """Forget what was learnt in rows that begin new texts."""
        for row in rows:
            self.paces[row] = Pace(self.paces[row].load, self.adaptive)
        drafting = self.drafting
        self.idle = self.idle and not any(drafting[row] for row in rows)

    def new_row(self, name: str) -> Pace:
        """Start without experience, as a row alone."""
        return Pace(self._load(1), self.adaptive)

    @property
    def rest_reason(self) -> str:
        """Say why rows rest."""
        busy = ", by costs measured while this machine was busy: start again when it is quiet"
        return REST_REASON + (busy if self._costs.disturbed else "")

    @property
    def hopeless(self) -> bool:
        """Whether an average draft cannot pay for some row, whatever it proposes."""
        return any(pace.load.hopeless for pace in self.paces)

    @property
    def drafting(self) -> list[bool]:
        """Rows that draft in the next round: those that do not rest, and of those that share its costs, all or none.

        A pass is as wide as its largest tree, so a few rows on trial would make all others pay. They wait until half of the
        rows are ready.
        """
        sharing = [pace for pace in self.paces if pace.load.rows > 1]
        enough = 2 * sum(pace.rest == 0 for pace in sharing) >= len(sharing)
        return [pace.rest == 0 and not pace.skipped and (enough or pace.load.rows == 1) for pace in self.paces]

    def skip(self, rows: Sequence[bool]) -> None:
        """Set which rows have enough candidates for the next round without a draft."""
        for pace, skipped in zip(self.paces, rows, strict=True):
            pace.skipped = skipped
        self._note_idleness()

    def _note_idleness(self) -> None:
        self.idle = not any(drafts and pace.works for drafts, pace in zip(self.drafting, self.paces, strict=True))

    def wants_level(self, mass_B: Tensor, levels: int) -> Tensor:
        """Say for which rows another level pays; parameters as for `Pace.wants_level`."""
        pairs = zip(self.paces, mass_B.tolist(), strict=True)
        return torch.tensor([not self.adaptive or pace.wants_level(mass, levels) for pace, mass in pairs])

    def saw_level(self, mass_B: Tensor, net_B: Tensor, asked_B: Tensor) -> None:
        """Learn how much another level brought, less the cost of its nodes, in rows that asked for one."""
        found = zip(self.paces, mass_B.tolist(), net_B.tolist(), asked_B.tolist(), strict=True)
        for pace, mass, net, asked in found:
            if asked:
                pace.mass = _MEMORY * pace.mass + mass
                pace.grown = _MEMORY * pace.grown + max(net, 0.0) / pace.worth

    def counts(self, probs_BM: Tensor) -> Tensor:
        """Return how many of the candidates, likeliest first, each row's tree should have."""
        if not self.adaptive:
            return torch.full((len(probs_BM),), probs_BM.shape[1])
        nets = [pace.nets(probs) for pace, probs in zip(self.paces, probs_BM.tolist(), strict=True)]
        return torch.tensor([net.index(max(net)) for net in nets])

    def net(self, probs_BM: Tensor) -> Tensor:
        """Return what the best tree of the candidates promises, less what plain decoding yields in the time its nodes take."""
        nets = [pace.nets(probs) for pace, probs in zip(self.paces, probs_BM.tolist(), strict=True)]
        return torch.tensor([max(net) - net[0] for net in nets], dtype=torch.float64)

    def plan(self, expected: Sequence[float], nodes: Sequence[int], levels: Sequence[int]) -> None:
        """Record the plan of a round, row by row; without one, the round counts as plain."""
        self._plans = [RoundPlan(*one) for one in zip(expected, nodes, levels, strict=True)]

    def learn(self, accepted: Sequence[int], active: Sequence[bool]) -> None:
        """Compare the round with its plan, and learn."""
        plans, self._plans = self._plans or [RoundPlan(0.0, 0, 0)] * len(self.paces), None
        for pace, plan, count, works in zip(self.paces, plans, accepted, active, strict=True):
            pace.works = works
            if works:
                pace.learn(plan, count)
        self._note_idleness()
