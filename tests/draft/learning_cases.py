"""What rows learn of made-up rounds, by kernels and by torch's operations, on any device."""

from typing import Any

import pytest
import torch
from growth_cases import as_on_a_gpu
from torch import Tensor

from polydraft.draft.fused_learning import allow_sizes, learn_round
from polydraft.draft.policy import Plan, RowPolicy
from polydraft.draft.sizes import SizeChoice, sizes_of
from polydraft.lab.theory import Costs
from polydraft.trees import DynamicShape

COSTS = {
    "cheap": Costs(draft_level=0.02, tree_pass=lambda nodes: 1 + 0.002 * nodes),
    "middling": Costs(draft_level=0.14, tree_pass=lambda nodes: 1 + 0.004 * nodes),
    "losing": Costs(draft_level=0.9, tree_pass=lambda nodes: 1 + 0.3 * (nodes - 1)),
}


class Rows:
    """What some rows remember, round after round."""

    def __init__(self, shape: DynamicShape, costs: Costs, rows: int, device: str = "cpu") -> None:
        self.shape, self.rows, self.device = shape, rows, torch.device(device)
        with pytest.MonkeyPatch.context() as patch:
            as_on_a_gpu(patch)
            self.policy = RowPolicy(costs, rows, shape.nodes, self.device, shape.adaptive)
            self.choice = SizeChoice(sizes_of(shape), costs, rows, shape.depth, self.device)

    def sizes(self, by_kernels: bool) -> tuple[Tensor, Tensor]:
        """Return what the next trees may have."""
        if by_kernels:
            return allow_sizes(self.policy, self.choice)
        return self.choice.levels_B * self.policy.drafting_B, self.choice.nodes_B

    def learn(self, plan: Plan, accepted_B: Tensor, keep_B: Tensor, by_kernels: bool) -> Tensor:
        """Learn what a round brought, as `DynamicBuilder.learn` does."""
        if by_kernels:
            return learn_round(self.policy, self.choice, plan, accepted_B, keep_B)
        active_B = keep_B > 0
        self.policy.learn(plan, accepted_B, active_B)
        promised_BD = self.policy.worth_B[:, None] * plan.found_BD
        self.choice.learn(promised_BD, plan.levels_B * active_B, self.policy.rate_B)
        return self.choice.report(self.policy.rest_B, active_B)

    def remembered(self) -> dict[str, Tensor]:
        """Return all of it."""
        owners: list[Any] = [self.policy, self.choice]
        return {name: value for owner in owners for name, value in vars(owner).items() if isinstance(value, Tensor)}


def made_up(rows: Rows, seed: int, luck: float) -> tuple[Plan, Tensor, Tensor]:
    """Return a round's plan, what was accepted, and what is kept; idle rows keep nothing."""
    generator, (count, depth) = torch.Generator().manual_seed(seed), (rows.rows, rows.shape.depth)
    allowed_B, wanted_B = (part_B.cpu() for part_B in rows.sizes(by_kernels=False))
    found_BD = luck * torch.rand(count, depth, generator=generator, dtype=torch.float64).sort(descending=True).values
    found_BD = found_BD * (torch.arange(depth) < allowed_B[:, None])
    nodes_B = torch.minimum(wanted_B - 1, torch.randint(1, rows.shape.nodes, (count,), generator=generator)) * (allowed_B > 0)
    accepted_B = (torch.rand(count, generator=generator) * luck * (allowed_B + 1)).long().clamp(max=depth)
    keep_B = (accepted_B + 1) * (torch.rand(count, generator=generator) < 0.9)
    found_BD = found_BD.float() if seed % 3 == 0 else found_BD  # as torch's operations leave it
    plan = Plan(*(part.to(rows.device) for part in (found_BD.sum(-1), nodes_B, allowed_B, found_BD)))
    return plan, accepted_B.to(rows.device), keep_B.to(rows.device)


def check_learnt(shape: DynamicShape, costs: str, rounds: int, device: str = "cpu") -> list[int]:
    """Let rows learn both ways, round after round; return the sizes that they came to want."""
    pair = [Rows(shape, COSTS[costs], 5, device) for _ in range(2)]
    for rows in pair:
        rows.policy.share([1, 1, 3, 3, 3])
    seen = set[int]()
    for number in range(rounds):
        plan, *outcome = made_up(pair[1], number, luck=0.9 if number % 30 < 15 else 0.15)
        told = [rows.learn(plan, *outcome, by_kernels=by_kernels) for rows, by_kernels in zip(pair, (True, False), strict=True)]
        assert told[0].tolist() == told[1].tolist()
        found, expected = (rows.remembered() for rows in pair)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=f"{name} in round {number}")
        allowed = [rows.sizes(by_kernels) for rows, by_kernels in zip(pair, (True, False), strict=True)]
        assert [part_B.tolist() for part_B in allowed[0]] == [part_B.tolist() for part_B in allowed[1]]
        seen |= {levels for levels in allowed[0][0].tolist()}
    return sorted(seen)
