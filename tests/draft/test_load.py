"""Trees by load: a pass costs by all its tokens, so the more rows share it the fewer candidates pay."""

import pytest
import torch

from exactness.setups import DRAFT, TARGET
from polydraft.draft import TreeDrafter
from polydraft.draft.policy import RowPolicy
from polydraft.engine import Decoder, Engine, TokenSequence
from polydraft.engine.workspace import Workspace
from polydraft.lab.theory import Costs, cost_curve
from polydraft.sampling import IDLE, RowParams, SamplingParams
from polydraft.sampling.categorical import row_generator
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


def rounds_of(decoder: Decoder, count: int, steady: bool) -> tuple[list[TokenSequence], list[list[int]]]:
    engine = Engine(
        workspace=Workspace(decoder.target, decoder.drafter, RowParams((IDLE,) * count)),
        elastic=True,
    )
    sequences = [
        TokenSequence(
            prompt=[1, 2, 3 + n], params=SamplingParams(), generator=row_generator(n), max_new_tokens=60, steady=steady
        )
        for n in range(count)
    ]
    for one in sequences:
        engine.add(one)
    while not engine.done:
        engine.step()
    return sequences, [one.new_tokens for one in sequences]


@pytest.mark.slow
def test_a_crowd_drafts_less_and_steady_texts_do_not_notice() -> None:
    decoder = Decoder(TARGET, TreeDrafter(DRAFT, DynamicShape(nodes=16, depth=4), costs=COSTS), coupled=False)
    alone = [decoder.generate([1, 2, 3 + n], max_new_tokens=60, seed=[n]).token_ids for n in range(24)]
    steady, texts = rounds_of(decoder, 24, steady=True)
    assert texts == alone
    crowd, _ = rounds_of(decoder, 24, steady=False)

    def drafted(sequences: list[TokenSequence]) -> float:
        return sum(one.speculation.candidates for one in sequences) / sum(one.speculation.rounds for one in sequences)

    assert drafted(crowd) < drafted(steady) / 3


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
