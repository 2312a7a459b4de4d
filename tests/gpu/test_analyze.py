"""Acceptance and optima computed on an accelerator are those of the host."""

import pytest
import torch

from polydraft.lab.analyze._distributions import Distributions
from polydraft.lab.analyze.comparison import Comparison, takes
from polydraft.verify import SCHEMES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", list(SCHEMES))
@pytest.mark.parametrize("count", [1, 3])
def test_figures_do_not_depend_on_the_device(name: str, count: int) -> None:
    if not takes(SCHEMES.get(name), count):
        pytest.skip("takes fewer drafts")
    generator = torch.Generator().manual_seed(0)
    target_RV = torch.randn(20, 600, generator=generator).mul(2)
    draft_RV = (target_RV + torch.randn(20, 600, generator=generator)).softmax(-1)
    distributions = Distributions(target_RV.softmax(-1), draft_RV, torch.arange(20) // 2)
    rows = [
        Comparison(distributions, 1.0, device=torch.device(device), seed=0, paper_bound=True, advance=lambda _: None).row(
            name, count
        )
        for device in ("cpu", "cuda")
    ]
    for field in ("acceptance", "optimum", "paper_bound"):
        expected, got = (getattr(row, field) for row in rows)
        assert got == (None if expected is None else pytest.approx(expected, abs=1e-5))
