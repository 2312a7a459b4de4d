"""Which attention kernels a pass may use."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polydraft.models import TabularModel
from polydraft.models.language_model import steady_attention
from polydraft.trees import causal_block


def test_a_gpu_does_without_plans_for_a_while() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with steady_attention(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    with steady_attention(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_threads_share_the_switch_and_what_else_was_switched_stays() -> None:
    before, gpu = torch.backends.cuda.cudnn_sdp_enabled(), torch.device("cuda")
    with sdpa_kernel(SDPBackend.MATH):
        first, second = steady_attention(gpu), steady_attention(gpu)
        first.__enter__()
        assert not torch.backends.cuda.flash_sdp_enabled()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "one thread is still inside"
        second.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_passes_with_a_mask_do_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.models.language_model.steady_attention", lambda _: steady_attention(torch.device("cuda")))
    seen: list[bool] = []
    context = TabularModel.random(8, 1, seed=0).start(1, 8)
    monkeypatch.setattr(context, "_forward", lambda *parts: seen.append(torch.backends.cuda.cudnn_sdp_enabled()) or parts[0])
    context.extend(torch.zeros(1, 4, dtype=torch.long), causal_block(1, 4, torch.device("cpu")))
    assert seen == [False]
