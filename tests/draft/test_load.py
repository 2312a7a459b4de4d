"""Trees by load: a pass costs by all its tokens, so the more rows share it the fewer candidates pay."""

import pytest
import torch

from exactness.setups import DRAFT, TARGET
from polydraft.draft import TreeDrafter
from polydraft.draft.policy import RowPolicy
from polydraft.engine import Decoder
from polydraft.lab.theory import Costs, cost_curve
from polydraft.trees import DynamicShape

# Free up to sixteen tokens, by the token from there on: like a machine whose memory is slow and whose arithmetic is not free.
COSTS = Costs(draft_level=0.05, tree_pass=cost_curve({1: 1.0, 16: 1.05, 64: 4.2}))


def sizes(loads: list[int]) -> list[int]:
    policy = RowPolicy(COSTS, len(loads), 16)
    policy.share(loads)
    policy.begin(range(len(loads)))
    falling_BM = (0.6 ** torch.arange(1.0, 16.0)).double().repeat(len(loads), 1)
    return policy.counts(falling_BM).tolist()


def test_fewer_candidates_pay_where_more_rows_share_a_pass() -> None:
    found = sizes([1, 4, 16, 64])
    assert found == sorted(found, reverse=True) and found[0] > found[1] > found[-1]
    assert sizes([1, 1]) == [found[0]] * 2


@pytest.mark.slow
def test_a_crowd_drafts_less_and_its_texts_do_not_notice() -> None:
    decoder = Decoder(TARGET, TreeDrafter(DRAFT, DynamicShape(nodes=16, depth=4), costs=COSTS))
    prompts = [[1, 2, 3 + n] for n in range(24)]
    alone = [decoder.generate(prompt, max_new_tokens=60, seed=[n]) for n, prompt in enumerate(prompts)]
    crowd = decoder.generate(prompts, max_new_tokens=60, seed=list(range(24)))
    assert [one.token_ids for one in crowd] == [one.token_ids for one in alone]
    drafted = sum(one.stats.candidates for one in alone) / sum(one.stats.passes for one in alone)
    assert crowd[0].stats.candidates / crowd[0].stats.passes < drafted / 3


def test_rows_that_share_a_pass_try_together() -> None:
    """A pass is as wide as its widest tree: one row that tries alone would make all of them pay."""
    policy = RowPolicy(COSTS, 6, 16)
    policy.share([1, 5, 5, 5, 5, 5])
    policy.begin(range(6))

    def drafting(rests: list[int]) -> list[bool]:
        for pace, rest in zip(policy.paces, rests, strict=True):
            pace.rest = rest
        return policy.drafting

    assert drafting([0, 0, 0, 3, 3, 3]) == [True, False, False, False, False, False], "who shares nothing does as it likes"
    assert drafting([2, 0, 0, 0, 3, 3]) == [False, True, True, True, False, False]
    assert drafting([0] * 6) == [True] * 6
