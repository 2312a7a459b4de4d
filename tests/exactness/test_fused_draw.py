"""The kernels that draw `hybrid`'s children, in Triton's interpreter: the exact distribution.

On a GPU they run in tests/gpu. Needs Triton (`pip install triton`) and no GPU.
"""

from collections.abc import Iterator

import pytest
import torch

import interpreted
from polydraft.backends.triton import interpreting
from polydraft.sampling import NO_TOKEN
from polydraft.verify.hybrid import draw_hybrid

INTERPRETED = interpreted.turn_on()

pytestmark = [
    pytest.mark.slow,  # a covering few run by default: tests/backends
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: pip install triton, and no GPU"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with interpreting():
        yield


def test_shares_of_tokens_end_where_their_distribution_says() -> None:
    generator = torch.Generator().manual_seed(1)
    distribution_V = torch.softmax(2 * torch.randn(600, generator=generator), -1)
    distribution_V[256:512] = 0
    top = distribution_V.argmax()
    rest_V = distribution_V.double().clone()
    rest_V[top] = 0
    running_V = rest_V.cumsum(0) / rest_V.sum()
    token_X = torch.tensor([0, 17, 255, 512, 590])
    for shift, after in ((-1e-9, 0), (1e-9, 1)):
        uniforms_XK = torch.stack([torch.full((5,), 0.5).double(), running_V[token_X] + shift], 1)
        children_XK = draw_hybrid(distribution_V.expand(5, -1), uniforms_XK, 0.0)
        following = [
            token if not after else next(i for i in range(token + 1, 600) if rest_V[i] > 0) for token in token_X.tolist()
        ]
        assert children_XK[:, 0].tolist() == [int(top)] * 5 and children_XK[:, 1].tolist() == following


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_a_single_weight_is_found_and_none_is_told(uniform: float) -> None:
    distribution_RV = torch.zeros(4, 300)
    distribution_RV[0, 0] = distribution_RV[1, 257] = distribution_RV[2, 299] = 1e-3
    children_RK = draw_hybrid(distribution_RV, torch.full((4, 3), uniform, dtype=torch.float64), 0.5)
    assert children_RK.tolist() == [[0] * 3, [257] * 3, [299] * 3, [NO_TOKEN] * 3]


def test_of_equal_weights_each_is_certain_once() -> None:
    children_RK = draw_hybrid(torch.full((1, 4), 0.25), torch.full((1, 4), 0.5, dtype=torch.float64), 0.0)
    assert sorted(children_RK[0].tolist()) == [0, 1, 2, 3]
