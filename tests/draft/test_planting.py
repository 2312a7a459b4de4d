"""The kernels that write children into trees, in Triton's interpreter: the trees of torch's operations.

On a GPU they run in tests/gpu. Needs Triton (`pip install triton`) and no GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planting_cases import GREEDY, UNEQUAL, Growth, check_grown
from torch.utils._python_dispatch import TorchDispatchMode

import interpreted
from polydraft.backends.triton.drawing import MOST_CHILDREN
from polydraft.draft.static_builder import plant_largest
from polydraft.sampling import NO_TOKEN, SamplingParams
from polydraft.trees import parse_tree
from polydraft.verify import SCHEMES, Hybrid

INTERPRETED = interpreted.turn_on()

pytestmark = [
    pytest.mark.slow,  # a covering few run by default: tests/backends
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
TOP = SCHEMES.get("top")()
FORMATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take down which kernels are launched."""
    from polydraft.backends.triton import draw_kernels as _kernels

    seen: list[str] = []
    for name in ("rank_parts", "plant_largest", "plant_columns"):
        monkeypatch.setattr(_kernels, name, _Noting(getattr(_kernels, name), name, seen))
    return seen


class _Noting:
    def __init__(self, kernel: Any, name: str, seen: list[str]) -> None:
        self._kernel, self._name, self._seen = kernel, name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        self._seen.append(self._name)
        return (lambda *args, **options: None) if self._kernel is None else self._kernel[grid]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Growth("best:24x4", columns=5000, size=9000, known=True),
        Growth("4x2x1", columns=4096, size=4096, known=False, rows=3),
        Growth("1x1x1", columns=2047, size=9000, known=True, rows=1),
        Growth(UNEQUAL, columns=2049, size=2049, known=False, rows=1),
        Growth("9x1", columns=5, size=30, known=True),
        Growth("3x1", columns=30, size=50, known=False),
        Growth("3x1", columns=50, size=30, known=False),
    ],
    ids=lambda case: f"{case.tree[:9]}-{case.columns}-of-{case.size}",
)
def test_the_likeliest_are_those_of_torchs_operations(case: Growth, dtype: torch.dtype, launches: list[str]) -> None:
    tokens_BN = check_grown(case, case.logits(dtype))
    assert (tokens_BN < case.size).all() and (tokens_BN[:, 1:] != NO_TOKEN).any()
    assert launches == ["rank_parts", "plant_largest"] * parse_tree(case.tree).depth


