"""Nodes that rows share out: the likeliest are kept, parents before children, whatever rows are at work."""

import pytest
import torch

from polydraft.draft.budget import keep_likeliest

CHANCES = torch.tensor([[0.9, 0.9, 0.9], [0.2, 1.0, 1.0], [0.6, 0.1, 0.9], [1.0, 1.0, 1.0]])
ALL = torch.ones(4, dtype=torch.bool)


def depths(kept: torch.Tensor, rows: int, nodes: int) -> list[int]:
    """Return how deep each row's chain is; each must be whole."""
    found = [[node % nodes for node in kept.tolist() if node // nodes == row] for row in range(rows)]
    assert all(one == list(range(len(one))) for one in found), found
    return [len(one) - 1 for one in found]


@pytest.mark.parametrize(("count", "expected"), [
    (4, [0, 0, 0, 0]), (5, [0, 0, 0, 1]), (7, [0, 0, 0, 3]), (9, [2, 0, 0, 3]), (11, [3, 0, 1, 3]), (16, [3, 3, 3, 3])
])  # fmt: skip
def test_confident_rows_have_deeper_chains(count: int, expected: list[int]) -> None:
    kept = keep_likeliest(CHANCES, ALL, count)
    assert len(kept) == count and kept.equal(kept.sort().values) and depths(kept, 4, 4) == expected


def test_rows_without_work_have_what_is_left_over() -> None:
    working = torch.tensor([True, True, True, False])
    assert depths(keep_likeliest(CHANCES, working, 13), 4, 4) == [3, 3, 3, 0]
    assert depths(keep_likeliest(CHANCES, working, 15), 4, 4) == [3, 3, 3, 2]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chance", ["any", "sure", "none", "no numbers"])
def test_a_node_is_kept_by_what_is_above_it_alone(seed: int, chance: str) -> None:
    """Whatever comes below a node decides nothing about it: else what is drawn there would not be what verification assumes."""
    generator = torch.Generator().manual_seed(seed)
    fixed = {"sure": 1.0, "none": 0.0, "no numbers": torch.nan}
    chances = torch.rand(6, 5, generator=generator) if chance == "any" else torch.full((6, 5), fixed[chance])
    for count in (6, 9, 17, 30, 36):
        working = torch.ones(6, dtype=torch.bool)
        before = depths(keep_likeliest(chances, working, count), 6, 6)
        for level in range(5):
            changed = chances.clone()
            changed[2, level:] = torch.rand(5 - level, generator=generator)
            after = depths(keep_likeliest(changed, working, count), 6, 6)
            # Chances at `level` and below are known only after the nodes down to that depth are drawn.
            assert min(before[2], level) == min(after[2], level)
