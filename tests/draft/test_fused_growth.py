"""The kernels that grow dynamic trees, in Triton's interpreter: the trees of torch's operations.

On a GPU they run in tests/gpu. Needs Triton (`pip install triton`) and no GPU.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from growth_cases import GREEDY, Growth, check_grown
from torch.utils._python_dispatch import TorchDispatchMode

import interpreted
from polydraft.backends.triton import growth
from polydraft.draft.growth import Grown
from polydraft.sampling import SamplingParams
from polydraft.trees import DynamicShape

INTERPRETED = interpreted.turn_on()

pytestmark = [
    pytest.mark.slow,  # a covering few run by default: tests/backends
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU"),
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning"),
]
FORMATS = [torch.float32, torch.bfloat16, torch.float16]
USUAL = DynamicShape(nodes=24, depth=4, beam=4, branch=4)
CASES = {
    "part of the tokens": Growth(USUAL, columns=5000, size=9000, known=True),
    "all tokens": Growth(USUAL, columns=2048, size=2048, known=False, rows=1),
    "padding": Growth(USUAL, columns=70, size=60, known=False),
    "too few columns": Growth(USUAL, columns=60, size=70, known=False),
    "hardly any columns": Growth(USUAL, columns=3, size=70, known=True, rows=1),
    "a front that grows": Growth(DynamicShape(nodes=40, depth=5, beam=8, branch=2), columns=300, size=300, known=False),
    "a narrow front": Growth(DynamicShape(nodes=30, depth=4, beam=2, branch=7), columns=300, size=900, known=True),
    "a chain": Growth(DynamicShape(nodes=6, depth=5, beam=1, branch=1), columns=300, size=900, known=True),
    "one level": Growth(DynamicShape(nodes=9, depth=1), columns=300, size=900, known=True),
    "more nodes than candidates": Growth(DynamicShape(nodes=60, depth=2, beam=2, branch=3), columns=300, size=300, known=False),
    "fewer nodes than a level": Growth(DynamicShape(nodes=7, depth=4), columns=300, size=300, known=False),
    "places before the root": Growth(USUAL, columns=300, size=300, known=False, lead=2),
    "a warm draft": Growth(USUAL, columns=300, size=300, known=False, temperature=1.7),
    "many rows": Growth(USUAL, columns=300, size=900, known=True, rows=7),
    "many children": Growth(DynamicShape(nodes=50, depth=3, beam=3, branch=20), columns=5000, size=9000, known=True),
    "a wide front": Growth(DynamicShape(nodes=90, depth=3, beam=16, branch=16), columns=3000, size=3000, known=False, rows=1),
}


@pytest.mark.parametrize("dtype", FORMATS[:2], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trees_are_those_of_torchs_operations(case: Growth, dtype: torch.dtype) -> None:
    check_grown(case, case.logits(dtype))


@pytest.mark.parametrize("known", [True, False], ids=["part of the tokens", "all tokens"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_has_no_distribution_gets_no_children(dtype: torch.dtype, known: bool) -> None:
    """Rows whose root, or one of whose front nodes, has no distribution, and some in which few tokens have any mass."""
    case = Growth(USUAL, columns=3000, size=3500 if known else 3000, known=known, rows=9)
    logits = case.logits(torch.float32)
    root_BV, below_BWV = logits[0][:, 0], logits[1]
    root_BV[0] = -torch.inf
    root_BV[1, 2999] = torch.nan
    root_BV[2, 5] = torch.inf
    root_BV[3] = -torch.inf
    root_BV[3, [7, 2500]] = torch.tensor([1.0, 2.0])
    below_BWV[4, 0] = torch.nan
    below_BWV[4, 1, 100] = -torch.tensor(torch.nan)
    below_BWV[5] = -torch.inf
    below_BWV[5, 2, 2047:2050] = 3.0
    below_BWV[6, :, 5] = torch.inf
    for level in logits[1:]:
        level[7] = -torch.inf
    root_BV[8] = -30000 + root_BV[8]
    tree = check_grown(case, [level.to(dtype) for level in logits])
    assert [max(depths) for depths in tree["depths_BN"]][:8] == [0, 0, 0, 4, 4, 4, 1, 1]
    counts = [sum(depth > 0 for depth in depths) for depths in tree["depths_BN"]]
    assert counts[:3] == [0, 0, 0] and counts[7] == 4 and counts[8] == 23


def test_of_equal_scores_the_first_stands_first() -> None:
    case = Growth(USUAL, columns=5000, size=5000, known=False, rows=1)
    tree = check_grown(case, [torch.zeros_like(level) for level in case.logits(torch.float32)])
    assert tree["tokens_BN"][0][1:9] == [0, 1, 2, 3, 0, 1, 2, 3] and tree["depths_BN"][0][4:6] == [1, 2]


def test_logits_may_lie_anywhere() -> None:
    """Cut out of wider rows they are read where they are; turned round they are copied."""
    case = CASES["part of the tokens"]
    logits = case.logits(torch.float32)
    wide = [torch.nn.functional.pad(level, (7, 9), value=99.0)[..., 7:-9] for level in logits]
    turned = [level.mT.contiguous().mT for level in logits]
    assert turned[0].stride(2) != 1 and wide[0].stride(1) != case.columns
    expected = case.grown(logits, by_kernels=False)["tokens_BN"]
    for other in (wide, turned):
        assert case.grown(other, by_kernels=True)["tokens_BN"] == expected


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count kernels that are launched."""
    from triton.runtime import interpreter

    seen, launch = Counter[str](), interpreter.InterpretedFunction.__getitem__

    def counted(kernel: Any, grid: Any) -> Callable[..., Any]:
        seen[kernel.fn.__name__] += 1
        return launch(kernel, grid)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", counted)
    return seen


