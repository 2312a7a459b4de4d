"""What rows learn of rounds whose sizes are chosen, on a GPU, in one kernel; and another that says what they chose.

Torch's operations take a hundred, on a few numbers per row. These kernels know what `RowPolicy` and `SizeChoice` remember by
its names, and do in one go what the methods of both do: those are where it is explained, and what tests compare with.
"""

import torch
from torch import Tensor

from polydraft.backends.triton import power_of_two
from polydraft.draft import policy as policies
from polydraft.draft import sizes
from polydraft.draft.policy import Plan, RowPolicy
from polydraft.draft.sizes import SizeChoice

_ROWS = 64
_LEAST = 8
"""Shallower trees, and fewer sizes, share the kernel of these."""


def allow_sizes(policy: RowPolicy, choice: SizeChoice) -> tuple[Tensor, Tensor]:
    """Return how many levels each row's next tree may have, 0 for rows that rest, and how many nodes."""
    from polydraft.backends.triton import learning_kernels as kernels

    rest_B = policy._rest_B
    allowed_B, wanted_B = rest_B.new_empty(2, len(rest_B))
    kernels.allow_sizes[(len(rest_B),)](
        rest_B, policy._sharing_B.view(torch.uint8), choice._now_B, choice._levels_X, choice._nodes_X, allowed_B, wanted_B,
        len(rest_B), BLOCK=_ROWS, num_warps=1,
    )  # fmt: skip
    return allowed_B, wanted_B


def learn_round(policy: RowPolicy, choice: SizeChoice, plan: Plan, accepted_B: Tensor, keep_B: Tensor) -> Tensor:
    """Let both learn what a round brought; return what to tell the host, `[B, 1]`.

    Parameters
    ----------
    policy : RowPolicy
    choice : SizeChoice
    plan : Plan
        What was laid out.
    accepted_B : Tensor
    keep_B : Tensor
        Tokens that are certain now, the root included; 0 for idle rows.
    """
    from polydraft.backends.triton import learning_kernels as kernels

    (rows, depth), count = choice._means_BD.shape, len(choice.sizes)
    given = [value.contiguous() for value in (keep_B, accepted_B, plan.expected_B, plan.nodes_B, plan.levels_B, plan.found_BD)]
    report_B1: Tensor = choice._then_B.new_empty(rows, 1)
    kernels.learn_round[(rows,)](
        *given, policy._pass_BN, policy._level_cost_B, policy._overhead_B, policy._promised_B, policy._accepted_B,
        policy._tokens_B, policy._spent_B, policy._rest_B, policy._trial_B, policy._first_trial_B, policy._next_rest_B,
        choice._means_BD, choice._levels_X, choice._costs_BX, choice._now_B, choice._then_B, report_B1,
        depth, count, policy._pass_BN.shape[1],
        MEMORY=policies._MEMORY, RATE_MEMORY=policies._RATE_MEMORY, RATE_PRIOR=policies._RATE_PRIOR,
        LOSING=policies._LOSING, WINNING=policies._WINNING, SHORTEST=policies.SHORTEST_REST,
        LONGEST=policies.LONGEST_REST, ADAPTIVE=policy.adaptive, LEVEL_MEMORY=sizes._MEMORY, GROWTH=sizes._GROWTH,
        STAY=sizes._STAY, FIRST=int(choice._rests),
        BLOCK_D=power_of_two(depth, _LEAST), BLOCK_X=power_of_two(count, _LEAST), num_warps=1,
    )  # fmt: skip
    return report_B1
