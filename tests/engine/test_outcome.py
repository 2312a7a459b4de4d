"""A round's outcome, and whole rounds by kernels in Triton's interpreter: what torch's operations bring, in every entry.

Needs Triton (`pip install triton`) and no GPU; on a GPU the kernels run in tests/gpu.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interpreted
from exactness.setups import GRAM_PROMPT, RAGGED_PROMPTS, make_decoder
from polydraft.draft import DRAFTERS
from polydraft.engine import Decoder
from polydraft.engine.outcome import NO_TOKEN, Outcome, RowOutcome, conclude
from polydraft.sampling import SamplingParams
from polydraft.verify.node import follow_tokens
from verify.follow_cases import random_tree, torch_alone

INTERPRETED = interpreted.turn_on()
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU")
GREEDY = SamplingParams(temperature=0)
PROMPTS = [[*prompt, *GRAM_PROMPT] for prompt in RAGGED_PROMPTS[:2]]


def test_rows_are_what_was_packed() -> None:
    draft = random_tree(2, 9, 2, 4)
    tokens_BN = torch.full_like(draft.tokens_BN, 50)
    child = int(draft.child_table_BNK[0, 0, 1])
    draft.tokens_BN[0, draft.child_table_BNK[0, 0, 0]], draft.tokens_BN[0, child], tokens_BN[0, 0] = 1, 2, 2
    tail_B2 = torch.tensor([[7, 8], [9, 10]])
    outcome, keep_B = conclude(draft, follow_tokens(draft, tokens_BN), tail_B2, torch.tensor([True, False]))
    reported_BX = torch.cat([outcome.packed_BX, torch.tensor([[5], [6]])], dim=1)
    (row, other), reports = Outcome(reported_BX, outcome.depth).rows()
    drafted = [int((row_N[1:] != NO_TOKEN).sum()) for row_N in draft.tokens_BN]
    assert row == RowOutcome([2, 50], 1, row.offered, 0, int(draft.longest()[0]), 1, drafted[0])
    assert (other.tokens, other.accepted, other.branch, other.drafted) == ([50], 0, -1, drafted[1])
    assert tail_B2.tolist() == [[2, 50], [10, 50]] and keep_B.tolist() == [2, 0] and reports == [[5], [6]]


def rounds_of(decoder: Decoder, sampling: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """Return texts, and what each round brought."""
    seen, rows = list[Any](), Outcome.rows

    def watched(outcome: Outcome) -> Any:
        seen.append(rows(outcome))
        return seen[-1]

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(Outcome, "rows", watched)
        results = decoder.generate(PROMPTS, sampling=sampling, max_new_tokens=9, seed=5)
    return [result.token_ids for result in results], seen


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, hide_values: Callable[[], None], interpret: Callable[[bool], None]) -> list[str]:
    """Run kernels where the host may not look, and list those of verdicts and outcomes."""
    from triton.runtime import interpreter

    names, launch = list[str](), interpreter.InterpretedFunction.__getitem__
    hide_values()
    interpret(True)

    def listed(kernel: Any, grid: Any) -> Callable[..., Any]:
        if kernel.fn.__module__.endswith(".follow_kernels"):
            names.append(kernel.fn.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", listed)
    return names


@needs_interpreter
@pytest.mark.parametrize(
    ("drafter", "sampling", "expected"),
    [
        ("model", GREEDY, ["largest_of_parts", "follow", "conclude"]),
        pytest.param("none", GREEDY, ["largest_of_parts", "follow", "conclude"], marks=pytest.mark.slow),
        ("lookup+model", GREEDY, ["largest_of_parts", "follow", "conclude"]),
        ("self-draft", GREEDY, ["largest_of_parts", "follow", "conclude"]),
        (next(name for name in DRAFTERS if name.startswith("dynamic")), GREEDY, ["largest_of_parts", "follow", "conclude"]),
        pytest.param("model", SamplingParams(), ["follow", "conclude"], marks=pytest.mark.slow),  # "mixed" has rows like it
        ("model", [GREEDY, SamplingParams()], ["follow", "largest_of_parts", "follow", "conclude"]),
        ("model", SamplingParams(temperature=0, presence_penalty=0.5), ["follow", "conclude"]),
    ],
    ids=["tree", "no draft", "two trees", "riders", "dynamic", "drawn", "mixed", "penalties"],
)
def test_rounds_by_kernels(
    drafter: str, sampling: Any, expected: list[str], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polydraft.engine.round._FEW_NODES", 1000)  # as in half precision
    decoder = make_decoder(drafter=drafter, walk="node" if drafter == "model" else "auto")
    by_kernels = rounds_of(decoder, sampling, monkeypatch)
    assert launched[: len(expected)] == expected and len(launched) % len(expected) == 0
    launched.clear()
    with torch_alone():
        assert rounds_of(decoder, sampling, monkeypatch) == by_kernels
    assert not launched
    assert any(row.accepted for rows, _ in by_kernels[1] for row in rows) == (drafter != "none")
