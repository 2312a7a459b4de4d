"""Cases of sampling."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from polydraft.sampling import RowParams, SamplingParams
from polydraft.sampling.row_numbers import RowNumbers

from .harness import Case, cases


@cases("draw_independent")
def _() -> Iterator[Case]:
    def table(size: int, device: str) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(size)
        weights_RV = torch.rand(5, size, generator=generator) ** 4 * (torch.rand(5, size, generator=generator) < 0.5)
        weights_RV[3] = 0.0
        uniforms_RK = torch.rand(5, 40, generator=generator, dtype=torch.float64)
        uniforms_RK[:, 0], uniforms_RK[:, 1] = 0.0, 1 - 2**-53
        return weights_RV.to(device), uniforms_RK.to(device)

    for size in (1, 17, 255, 256, 257, 1000):
        # In float64, as the compiled code adds up.
        yield Case(f"{size} tokens", partial(table, size), for_reference=lambda weights, uniforms: (weights.double(), uniforms))


@cases("softened")
def _() -> Iterator[Case]:
    def logits(columns: int, dtype: torch.dtype, tempered: bool, device: str) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(columns)
        logits_BGV = 4 * torch.randn(2, 3, columns, generator=generator)
        logits_BGV[0, 1, 0], logits_BGV[1, 2, -1] = torch.nan, -torch.inf
        logits_BGV[1, 0, : columns // 2] = -torch.inf  # with many columns, all of a program's
        return logits_BGV.to(dtype).to(device), torch.tensor([0.7, 1.3], device=device) if tempered else None

    for columns, dtype in ((5, torch.float32), (300, torch.bfloat16), (70_000, torch.float32)):
        for tempered in (False, True):
            slow = columns > 2**16 and tempered
            yield Case(f"{columns}, {tempered}", partial(logits, columns, dtype, tempered), tolerance=1e-5, slow=slow)


@cases("perturbed")
@cases("largest_perturbed")
def _() -> Iterator[Case]:
    def scores(nodes: int, columns: int, shared: bool, partial_vocabulary: bool, device: str) -> tuple[Any, ...]:
        scores_BGV = torch.randn(2, nodes, columns, generator=torch.Generator().manual_seed(columns))
        scores_BGV[0, 0, 0] = -torch.inf
        positions_BK = (torch.arange(1 if shared else nodes).expand(2, -1) * 1000 + 2**20).contiguous().to(device)
        tokens_D = torch.arange(2 * columns).flip(0)[::2].contiguous().to(device) if partial_vocabulary else None
        keys_B, scales_B = torch.tensor([7, 2**31], device=device), torch.tensor([0.7, 0.0], device=device)
        return scores_BGV.to(device), keys_B, positions_BK, scales_B, tokens_D

    for nodes, columns in ((1, 5), (3, 300), (2, 70_000)):
        for shared, partial_vocabulary in ((True, False), (False, True)):
            arguments = partial(scores, nodes, columns, shared, partial_vocabulary)
            slow = columns > 300 and shared
            yield Case(
                f"{nodes}x{columns}, {shared}", arguments, slow=slow, tolerance=3e-5
            )  # logarithms differ in the last places


@cases("largest_kept")
def _() -> Iterator[Case]:
    rows = [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=7, top_p=0.8, min_p=0.02),
        SamplingParams(),
    ]
    whole = [SamplingParams(top_k=9000), SamplingParams(top_k=12_000, top_p=0.9), SamplingParams(top_p=0.99)]

    def truncation(columns: int, params: list[SamplingParams], kind: str, scale: float, device: str) -> tuple[Any, ...]:
        scores_BGV = 3 * torch.randn(len(params), 3, columns, generator=torch.Generator().manual_seed(columns))
        if kind == "with ties":
            scores_BGV = scores_BGV.round()
        elif kind == "not all finite":
            scores_BGV[0, 0], scores_BGV[1, 1, 0], scores_BGV[2, 1, 1:] = -torch.inf, torch.nan, -torch.inf
        numbers = RowNumbers(len(params), torch.device(device))
        numbers.write(RowParams(tuple(params)))
        keys_B, scales_B = torch.arange(len(params), device=device) + 7, torch.full((len(params),), scale, device=device)
        noise = keys_B, torch.arange(3, device=device).repeat(len(params), 1), scales_B, None
        cut, scores_BGV = [row for row, one in enumerate(params) if one.top_p < 1], scores_BGV.to(device)
        return scores_BGV, noise, scores_BGV, numbers, max(one.top_k for one in params), cut

    for name, columns, params, kind in (
        ("all kinds", 300, rows, "without ties"),
        ("with ties", 300, rows, "with ties"),
        ("few tokens", 5, rows, "with ties"),
        ("not all finite", 40, rows, "not all finite"),
        ("several strips", 10_000, rows, "without ties"),
        ("several strips with ties", 10_000, rows, "with ties"),
        ("most tokens", 20_000, whole, "without ties"),
    ):
        for scale in (1.0, 30.0):  # much noise: the first tokens found are ruled out
            slow = columns > 300 or name in ("all kinds", "few tokens") or (scale > 1 and kind != "with ties")
            yield Case(f"{name}, noise {scale:g}", partial(truncation, columns, params, kind, scale), slow=slow)
