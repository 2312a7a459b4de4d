"""Cases of a round's outcome."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from polydraft.verify.node import follow_tokens
from verify.follow_cases import emitted, torch_alone, trees

from .harness import Case, cases


@cases("conclude")
def _() -> Iterator[Case]:
    def round_of(number: int, device: str) -> tuple[Any, ...]:
        draft = trees(device)[number]
        if number % 2 and draft.tokens_BN.shape[1] > 12 and draft.extra_table_BNK is None:  # the last nodes have no children
            draft = dataclasses.replace(draft, riders=3, child_table_BNK=draft.child_table_BNK * (draft.child_table_BNK < 10))
        active_B = torch.arange(len(draft.tokens_BN), device=device) != 1
        tail_B2 = torch.arange(100, 100 + 2 * len(active_B), device=device).view(-1, 2)
        with torch_alone():
            candidates = draft.without_riders()
            verdict = follow_tokens(candidates, emitted(draft, number)[:, : candidates.tokens_BN.shape[1]])
        return draft, verdict, tail_B2, active_B

    for number in range(len(trees())):
        yield Case(f"tree {number}", partial(round_of, number))