def test_of_equal_logits_the_first_comes_first() -> None:
    case = Growth("4x1", columns=5000, size=5000, known=False, rows=1)
    logits_BNV = case.logits(torch.float32).clamp(max=0)
    logits_BNV[:, 0] = -1
    for column, zero in ((4999, -0.0), (2048, 0.0), (17, -0.0)):
        logits_BNV[0, 0, column] = zero
    assert check_grown(case, logits_BNV)[0, 1:5].tolist() == [17, 2048, 4999, 0]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_has_no_weight_is_no_child(dtype: torch.dtype) -> None:
    case = Growth("4x1", columns=3000, size=3500, known=True, rows=9)
    logits_BNV = case.logits(torch.float32)
    logits_BNV[0, 0] = -torch.inf
    logits_BNV[1, 0] = -torch.inf
    logits_BNV[1, 0, [5, 2900]] = torch.tensor([-7.0, -3.0])
    logits_BNV[2, 0, 2999] = torch.nan
    logits_BNV[3, 0, 4] = -torch.tensor(torch.nan)
    logits_BNV[4, 0, 100] = torch.inf
    logits_BNV[5, 0] = -100
    logits_BNV[5, 0, [7, 8, 9]] = torch.tensor([20.0, -39.5, -40.0])
    logits_BNV[6, 0] = torch.nan
    logits_BNV[7] = -30000 + logits_BNV[7]
    logits_BNV[8] = torch.finfo(dtype).max
    tokens_BN = check_grown(case, logits_BNV.to(dtype))
    counts = (tokens_BN[:, 1:5] != NO_TOKEN).sum(-1).tolist()
    assert counts == [0, 2, 0, 0, 0, 2, 0, 4, 4 if dtype == torch.float16 else 0]


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, repetition_penalty=1.5),
        replace(GREEDY, logit_bias={3: 50.0, 4: -torch.inf}),
        replace(GREEDY, processors=(lambda ids, scores: -scores,)),
    ],
    ids=["penalty", "bias", "processor"],
)
@pytest.mark.parametrize("known", [True, False], ids=["part of the tokens", "all tokens"])
def test_what_changes_the_order_is_left_to_torch(params: SamplingParams, known: bool, launches: list[str]) -> None:
    case = Growth("best:12x3", columns=60, size=90 if known else 60, known=known, params=params)
    changed_BN = check_grown(case, case.logits(torch.bfloat16))
    assert launches == ["plant_columns"] * 3
    plain_BN = check_grown(replace(case, params=GREEDY), case.logits(torch.bfloat16))
    assert changed_BN.tolist() != plain_BN.tolist()


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.0, ["rank_parts", "plant_largest"]), (1.0, ["soften", "draw", "plant_columns"])],
    ids=["0", "1"],
)
def test_nothing_else_is_launched(
    temperature: float, expected: list[str], monkeypatch: pytest.MonkeyPatch, interpret: Callable[[bool], None]
) -> None:
    """Of torch's operations there are those that give memory or another view of it, and no others."""
    from polydraft.backends.triton import draw_kernels as _kernels

    seen: list[str] = []
    for name in ("rank_parts", "plant_largest", "plant_columns"):
        monkeypatch.setattr(_kernels, name, _Noting(None, name, seen))
    interpret(True)

    def draw(scheme: Hybrid, distribution_RV: torch.Tensor, uniforms_RK: torch.Tensor) -> torch.Tensor:
        seen.append("draw")
        return torch.empty(uniforms_RK.shape, dtype=torch.long)

    def softened(logits_BGV: torch.Tensor, temperature_B11: torch.Tensor | None) -> torch.Tensor:
        seen.append("soften")
        return torch.empty(logits_BGV.shape)

    monkeypatch.setattr(Hybrid, "draw", draw)
    monkeypatch.setattr("polydraft.sampling.warper.softened", softened)
    case = Growth("4x2x1", columns=300, size=900, known=True, rows=1, params=SamplingParams(temperature=temperature))
    growth, logits_BNV = case.builder(), case.logits(torch.bfloat16)
    uniforms_BU, tokens_BN = torch.rand(1, growth.num_uniforms), growth.plant(torch.zeros(1, dtype=torch.long))
    with _Operations() as operations:
        for level in growth.plan.levels:
            growth.draw(level, logits_BNV[:, level.first : level.stop], tokens_BN, uniforms_BU)
    assert seen == expected * 3
    assert not operations.names - {"alias", "slice", "view", "unsqueeze", "expand", "empty", "new_empty"}