PER_LEVEL, PER_TREE = ("rank_and_sum", "grow_level"), ("choose_candidates", "plant_chosen")


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, repetition_penalty=1.5),
        replace(GREEDY, logit_bias={3: 50.0, 4: -torch.inf}),
        replace(GREEDY, processors=(lambda ids, scores: -scores,)),
        SamplingParams(temperature=0.7, top_k=3),
    ],
    ids=["penalty", "bias", "processor", "truncation"],
)
def test_other_distributions_are_left_to_torch(params: SamplingParams, launches: Counter[str]) -> None:
    """Above temperature 0 candidates are the likeliest if the draft's temperature is 0."""
    case = Growth(USUAL, columns=60, size=90, known=True, params=params, temperature=0.0 if params.temperature else None)
    changed = check_grown(case, case.logits(torch.bfloat16))
    assert not launches
    plain = check_grown(replace(case, params=GREEDY, temperature=None), case.logits(torch.bfloat16))
    assert launches and (params.temperature > 0 or changed["tokens_BN"] != plain["tokens_BN"])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_tempered_distribution_is_known(temperature: float, launches: Counter[str]) -> None:
    params = SamplingParams(temperature=temperature)
    case = Growth(USUAL, columns=60, size=90, known=True, params=params, temperature=0.0)
    check_grown(case, case.logits(torch.float32))
    assert set(launches) == {*PER_LEVEL, *PER_TREE}


@pytest.mark.parametrize(
    "case",
    [
        Growth(DynamicShape(nodes=20, depth=2, beam=20, branch=20), columns=60, size=60, known=False),
        Growth(DynamicShape(nodes=20, depth=2, beam=2, branch=2000), columns=2500, size=2500, known=False),
    ],
    ids=["children", "branch"],
)
def test_what_is_too_large_for_a_program_is_left_to_torch(case: Growth, launches: Counter[str]) -> None:
    check_grown(case, case.logits(torch.float32))
    double = CASES["padding"]
    double.grown(double.logits(torch.float64), by_kernels=True)
    assert set(launches) <= {"soften"}, "distributions are not growth"


class Operations(TorchDispatchMode):
    """Counts those of torch's operations that a GPU would have to do."""

    views = ("alias", "detach", "empty", "expand", "new_empty", "select", "slice", "split", "unbind", "unsqueeze", "view")

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._overloadpacket.__name__
        self.seen[name] += name not in self.views
        return operation(*args, **(kwargs or {}))


def test_a_round_is_few_kernels(monkeypatch: pytest.MonkeyPatch, interpret: Callable[[bool], None]) -> None:
    from triton.runtime import interpreter

    launches = Counter[str]()

    def counted(kernel: Any, grid: Any) -> Callable[..., Any]:
        launches[kernel.fn.__name__] += 1
        return lambda *args, **options: None  # the interpreter's own operations are torch's

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", counted)
    shape, counts = DynamicShape(nodes=64, depth=6, beam=8, branch=8), list[int]()
    case = Growth(shape, columns=300, size=900, known=True, rows=1)
    for by_kernels in (False, True):
        interpret(by_kernels)
        builder = case.builder(case.logits(torch.bfloat16))
        monkeypatch.setattr(builder.source, "expand", lambda tokens_BW, *_, source=builder.source: source.next(tokens_BW))
        tail_B2, path_BD = torch.ones(1, 2).long(), torch.zeros(1, 7).long()
        builder.build(tail_B2, tail_B2)  # tables that are made once
        launches.clear()
        with Operations() as operations:
            draft = builder.build(tail_B2, tail_B2)
            if by_kernels:  # nobody has written it
                builder._grown = Grown(draft, path_BD)
            builder.places_of(path_BD)
        counts.append(operations.seen.total() + launches.total())
    assert launches == dict.fromkeys(PER_LEVEL, shape.depth) | dict.fromkeys(PER_TREE, 1)
    assert counts[0] > 250 and operations.seen.total() == 1 == operations.seen["gather"], operations.seen


def test_wrong_kernels_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score that falls too fast, and parents that are others' parents; parts of any size are right."""
    case = replace(CASES["part of the tokens"], shape=replace(USUAL, beam=3))
    logits = case.logits(torch.float32)
    check_grown(case, logits)

    grow = growth._Growing.grow

    def turned(growing: growth._Growing, logits_BWV: torch.Tensor) -> None:
        grow(growing, logits_BWV)
        growing._facts_3BC[1].clamp_(max=0)

    wrong: dict[str, Any] = {"STEP": 0.5, "_Growing.grow": turned}
    for name, value in wrong.items():
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(f"polydraft.backends.triton.growth.{name}", value)
            check_grown(case, logits)
    for strip, longest in ((32, 32), (32, 64)):
        monkeypatch.setattr("polydraft.backends.triton.growth._STRIP", strip)
        monkeypatch.setattr("polydraft.backends.triton.growth._LONGEST", longest)
        monkeypatch.setattr("polydraft.backends.triton.growth._ENOUGH", 1)
        check_grown(case, logits)
