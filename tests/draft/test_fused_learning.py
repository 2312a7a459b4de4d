"""The kernels by which rows learn of rounds, in Triton's interpreter: what torch's operations remember.

On a GPU they run in tests/gpu. Needs Triton (`pip install triton`) and no GPU.
"""

from typing import Any

import learning_cases
import pytest
from growth_cases import as_on_a_gpu
from learning_cases import COSTS, check_learnt

import interpreted
from polydraft.trees import DynamicShape

INTERPRETED = interpreted.turn_on()

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU")


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    for name, rounds in {"_FIRST_REST": 5, "SHORTEST_REST": 3, "LONGEST_REST": 9}.items():
        monkeypatch.setattr(f"polydraft.draft.policy.{name}", rounds)


@pytest.mark.parametrize("costs", COSTS)
def test_rows_remember_what_torchs_operations_do(costs: str) -> None:
    sizes = check_learnt(DynamicShape(nodes=64, depth=8), costs, rounds=45)
    assert costs == "cheap" or 0 in sizes, "no row rested"
    assert len(sizes) > 1 + (costs == "middling"), "all rows wanted one size"


@pytest.mark.parametrize("shape", [DynamicShape(nodes=64, depth=6, adaptive=False), DynamicShape(nodes=3, depth=1)], ids=str)
def test_rows_of_one_size_learn_too(shape: DynamicShape) -> None:
    check_learnt(shape, "middling", rounds=20)


@pytest.mark.parametrize(
    ("name", "value"), [("policy._MEMORY", 0.9), ("policy._LOSING", 0.5), ("sizes._GROWTH", 0.9), ("sizes._STAY", 2.0)]
)
def test_wrong_numbers_are_caught(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    learn = learning_cases.learn_round

    def wrong(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(f"polydraft.draft.{name}", value)
            return learn(*args)

    monkeypatch.setattr(learning_cases, "learn_round", wrong)
    with pytest.raises(AssertionError):
        check_learnt(DynamicShape(nodes=64, depth=8), "middling", rounds=45)