class _Operations(TorchDispatchMode):
    """Takes down the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(operation._overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def test_truncation_does_not_matter_where_only_the_order_does(launches: list[str]) -> None:
    params = replace(GREEDY, top_k=2, top_p=0.5, min_p=0.5)
    case = Growth("4x2x1", columns=300, size=900, known=True, params=params)
    check_grown(case, case.logits(torch.float32))
    assert set(launches) == {"rank_parts", "plant_largest"}


@pytest.mark.parametrize("scheme", ["hybrid", "rrs-wor", "rrs-wr", "top"])
@pytest.mark.parametrize("tree", ["best:24x4", "3x1"])
@pytest.mark.parametrize("known", [True, False], ids=["part of the tokens", "all tokens"])
def test_drawn_children_are_planted_as_by_torch(scheme: str, tree: str, known: bool, launches: list[str]) -> None:
    params = SamplingParams(temperature=0.8)
    case = Growth(tree, columns=300, size=900 if known else 300, known=known, params=params, scheme=scheme)
    check_grown(case, case.logits(torch.float32))
    assert set(launches) == ({"rank_parts", "plant_largest"} if scheme == "top" else {"plant_columns"})


def test_children_that_were_not_drawn_stay_missing() -> None:
    case = Growth("4x1", columns=4, size=900, known=True, params=SamplingParams(top_k=1), scheme="rrs-wor")
    tokens_BN = check_grown(case, case.logits(torch.float32))
    assert (tokens_BN[:, 1] != NO_TOKEN).all() and (tokens_BN[:, 2:5] == NO_TOKEN).all()


def test_kernels_take_what_they_have_room_for(interpret: Callable[[bool], None]) -> None:
    def chosen(logits_BGV: torch.Tensor, children: int) -> bool:
        nodes_GK, tokens_BN = torch.zeros(1, children).long(), torch.zeros(1, 1 + children).long()
        return plant_largest.chosen(logits_BGV, nodes_GK, tokens_BN, None, 40) is not None

    logits_BGV = torch.zeros(1, 1, 40)
    assert not chosen(logits_BGV, 4)
    interpret(True)
    assert chosen(logits_BGV, MOST_CHILDREN) and chosen(logits_BGV.bfloat16(), 4)
    assert not chosen(logits_BGV, MOST_CHILDREN + 1) and not chosen(logits_BGV.double(), 4)


def test_kernels_stay_away_from_schemes_that_draw_otherwise(launches: list[str]) -> None:
    class Second(type(TOP)):  # type: ignore[misc]
        def draw(self, draft_probs_RV: torch.Tensor, uniforms_RK: torch.Tensor) -> torch.Tensor:
            return super().draw(draft_probs_RV, uniforms_RK).roll(1, 1)

    class Tested(type(TOP)):  # type: ignore[misc]
        follows_target = False

    warm = SamplingParams()
    for scheme in (Second(), Tested()):
        case = Growth("2x1", columns=40, size=40, known=False, params=warm, scheme=scheme)
        check_grown(case, case.logits(torch.float32))
    assert set(launches) == {"plant_columns"}


def test_logits_may_lie_anywhere() -> None:
    """Cut out of wider rows they are read where they are; turned round they are copied."""
    case = Growth("3x1", columns=300, size=900, known=True)
    logits_BNV = case.logits(torch.float32)
    wide_BNV = torch.nn.functional.pad(logits_BNV, (7, 9), value=99.0)[..., 7:-9]
    turned_BNV = logits_BNV.mT.contiguous().mT
    assert turned_BNV.stride(2) != 1 and wide_BNV.stride(1) != 300
    expected_BN = case.tokens(logits_BNV, by_kernels=False)
    for other_BNV in (wide_BNV, turned_BNV):
        assert torch.equal(case.tokens(other_BNV, by_kernels=True), expected_BN)


def test_wrong_kernels_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that leaves the last columns out, and nodes that are another tree's."""
    case = Growth("4x1", columns=3000, size=3000, known=False)
    logits_BNV = case.logits(torch.float32)
    logits_BNV[:, 0, 2999] = 50
    check_grown(case, logits_BNV)
    (form,) = plant_largest.forms
    plant = form.run
    wrong: list[Callable[..., None]] = [
        lambda logits, nodes, tokens, known, size: plant(logits[..., :2048].contiguous(), nodes, tokens, known, size),
        lambda logits, nodes, tokens, known, size: plant(logits, nodes.flip(1), tokens, known, size),
    ]
    for one in wrong:
        monkeypatch.setattr(plant_largest, "forms", [replace(form, run=one)])
        with pytest.raises(AssertionError):
            check_grown(case, logits_BNV)
