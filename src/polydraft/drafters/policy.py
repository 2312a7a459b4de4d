"""How large a row's next tree should be, by what it is expected to be worth and what it costs.

Everything here depends on the past and on the draft's probabilities, never on the verification's random numbers of the round
that is being planned; children are chosen by rank, so any choice of size is exact (docs/theory.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polydraft.theory import Costs

_MEMORY, _RATE_MEMORY = 0.95, 0.97
"""How much of what a round taught of promises, and of tokens over time, is left after the next one."""
_PRIOR = 8.0
"""Rounds that the first beliefs weigh."""
_TYPICAL = ((2, 1, 1.5), (5, 1, 1.7), (9, 2, 2.0), (21, 3, 2.4), (32, 4, 2.7), (64, 5, 2.9))
"""Trees of a fair draft: nodes, levels, tokens a pass. What they would yield at given costs is the first belief."""
_MOST_RATE, _FIRST_GROWTH = 1.3, 0.6
_LOSING, _WINNING = 0.97, 1.03
"""Tokens in the time of a plain pass: below the first a row rests from drafting; above the second its next rest is short."""
SHORTEST_REST, LONGEST_REST = 8, 64
_TRIAL = 4
"""Rounds that a row drafts at least before it may rest again."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a round has laid out, as far as judging it needs."""

    expected_B: Tensor
    """Accepted tokens that the draft's probabilities promise."""
    nodes_B: Tensor
    """Candidates of each row's tree."""
    levels_B: Tensor
    """Draft levels of each row; 0 for rows that rest."""


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

    def __init__(self, costs: Costs, batch_size: int, nodes: int, device: torch.device, adaptive: bool) -> None:
        self.adaptive = adaptive
        self._level_cost, self._overhead = costs.draft_level, costs.overhead
        self._pass_N = torch.tensor([costs.tree_pass(count + 1) for count in range(nodes)], device=device)
        self._shape = (batch_size,)
        self._device = device
        fitting = [one for one in _TYPICAL if one[0] <= nodes] or [_TYPICAL[0]]
        rate = max(tokens / costs.of_round(levels, count) for count, levels, tokens in fitting)
        self._first_rate = min(rate, _MOST_RATE)
        self.begin()

    def begin(self) -> None:
        """Forget: new texts begin."""
        ones_B = torch.ones(self._shape, device=self._device)
        self._promised_B, self._accepted_B = _PRIOR * ones_B, _PRIOR * ones_B
        self._tokens_B, self._spent_B = self._first_rate * _PRIOR * ones_B, _PRIOR * ones_B
        self._masses_B, self._grown_B = _PRIOR * ones_B, _FIRST_GROWTH * _PRIOR * ones_B
        whole_B = torch.zeros(self._shape, dtype=torch.long, device=self._device)
        self._rest_B, self._trial_B = whole_B, whole_B + _TRIAL
        self._next_rest_B = whole_B + SHORTEST_REST
        if (
            self.adaptive and self._first_rate < _LOSING
        ):  # a machine on which drafting can hardly pay: plain first, then a trial
            self._rest_B = whole_B + SHORTEST_REST
            self._tokens_B, self._spent_B = _PRIOR * ones_B, _PRIOR * ones_B

    @property
    def worth_B(self) -> Tensor:
        """Accepted tokens for each that the draft promised, lately."""
        return self._accepted_B / self._promised_B

    @property
    def rate_B(self) -> Tensor:
        """λ: tokens in the time of a plain pass; plain decoding is always there, and gives one."""
        return (self._tokens_B / self._spent_B).clamp(min=1.0)

    @property
    def drafting_B(self) -> Tensor:
        """Rows that want drafts in the next round."""
        return self._rest_B == 0

    def wants_level(self, mass_B: Tensor) -> Tensor:
        """Say which rows want one more level below candidates of that total probability."""
        if not self.adaptive:
            return torch.ones_like(mass_B, dtype=torch.bool)
        growth_B = self._grown_B / self._masses_B
        return self.worth_B * mass_B * growth_B > self.rate_B * self._level_cost

    def saw_level(self, mass_B: Tensor, next_B: Tensor, asked_B: Tensor) -> None:
        """Learn how much probability a further level found, where one was asked for."""
        self._masses_B = torch.where(asked_B, _MEMORY * self._masses_B + mass_B, self._masses_B)
        self._grown_B = torch.where(asked_B, _MEMORY * self._grown_B + next_B, self._grown_B)

    def counts(self, probs_BM: Tensor) -> Tensor:
        """Return how many of the candidates, likeliest first, each row's tree should have."""
        if not self.adaptive:
            return torch.full(self._shape, probs_BM.shape[1], device=self._device)
        gain_BN = torch.nn.functional.pad(self.worth_B[:, None] * probs_BM.cumsum(-1), (1, 0))
        cost_N = self._pass_N[: gain_BN.shape[1]]
        return (gain_BN - self.rate_B[:, None] * cost_N).argmax(-1)

    def learn(self, plan: Plan, accepted_B: Tensor, active_B: Tensor) -> None:
        """Compare a round with its plan; rows that rest count down."""
        drafted_B = active_B & (plan.levels_B > 0)
        cost_B = self._pass_N[plan.nodes_B] + self._level_cost * plan.levels_B + self._overhead
        self._promised_B = torch.where(drafted_B, _MEMORY * self._promised_B + plan.expected_B, self._promised_B)
        self._accepted_B = torch.where(drafted_B, _MEMORY * self._accepted_B + accepted_B, self._accepted_B)
        self._tokens_B = torch.where(drafted_B, _RATE_MEMORY * self._tokens_B + accepted_B + 1, self._tokens_B)
        self._spent_B = torch.where(drafted_B, _RATE_MEMORY * self._spent_B + cost_B, self._spent_B)
        if self.adaptive:
            self._rest(drafted_B, active_B)

    def _rest(self, drafted_B: Tensor, active_B: Tensor) -> None:
        """Let rows rest that lose by drafting, each time longer; after a rest they try again."""
        resting_B = active_B & ~drafted_B
        self._rest_B = torch.where(resting_B, (self._rest_B - 1).clamp(min=0), self._rest_B)
        self._trial_B = torch.where(drafted_B, (self._trial_B - 1).clamp(min=0), self._trial_B)
        rate_B = self._tokens_B / self._spent_B
        loses_B = drafted_B & (self._trial_B == 0) & (rate_B < _LOSING)
        self._rest_B = torch.where(loses_B, self._next_rest_B, self._rest_B)
        self._trial_B = torch.where(loses_B, _TRIAL, self._trial_B)
        longer_B = (2 * self._next_rest_B).clamp(max=LONGEST_REST)
        self._next_rest_B = torch.where(loses_B, longer_B, self._next_rest_B)
        self._next_rest_B = torch.where(drafted_B & (rate_B > _WINNING), SHORTEST_REST, self._next_rest_B)
        # After a rest the trial counts anew: what was lost before it must not end it at once.
        self._tokens_B = torch.where(loses_B, _PRIOR, self._tokens_B)
        self._spent_B = torch.where(loses_B, _PRIOR, self._spent_B)
