"""The kernels of temperature 0, in Triton's interpreter: which rounds they take, and that wrong ones are caught.

On a GPU they run in tests/gpu. Needs Triton (`pip install triton`) and no GPU.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import interpreted
from polydraft.backends.triton import interpreting
from polydraft.devices import values_hidden
from polydraft.sampling import SamplingParams
from polydraft.verify import SCHEMES, Fault, NodeWalk
from polydraft.verify.node import greedy_verdict

from .follow_cases import (
    awkward_logits,
    different_tokens,
    different_verdicts,
    distributions_of,
    emitted,
    random_tree,
    same,
    static_tree,
    torch_alone,
)

INTERPRETED = interpreted.turn_on()
if INTERPRETED:
    import triton.language as tl

pytestmark = [
    pytest.mark.slow,  # a covering few run by default: tests/backends
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU"),
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning"),
]
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Verify by kernels, as a device does that the host may not look at."""
    with values_hidden(), interpreting():
        yield monkeypatch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the kernels that are launched from here on."""
    from triton.runtime import interpreter

    launched, launch = list[str](), interpreter.InterpretedFunction.__getitem__

    def listed(kernel: Any, grid: Any) -> Any:
        launched.append(kernel.fn.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", listed)
    return launched


def greedy_rounds() -> list[bool]:
    """Verify trees at temperature 0 by kernels and by torch's operations; say whether the verdicts are equal."""
    found = []
    for seed, draft in enumerate([static_tree("3x2x1", 2, 5), random_tree(3, 20, 4, 7), random_tree(2, 9, 3, 2, further=True)]):
        tokens_BN = emitted(draft, seed)
        logits_BNV = torch.randn(*tokens_BN.shape, 5000, generator=torch.Generator().manual_seed(seed)).bfloat16()
        logits_BNV.scatter_(2, tokens_BN.clamp(min=0)[..., None], 9.0)
        logits_BNV[-1, 2:, 17] = torch.nan
        distributions = distributions_of(logits_BNV, GREEDY)
        with torch_alone():
            expected = greedy_verdict(draft, distributions)
        found.append(same(NodeWalk().run(SCHEMES.get("top")(), draft, distributions, torch.zeros(len(tokens_BN), 0)), expected))
    return found


def test_whole_rounds(launches: list[str]) -> None:
    assert greedy_rounds() == [True] * 3
    assert launches == ["largest_of_parts", "follow"] * 3


@pytest.mark.parametrize(
    ("params", "known"),
    [
        (GREEDY, True),
        (SamplingParams(temperature=0, repetition_penalty=1.3), False),
        (SamplingParams(temperature=0, logit_bias={3: 2.0}), False),
        (SamplingParams(), False),
    ],
)
def test_what_changes_the_order_of_logits_is_left_to_torch(params: SamplingParams, known: bool, launches: list[str]) -> None:
    draft = static_tree("2x1", 2, 0)
    distributions = distributions_of(
        torch.randn(*draft.tokens_BN.shape, 30, generator=torch.Generator().manual_seed(3)), params
    )
    if params.temperature == 0:
        with torch_alone():
            expected = greedy_verdict(draft, distributions)
        assert same(greedy_verdict(draft, distributions), expected)
        assert launches == ([*["largest_of_parts"][: int(known)], "follow"])


def test_a_broken_draft_is_named_too() -> None:
    draft = static_tree("2x1", 3, 2)
    distributions = (torch.full((3, 1, 4), 0.25), torch.full((3, 2, 4), 0.25))
    distributions[0][1] = torch.nan
    draft = dataclasses.replace(draft, distributions=distributions)
    logits_BNV = torch.zeros(*draft.tokens_BN.shape, 4)
    logits_BNV[2] = torch.nan
    assert greedy_verdict(draft, distributions_of(logits_BNV, GREEDY)).fault_B.tolist() == [
        Fault.NONE,
        Fault.DRAFT,
        Fault.TARGET,
    ]


def last_of_equals(logits_C, token_C):
    bits_C = tl.where(logits_C != logits_C, 2**31 - 1, (logits_C * 1000).to(tl.int32))
    return ((bits_C.to(tl.int64) + 2**31) << 31) | (-token_C + (2**31 - 1)).to(tl.int64)


def numbers_alone(key_N):
    return -(key_N & (2**31 - 1)) + (2**31 - 1)


def test_wrong_keys_are_caught(kernels: pytest.MonkeyPatch) -> None:
    from polydraft.backends.triton import follow_kernels as _follow_kernels

    for name, wrong in (("_keys_of", last_of_equals), ("_token_of", numbers_alone)):
        with kernels.context() as patch:
            patch.setattr(_follow_kernels, name, wrong)
            assert different_tokens(9000, torch.float32) > 0


def without_further_children(ways: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(way_N, offered_N, table, tokens, token_N, nodes, count, earlier, *others):
        if int(earlier) > 0:
            return way_N, offered_N
        return ways(way_N, offered_N, table, tokens, token_N, nodes, count, earlier, *others)

    return wrong


def nothing_offered(ways: Callable[..., Any]) -> Callable[..., Any]:
    return lambda way_N, offered_N, *others: (ways(way_N, offered_N, *others)[0], offered_N)


@pytest.mark.parametrize("wrong", [without_further_children, nothing_offered])
def test_wrong_ways_are_caught(wrong: Callable[..., Any], kernels: pytest.MonkeyPatch) -> None:
    from polydraft.backends.triton import follow_kernels as _follow_kernels

    kernels.setattr(_follow_kernels, "_ways", wrong(_follow_kernels._ways))
    assert different_verdicts() > 0


def test_awkward_logits_are_what_they_say() -> None:
    logits_RV = awkward_logits(9000, torch.float32)
    tokens_R = distributions_of(logits_RV[:, None], GREEDY).likeliest(torch.zeros(16).long(), torch.zeros(16, 0).long())
    assert tokens_R[:6].tolist() == [4500, 1, 0, 8999, 3, 3]
    assert tokens_R[6:12].tolist() == [-1] * 6 and tokens_R[12] == 8999
